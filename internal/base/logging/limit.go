package logging

import (
	"context"
	"log/slog"
	"regexp"
	"sync"
	"time"
)

// The bounds of [Limit].
const (
	limitWindow  = 10 * time.Second
	limitLines   = 100 // of one kind in limitWindow
	repeatWindow = time.Minute
	limitKinds   = 500 // with separate counters; further kinds share one
)

// Limit returns a handler that passes each problem to handler once a minute, and at most 100 lines of one kind in ten
// seconds. A problem is a line of level warn or error: lines with the same level, message and attributes are the same
// problem. Durations, counts (`records`) and local ports do not distinguish problems. The kind of a line is its level
// and message. The handler counts the other lines. At the end of the minute it writes the problem again with their
// number as `repeated`, and at the end of the ten seconds the message with their number as `suppressed`. So a loop
// that tries again does not repeat its reason, and a service that inserts many broken envelopes cannot fill the disk.
// Lines below level info are not limited.
//
// An outage is one problem, whatever fails because of it: problemOf returns the same text for each of its errors. It
// returns "" for other errors, and may be nil.
func Limit(handler slog.Handler, problemOf func(error) string) slog.Handler {
	return &limited{
		Handler: handler, base: handler, problemOf: problemOf,
		repeats: &lineCounts{window: repeatWindow, most: 1, kinds: make(map[kindOfLine]*lineCount)},
		lines:   &lineCounts{window: limitWindow, most: limitLines, kinds: make(map[kindOfLine]*lineCount)},
	}
}

type limited struct {
	slog.Handler
	base           slog.Handler // without attributes
	attrs          string       // of the handler, as in problemText
	problemOf      func(error) string
	repeats, lines *lineCounts
}

// Handle implements [slog.Handler]. A summary belongs to many lines, and so to no single context.
//
//nolint:contextcheck // see above
func (l *limited) Handle(ctx context.Context, entry slog.Record) error {
	if entry.Level >= slog.LevelWarn {
		problem := kindOfLine{entry.Level, localPort.ReplaceAllString(entry.Message+l.attrs+problemText(entry), "")}
		if shared := l.sharedProblem(entry); shared != "" {
			problem = kindOfLine{text: shared}
		}
		again := func(n int) { writeSummary(l.Handler, entry.Clone(), slog.Int("repeated", n), repeatWindow) }
		if !l.repeats.allowLine(problem, time.Now(), again) {
			return nil
		}
	}

	if entry.Level >= slog.LevelInfo {
		others := func(n int) {
			writeSummary(l.base, slog.NewRecord(time.Time{}, entry.Level, entry.Message, 0), slog.Int("suppressed", n), limitWindow)
		}
		if !l.lines.allowLine(kindOfLine{entry.Level, entry.Message}, time.Now(), others) {
			return nil
		}
	}
	return l.Handler.Handle(ctx, entry)
}

// sharedProblem returns the problem of the outage that an error of entry belongs to, or "".
func (l *limited) sharedProblem(entry slog.Record) (problem string) {
	if l.problemOf == nil {
		return ""
	}
	entry.Attrs(func(attr slog.Attr) bool {
		if err, ok := attr.Value.Any().(error); ok {
			problem = l.problemOf(err)
		}
		return problem == ""
	})
	return problem
}

// writeSummary writes entry with the number of lines that a window has suppressed.
func writeSummary(handler slog.Handler, entry slog.Record, count slog.Attr, window time.Duration) {
	entry.Time = time.Now()
	entry.AddAttrs(count, slog.Duration("in", window))
	_ = handler.Handle(context.Background(), entry)
}

// WithAttrs implements [slog.Handler].
func (l *limited) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *l
	with.Handler = l.Handler.WithAttrs(attrs)
	for _, a := range attrs {
		with.attrs += attrText(a)
	}
	return &with
}

// WithGroup implements [slog.Handler].
func (l *limited) WithGroup(name string) slog.Handler {
	with := *l
	with.Handler, with.attrs = l.Handler.WithGroup(name), l.attrs+"\n"+name
	return &with
}

// problemText returns the attributes of a line that distinguish its problem from others.
func problemText(entry slog.Record) (text string) {
	entry.Attrs(func(attr slog.Attr) bool {
		text += attrText(attr)
		return true
	})
	return text
}

// localPort matches the address of this side in an error of a connection.
var localPort = regexp.MustCompile(`[0-9a-f.:\[\]]+->`)

// attrText returns an attribute as a part of problemText, or "" if each attempt has another value.
func attrText(attr slog.Attr) string {
	value := attr.Value.Resolve()
	if value.Kind() == slog.KindDuration || attr.Key == "records" {
		return ""
	}
	return "\n" + attr.Key + "=" + value.String()
}

type kindOfLine struct {
	level slog.Level
	text  string
}

// lineCounts counts the lines of each kind.
type lineCounts struct {
	window time.Duration
	most   int // lines of one kind in window

	mu    sync.Mutex
	kinds map[kindOfLine]*lineCount
}

type lineCount struct {
	end               time.Time // of the window
	lines, suppressed int
}

// allowLine counts a line and reports whether it may be written now. At the end of the window, it calls summarize with
// the number of lines that may not.
func (c *lineCounts) allowLine(kind kindOfLine, now time.Time, summarize func(suppressed int)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	n := c.kinds[kind]
	if n == nil {
		if len(c.kinds) >= limitKinds {
			c.dropExpiredLocked(now)
		}
		if len(c.kinds) >= limitKinds {
			// Problems cannot share a counter: one of them would hide the others.
			if c.most == 1 {
				return true
			}
			kind.text = "more kinds of lines"
		}

		n = c.kinds[kind]
		if n == nil {
			n = &lineCount{}
			c.kinds[kind] = n
		}
	}

	if now.After(n.end) {
		n.end, n.lines = now.Add(c.window), 0
	}
	n.lines++
	if n.lines <= c.most {
		return true
	}

	n.suppressed++
	// One summary for each window.
	if n.suppressed == 1 {
		time.AfterFunc(n.end.Sub(now), func() { summarize(c.startWindow(n)) })
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

// startWindow starts the next window of n with the summary as its first line. It returns the number of lines that the
// last one has suppressed.
func (c *lineCounts) startWindow(n *lineCount) (suppressed int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	suppressed = n.suppressed
	n.end, n.lines, n.suppressed = time.Now().Add(c.window), 1, 0
	return suppressed
}
