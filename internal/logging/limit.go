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
	limitKinds  = 500 // with a counter of their own; further kinds share one
)

// Limit returns a handler that passes at most 100 lines of one kind to h in ten seconds. The kind is the level
// and the message. The handler counts the other lines. At the end of the ten seconds it writes one line with
// the same message and their number as `suppressed`. So a service that inserts many broken envelopes cannot
// fill the disk. Lines below level info are not limited.
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

// allowLine counts a line and reports whether it may be written now.
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

		n = c.kinds[kind]
		if n == nil {
			n = &lineCount{}
			c.kinds[kind] = n
		}
	}

	if now.After(n.end) {
		n.end, n.lines = now.Add(limitWindow), 0
	}
	n.lines++
	if n.lines <= limitLines {
		return true
	}

	n.suppressed++
	if n.suppressed == 1 {
		time.AfterFunc(n.end.Sub(now), func() { c.writeSummary(kind) })
	}
	return false
}

// dropExpiredLocked removes the kinds whose window has ended. The caller must hold the lock.
func (c *lineCounts) dropExpiredLocked(now time.Time) {
	for kind, n := range c.kinds {
		if now.After(n.end) && n.suppressed == 0 {
			delete(c.kinds, kind)
		}
	}
}

// writeSummary writes a line with the number of suppressed lines of the kind, and resets the number.
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
