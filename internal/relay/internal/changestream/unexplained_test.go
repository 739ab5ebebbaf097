package changestream

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/relay/changes"
)

// TestUnexplainedErrorsAreGivenAMinute checks both limits. Five attempts alone may end within a second, too
// early for a temporary fault. A minute alone may contain only one attempt.
func TestUnexplainedErrorsAreGivenAMinute(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]retry.Policy{
		"quick": {Base: time.Millisecond, Cap: 100 * time.Millisecond},
		"slow":  {Base: 10 * time.Minute, Cap: 10 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				attempts := 0
				s := &Stream{pace: defaultPace, cfg: Config{
					Scope: scopeOf(t, "a.b"), Log: slog.New(slog.DiscardHandler),
					Metrics: Metrics{Restart: func(string) { attempts++ }},
				}}

				r := &run{stream: s, backoff: policy.Start()}
				faults := []error{mongo.CommandError{Code: 4242}, errClosed}
				progressed := false
				for begin := time.Now(); ; {
					if err := r.handleError(context.Background(), faults[attempts%2]); err != nil {
						var gap *changes.GapError
						if !errors.As(err, &gap) || gap.Reason != changes.GapUnexplained {
							t.Fatal(err)
						}
						if took := time.Since(begin); !progressed || took < time.Minute || attempts < unknownAttempts-1 {
							t.Errorf("gap after %s and %d restarts, want at least a minute and %d restarts",
								took, attempts, unknownAttempts-1)
						}
						return
					}
					if !progressed && (time.Since(begin) > 50*time.Second || attempts == unknownAttempts-2 && name == "slow") {
						progressed = true
						r.recordProgress(true, true)
						begin, attempts = time.Now(), 0
					}
				}
			})
		})
	}
}
