// Package logging makes the log handler of outrelay: colored text on a terminal, JSON elsewhere.
//
// A line is one write to the underlying writer. Logging blocks until the write returns. The level can change
// at run time. Code must not log payloads, keys and secrets. As a last defense, the handler uses
// [slog.LogValuer] values, also inside errors, and masks attributes with names of secrets.
package logging

import (
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"time"

	"github.com/lmittmann/tint"
	"github.com/mattn/go-isatty"
)

// Format is the format of the lines.
type Format string

// The formats.
const (
	Text Format = "text"
	JSON Format = "json"
)

// New returns a handler that writes lines of at least level to w. To change the level later, pass a
// [*slog.LevelVar]. In any other format, such as auto, lines are Text on a terminal and JSON elsewhere.
func New(w io.Writer, level slog.Leveler, format Format) slog.Handler {
	terminal := isTerminal(w)
	if format == Text || format != JSON && terminal {
		return tint.NewTextHandler(w, &tint.Options{
			Level:       level,
			TimeFormat:  "15:04:05.000",
			NoColor:     !terminal || os.Getenv("NO_COLOR") != "",
			ReplaceAttr: redactAttr,
		})
	}

	return slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: redactJSON})
}

// isTerminal reports whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(interface{ Fd() uintptr })
	return ok && (isatty.IsTerminal(f.Fd()) || isatty.IsCygwinTerminal(f.Fd()))
}

// mask replaces confidential text.
const mask = "***"

var (
	secretName = regexp.MustCompile(`(?i)(^|[._-])(password|passwd|secret|token|authorization|credentials?|private_?key|api_?key)$`)
	userInfo   = regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s"']*@`)
)

// notSecret are attributes of outrelay whose names match secretName but are not secret.
var notSecret = map[string]bool{"resume_token": true, "claim_token": true}

// redactAttr is a function for ReplaceAttr. It masks attributes with names of secrets, and confidential parts of
// texts and errors, as [Clean] does. Values that are a [slog.LogValuer] have masked themselves before.
func redactAttr(_ []string, a slog.Attr) slog.Attr {
	v := a.Value.Resolve()
	if secretName.MatchString(a.Key) && !notSecret[a.Key] && v.Kind() != slog.KindGroup {
		if v.Kind() == slog.KindString && v.String() == "" {
			return a
		}
		return slog.String(a.Key, mask)
	}

	// Unchanged values are returned as they are, which saves an allocation.
	switch v.Kind() {
	case slog.KindString:
		if s := Clean(v.String()); s != v.String() {
			return slog.String(a.Key, s)
		}

	case slog.KindAny:
		switch x := v.Any().(type) {
		case error:
			if s := Clean(x.Error()); s != x.Error() {
				return slog.String(a.Key, s)
			}
		case *url.URL:
			return slog.String(a.Key, x.Redacted())
		case fmt.Stringer:
			return slog.String(a.Key, Clean(x.String()))
		}
	}
	return a
}

// redactJSON is redactAttr, and formats durations for people. Machines can read numbers from the metrics.
func redactJSON(groups []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.String(a.Key, a.Value.Duration().Round(time.Microsecond).String())
	}
	return redactAttr(groups, a)
}
