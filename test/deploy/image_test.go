package deploy

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestImageRunsAsNobody checks that the image contains one static program without a shell and runs as
// an unprivileged user.
func TestImageRunsAsNobody(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"Dockerfile", filepath.Join("deploy", "image", "Dockerfile")} {
		text := string(readRepoFile(t, file))
		stage := text[strings.LastIndex(text, "\nFROM ")+1:]
		if !strings.HasPrefix(stage, "FROM gcr.io/distroless/static-debian12:nonroot@") ||
			!strings.Contains(stage, "\nUSER 65532:65532\n") || strings.Contains(stage, "\nRUN ") {
			t.Errorf("the last stage of %s has a wrong base image or user, or a RUN step:\n%s", file, stage)
		}
	}
}
