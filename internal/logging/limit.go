package logging

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// The bounds of [Limit].
const (
	limitWindow = 10 * time.Second
	limitLines  = 100 // of one kind in a window
	limitKinds  = 500 // that are counted apart; further ones share a count
)

// Limit returns a handler that passes at most 100 lines of one kind, which is a level and a message, to h in ten seconds. It
// counts the others, and at the end of the ten seconds it writes one line with the same message and their number as
// `suppressed`. A service that inserts many broken envelopes cannot fill the disk with it. Lines below level info always pass.
func Limit(h slog.Handler) slog.Handler {
	return &limited{Handler: h, lines: &lineCounts{base: h, kinds: make(map[kindOfLine]*lineCount)}}
}

type limited struct {
	slog.Handler
	lines *lineCounts
}

// Handle implements [slog.Handler].
func (l *limited) Handle(ctx context.Context, r slog.Record) error {
	//nolint:contextcheck // a summary belongs to many lines, and so to no single context
	if r.Level >= slog.LevelInfo && !l.lines.allowLine(kindOfLine{r.Level, r.Message}, time.Now()) {
		return nil
	}
	return l.Handler.Handle(ctx, r)
}

// WithAttrs implements [slog.Handler].
func (l *limited) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limited{l.Handler.WithAttrs(attrs), l.lines}
}

// WithGroup implements [slog.Handler].
func (l *limited) WithGroup(name string) slog.Handler {
	return &limited{l.Handler.WithGroup(name), l.lines}
}

type kindOfLine struct {
	level   slog.Level
	message string
}

// lineCounts counts the lines of each kind.
type lineCounts struct {
	base slog.Handler

	mu    sync.Mutex
	kinds map[kindOfLine]*lineCount
}

type lineCount struct {
	end               time.Time // of the window
	lines, suppressed int
}

// allowLine reports whether a line may be written now.
func (c *lineCounts) allowLine(kind kindOfLine, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.kinds[kind]
	if n == nil {
		if len(c.kinds) >= limitKinds {
			c.dropExpiredLocked(now)
		}
		if len(c.kinds) >= limitKinds {
			kind.message = "more kinds of lines"
		}
		if n = c.kinds[kind]; n == nil {
			n = &lineCount{}
			c.kinds[kind] = n
		}
	}

	if now.After(n.end) {
		n.end, n.lines = now.Add(limitWindow), 0
	}
	if n.lines++; n.lines <= limitLines {
		return true
	}
	if n.suppressed++; n.suppressed == 1 {
		time.AfterFunc(n.end.Sub(now), func() { c.writeSummary(kind) })
	}
	return false
}

// dropExpiredLocked drops the kinds whose window is over. The lock is held.
func (c *lineCounts) dropExpiredLocked(now time.Time) {
	for kind, n := range c.kinds {
		if now.After(n.end) && n.suppressed == 0 {
			delete(c.kinds, kind)
		}
	}
}

// writeSummary writes how many lines of a kind were not written.
func (c *lineCounts) writeSummary(kind kindOfLine) {
	c.mu.Lock()
	n := c.kinds[kind]
	count := n.suppressed
	n.suppressed = 0
	c.mu.Unlock()

	r := slog.NewRecord(time.Now(), kind.level, kind.message, 0)
	r.AddAttrs(slog.Int("suppressed", count), slog.Duration("in", limitWindow))
	_ = c.base.Handle(context.Background(), r)
}
