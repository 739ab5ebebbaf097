// Package logging makes the handler that outrelay logs through: coloured text for people on a terminal, JSON for machines
// elsewhere.
//
// A line is one write to the underlying writer, which should not block for long: logging waits for it. The level can be
// changed while it runs. Payloads, keys and secrets are nobody's to log; as a last defence the handler masks values that
// know how to hide themselves ([slog.LogValuer] is honoured, also inside errors) and attributes whose name says that they
// are secret.
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

// Format is how a line looks.
type Format string

// The formats.
const (
	Auto Format = "auto" // Text on a terminal, JSON elsewhere
	Text Format = "text"
	JSON Format = "json"
)

// ParseLevel reads debug, info, warn or error.
func ParseLevel(s string) (slog.Level, error) {
	switch s {
	case "debug":
		return slog.LevelDebug, nil
	case "", "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("log level %q is none of debug, info, warn, error", s)
}

// New makes a handler that writes to w what is at least of level. Give a [*slog.LevelVar] to change the level later. An
// unknown or empty format is Auto.
func New(w io.Writer, level slog.Leveler, format Format) slog.Handler {
	terminal := IsTerminal(w)
	if format == Text || format != JSON && terminal {
		return tint.NewTextHandler(w, &tint.Options{
			Level:       level,
			TimeFormat:  "15:04:05.000",
			NoColor:     !terminal || os.Getenv("NO_COLOR") != "",
			ReplaceAttr: Redact,
		})
	}
	return slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: redactJSON})
}

// IsTerminal reports whether w is a terminal.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(interface{ Fd() uintptr })
	return ok && (isatty.IsTerminal(f.Fd()) || isatty.IsCygwinTerminal(f.Fd()))
}

// Mask stands for what is not shown.
const Mask = "***"

var (
	secretName = regexp.MustCompile(`(?i)(^|[._-])(password|passwd|secret|token|authorization|credentials?|private_?key|api_?key)$`)
	userInfo   = regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s"']*@`)
)

// notSecret are our own attributes whose names end like a secret's.
var notSecret = map[string]bool{"resume_token": true, "claim_token": true}

// Redact is a ReplaceAttr: it masks attributes that are secrets by their name and the login of every URI in a text or an
// error, whatever library wrote it. What prints itself masked does so before.
func Redact(_ []string, a slog.Attr) slog.Attr {
	v := a.Value.Resolve()
	if secretName.MatchString(a.Key) && !notSecret[a.Key] && v.Kind() != slog.KindGroup {
		if v.Kind() == slog.KindString && v.String() == "" {
			return a
		}
		return slog.String(a.Key, Mask)
	}
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

// redactJSON also writes durations as people do: machines that want numbers get them from the metrics.
func redactJSON(groups []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.String(a.Key, a.Value.Duration().Round(time.Microsecond).String())
	}
	return Redact(groups, a)
}
