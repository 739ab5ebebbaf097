package deploy

import (
	"strings"
	"testing"
)

// TestImageRunsAsNobody checks that the image of the Dockerfile contains one static program without a shell and runs as an
// unprivileged user. .ci/check_image.py checks the image of a release.
func TestImageRunsAsNobody(t *testing.T) {
	t.Parallel()
	text := string(readRepoFile(t, "Dockerfile"))
	stage := text[strings.LastIndex(text, "\nFROM ")+1:]
	if !strings.HasPrefix(stage, "FROM gcr.io/distroless/static-debian12:nonroot@") ||
		!strings.Contains(stage, "\nUSER 65532:65532\n") || strings.Contains(stage, "\nRUN ") {
		t.Errorf("the last stage has a wrong base image or user, or a RUN step:\n%s", stage)
	}
}
