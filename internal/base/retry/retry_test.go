package retry

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWaitsAreFullJitterUpToTheCap(t *testing.T) {
	t.Parallel()
	p := Policy{Base: 50 * time.Millisecond, Cap: 5 * time.Second}
	for _, next := range map[string]func() func() time.Duration{
		"state":     func() func() time.Duration { b := p.Start(); return b.Next },
		"stateless": func() func() time.Duration { n := -1; return func() time.Duration { n++; return p.Delay(n) } },
	} {
		var longest, shortest [12]time.Duration
		for range 400 {
			draw := next()
			for n := range longest {
				d := draw()
				bound := min(p.Base<<n, p.Cap)
				if d < 0 || d > bound+time.Millisecond {
					t.Fatalf("wait %d is %v, outside [0, %v]", n, d, bound)
				}
				longest[n] = max(longest[n], d)
				if shortest[n] == 0 || d < shortest[n] {
					shortest[n] = d
				}
			}
		}

		for n := range longest {
			bound := min(p.Base<<n, p.Cap)
			if longest[n] < bound*8/10 || shortest[n] > bound*2/10 {
				t.Errorf("wait %d spans [%v, %v] of [0, %v]: not full jitter", n, shortest[n], longest[n], bound)
			}
		}
	}
}

func TestDelayOfAHugeAttempt(t *testing.T) {
	t.Parallel()
	if d := (Policy{Base: time.Second, Cap: time.Minute}).Delay(1 << 20); d < 0 || d > time.Minute {
		t.Errorf("delay = %v", d)
	}
}

func TestResetStartsOver(t *testing.T) {
	t.Parallel()
	b := Policy{Base: time.Millisecond, Cap: time.Hour}.Start()
	for range 20 {
		b.Next()
	}
	b.Reset()
	if d := b.Next(); d > time.Millisecond {
		t.Errorf("first wait after a reset = %v", d)
	}
	if b.Attempts() != 1 {
		t.Errorf("attempts = %d", b.Attempts())
	}
}

func TestWaitEndsWithTheContextsCause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("lease lost")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { cancel(cause) })

		started := time.Now()
		if err := Sleep(ctx, time.Hour); !errors.Is(err, cause) || time.Since(started) != time.Minute {
			t.Errorf("Sleep = %v after %v", err, time.Since(started))
		}

		if err := (Policy{Base: time.Hour, Cap: time.Hour}).Start().Wait(ctx); !errors.Is(err, cause) {
			t.Errorf("Wait = %v", err)
		}
	})
}

func TestDo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		boom, fatal := errors.New("boom"), errors.New("fatal")
		p := Policy{Base: time.Second, Cap: time.Minute}

		calls, reported := 0, 0
		err := Do(t.Context(), p, func(context.Context) error {
			if calls++; calls < 4 {
				return boom
			}
			return nil
		}, func(err error, _ time.Duration) {
			if reported++; !errors.Is(err, boom) {
				t.Errorf("the error %v is reported, want %v", err, boom)
			}
		})
		if err != nil || calls != 4 || reported != 3 {
			t.Errorf("%v after %d calls and %d reports, want no error, 4 and 3", err, calls, reported)
		}

		calls = 0
		if err := Do(t.Context(), p, func(context.Context) error { calls++; return Permanent(fatal) }, nil); !errors.Is(err, fatal) || calls != 1 {
			t.Errorf("permanent: %v after %d calls", err, calls)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := Do(ctx, p, func(context.Context) error { return boom }, nil); !errors.Is(err, boom) {
			t.Errorf("after the deadline: %v, want the last error", err)
		}

		calls = 0
		if err := Do(ctx, p, func(context.Context) error { calls++; return nil }, nil); !errors.Is(err, context.DeadlineExceeded) || calls != 0 {
			t.Errorf("dead context: %v, calls %d", err, calls)
		}
	})
}
