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

// New returns a handler that writes lines of at least level to out. To change the level later, pass a
// [*slog.LevelVar]. In any other format, such as auto, lines are Text on a terminal and JSON elsewhere.
func New(out io.Writer, level slog.Leveler, format Format) slog.Handler {
	terminal := isTerminal(out)
	if format == Text || format != JSON && terminal {
		return tint.NewTextHandler(out, &tint.Options{
			Level:       level,
			TimeFormat:  "15:04:05.000",
			NoColor:     !terminal || os.Getenv("NO_COLOR") != "",
			ReplaceAttr: redactAttr,
		})
	}

	return slog.NewJSONHandler(out, &slog.HandlerOptions{Level: level, ReplaceAttr: redactJSON})
}

// isTerminal reports whether out is a terminal.
func isTerminal(out io.Writer) bool {
	file, ok := out.(interface{ Fd() uintptr })
	return ok && (isatty.IsTerminal(file.Fd()) || isatty.IsCygwinTerminal(file.Fd()))
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
func redactAttr(_ []string, attr slog.Attr) slog.Attr {
	value := attr.Value.Resolve()
	if secretName.MatchString(attr.Key) && !notSecret[attr.Key] && value.Kind() != slog.KindGroup {
		if value.Kind() == slog.KindString && value.String() == "" {
			return attr
		}
		return slog.String(attr.Key, mask)
	}

	// Unchanged values are returned as they are, which saves an allocation.
	switch value.Kind() {
	case slog.KindString:
		if clean := Clean(value.String()); clean != value.String() {
			return slog.String(attr.Key, clean)
		}

	case slog.KindAny:
		switch typed := value.Any().(type) {
		case error:
			if clean := Clean(typed.Error()); clean != typed.Error() {
				return slog.String(attr.Key, clean)
			}
		case *url.URL:
			return slog.String(attr.Key, typed.Redacted())
		case fmt.Stringer:
			return slog.String(attr.Key, Clean(typed.String()))
		}
	}
	return attr
}

// redactJSON is redactAttr, and formats durations for people. Machines can read numbers from the metrics.
func redactJSON(groups []string, attr slog.Attr) slog.Attr {
	if attr.Value.Kind() == slog.KindDuration {
		return slog.String(attr.Key, attr.Value.Duration().Round(time.Microsecond).String())
	}
	return redactAttr(groups, attr)
}
