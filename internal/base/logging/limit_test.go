package logging

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// However many lines of one kind are logged, a hundred of them and one line with the number of the others are written in ten
// seconds. Other kinds, and the same kind afterwards, are not held back.
func TestLinesOfOneKindAreLimited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(Limit(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}), nil))
		for i := range 7_000 {
			log.With("epoch", 1).Warn("an envelope is dead", "id", i)
		}
		log.Info("another kind")
		for range 200 {
			log.Debug("details")
		}
		<-time.After(limitWindow + time.Second)
		synctest.Wait()
		log.Warn("an envelope is dead", "id", "later")

		text := out.String()
		for what, n := range map[string]int{
			"envelope is dead": limitLines + 2, "suppressed=6900": 1, "another kind": 1, "details": 200, "id=later": 1,
		} {
			if got := strings.Count(text, what); got != n {
				t.Errorf("%d lines with %q, want %d", got, what, n)
			}
		}
	})
}

// A loop that fails every seven seconds for three minutes writes its problem at once, and then once a minute with the number of
// repeats. Other problems of the same kind are written, and lines of level info are not problems.
func TestAProblemIsWrittenOnceAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(Limit(slog.NewTextHandler(&out, nil), nil))
		for i := range 26 {
			read := fmt.Errorf("read tcp 127.0.0.1:%d->127.0.0.1:9092: connection reset by peer", 40_000+i)
			log.With("slot", "0of2").Warn("cannot open topics; trying again", "error", read, "wait", time.Duration(i), "records", i)
			if i == 13 {
				log.With("slot", "1of2").Warn("cannot open topics; trying again", "error", read)
				log.With("slot", "0of2").Warn("cannot open topics; trying again", "error", errors.New("not a leader"))
			}
			log.Info("took over", "again", true)
			<-time.After(7 * time.Second)
		}
		<-time.After(repeatWindow)
		synctest.Wait()

		text := out.String()
		for what, n := range map[string]int{
			"slot=0of2 error=\"read": 4, "repeated=8": 2, "repeated=9": 1, "slot=1of2": 1, "not a leader": 1, "took over": 26,
		} {
			if got := strings.Count(text, what); got != n {
				t.Errorf("%d lines with %q, want %d:\n%s", got, what, n, text)
			}
		}
	})
}

// Messages that contain variable text are separate kinds. Their number is bounded, too.
func TestKindsOfLinesAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(Limit(slog.NewTextHandler(&out, nil), nil))
		for i := range 4 * limitKinds {
			log.Error(fmt.Sprint("kind ", i))
		}

		<-time.After(limitWindow + time.Second)
		synctest.Wait()
		if n := strings.Count(out.String(), "\n"); n > limitKinds+limitLines+1 {
			t.Errorf("%d lines, want at most %d", n, limitKinds+limitLines+1)
		}
	})
}

// All failures during an outage are one problem. The first line about it is written, and the next one after a minute.
func TestAnOutageIsOneProblem(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out stacktest.Buffer
		away := errors.New("no server")
		log := slog.New(Limit(slog.NewTextHandler(&out, nil), func(err error) string {
			if errors.Is(err, away) {
				return "the server is away"
			}
			return ""
		}))

		for range 3 {
			log.With("slot", "0of1").Warn("cannot renew the lease; work stops if it expires", "error", fmt.Errorf("writing: %w", away))
			log.Error("cannot read the stream", "reason", away)
			log.Warn("cannot write an entry", "error", errors.New("not allowed"))
		}
		log.Warn("work is suspended")

		if n := strings.Count(out.String(), "\n"); n != 3 || !strings.Contains(out.String(), "cannot renew the lease") {
			t.Errorf("%d lines during the outage:\n%s", n, out.String())
		}

		<-time.After(repeatWindow + time.Second)
		synctest.Wait()
		if n := strings.Count(out.String(), "no server"); n != 2 || !strings.Contains(out.String(), "repeated=5") {
			t.Errorf("%d lines about the outage after a minute:\n%s", n, out.String())
		}
	})
}
