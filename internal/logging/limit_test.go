package logging

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// However many lines of one kind are logged, a hundred of them and one line with the number of the others are written in ten
// seconds. Other kinds, and the same kind afterwards, are not held back.
func TestLinesOfOneKindAreLimited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(Limit(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))
		for i := range 70_000 {
			log.With("epoch", 1).Warn("an envelope is dead", "topic", fmt.Sprint(i))
		}
		log.Info("another kind")
		for range 200 {
			log.Debug("details")
		}
		<-time.After(limitWindow + time.Second)
		synctest.Wait()
		log.Warn("an envelope is dead", "topic", "later")

		text := out.String()
		for what, n := range map[string]int{
			"envelope is dead": limitLines + 2, "suppressed=69900": 1, "another kind": 1, "details": 200, "topic=later": 1,
		} {
			if got := strings.Count(text, what); got != n {
				t.Errorf("%d lines with %q, want %d", got, what, n)
			}
		}
	})
}

// Messages that hold variable text are kinds of their own. Their number is bounded, too.
func TestKindsOfLinesAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(Limit(slog.NewTextHandler(&out, nil)))
		for i := range 70_000 {
			log.Error(fmt.Sprint("kind ", i))
		}
		<-time.After(limitWindow + time.Second)
		synctest.Wait()
		if n := strings.Count(out.String(), "\n"); n > limitKinds+limitLines+1 {
			t.Errorf("%d lines", n)
		}
	})
}
