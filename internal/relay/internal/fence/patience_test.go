package fence

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrelay/outrelay/internal/kafkawire"
)

// TestAStepThatWaitsIsReportedUntilItEnds: whether the step succeeds, fails or is interrupted, its wait ends.
func TestAStepThatWaitsIsReportedUntilItEnds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		after time.Duration // when the attempts end
		last  error
		waits bool
	}{
		"success":     {time.Minute, nil, true},
		"failure":     {time.Minute, kafkawire.TransactionalIDAuthorizationFailed, true},
		"the end":     {time.Minute, context.Canceled, true},
		"soon enough": {4 * time.Second, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				start := time.Now()
				var first, last error
				var events, ends int
				session := newSession(nil, In{
					Event: func(Event) { events++ },
					Waiting: func(err error, began time.Time) {
						last = err
						if err == nil {
							ends++
						}
						if first == nil {
							first = err
							if waited := time.Since(began); waited < reportAfter || !began.Equal(start) {
								t.Errorf("reported after %s of a step that began at %s", waited, began)
							}
						}
					},
				})

				err := session.patience().retry(ctx, "a step", func() error {
					switch {
					case time.Since(start) < c.after:
						return kafkawire.CoordinatorNotAvailable
					case errors.Is(c.last, context.Canceled):
						cancel()
					}
					return c.last
				})
				if !errors.Is(err, c.last) {
					t.Errorf("error %v, want %v", err, c.last)
				}
				if c.waits && (first == nil || !strings.HasPrefix(first.Error(), "a step: ") || !errors.Is(first, kafkawire.CoordinatorNotAvailable)) {
					t.Errorf("reported %v, want the step and its last error", first)
				}
				want := 0
				if c.waits {
					want = 1
				}
				if events != want || ends != want || last != nil {
					t.Errorf("%d events, %d ends, at last %v; want %d, %d, none", events, ends, last, want, want)
				}
			})
		})
	}
}
