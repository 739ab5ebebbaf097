package config

import (
	"strings"
	"testing"
)

func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"0", "-1", "1000001"} {
		got := loadProblems(t, "retry: { max_attempts: "+bad+" }\n", base, nil)
		if len(got) != 1 || !strings.HasPrefix(got[0], "retry.max_attempts: found "+bad+";") {
			t.Errorf("%s: %q", bad, got)
		}
	}
	if c := mustLoad(t, "", base, []string{"retry.max_attempts=1"}); c.Retry.MaxAttempts != 1 {
		t.Errorf("one attempt is %d", c.Retry.MaxAttempts)
	}
}
