package deploy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestImageRunsAsNobody checks that the image contains one static program without a shell and runs as
// an unprivileged user.
func TestImageRunsAsNobody(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "..", "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}

	var final []string
	for line := range strings.SplitSeq(string(text), "\n") {
		if strings.HasPrefix(line, "FROM ") {
			final = nil
		}
		final = append(final, line)
	}

	stage := strings.Join(final, "\n")
	if !strings.HasPrefix(stage, "FROM gcr.io/distroless/static") || !strings.Contains(final[0], ":nonroot") || !strings.Contains(stage, "\nUSER 65532:65532\n") || strings.Contains(stage, "\nRUN ") {
		t.Errorf("the last stage has a wrong base image or user, or a RUN step:\n%s", stage)
	}

	for _, flag := range []string{"CGO_ENABLED=0", "-trimpath", "-buildvcs=false", "-buildid="} {
		if !strings.Contains(string(text), flag) {
			t.Errorf("the build does not use %s", flag)
		}
	}
}
