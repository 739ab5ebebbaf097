package config

import (
	"fmt"
	"log/slog"
	"regexp"
	"strings"
)

const mask = "***"

// Secret is a string that prints as *** with each verb of fmt and in slog, JSON, YAML and text
// encodings. The text is behind a pointer, so that a printer that reads unexported fields shows only an
// address.
type Secret struct{ text *string }

// newSecret wraps text.
func newSecret(text string) Secret {
	if text == "" {
		return Secret{}
	}
	return Secret{&text}
}

// Reveal returns the text. The caller must keep it out of logs and errors.
func (s Secret) Reveal() string {
	if s.text == nil {
		return ""
	}
	return *s.text
}

// IsZero reports whether there is no text.
func (s Secret) IsZero() bool { return s.text == nil }

// String returns ***, or "" without a text.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return mask
}

// GoString implements [fmt.GoStringer].
func (s Secret) GoString() string { return `config.Secret("` + s.String() + `")` }

// Format implements [fmt.Formatter], for the verbs that do not use String.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// MarshalJSON implements [encoding/json.Marshaler].
func (s Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + s.String() + `"`), nil }

// MarshalText implements [encoding.TextMarshaler].
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalYAML implements yaml.Marshaler. [Print] uses it.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }

// LogValue implements [slog.LogValuer].
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// URI is an address that may contain a login. It prints without the login.
type URI struct{ text *string }

// NewURI wraps text.
func NewURI(text string) URI {
	if text == "" {
		return URI{}
	}
	return URI{&text}
}

// Reveal returns the whole address with the login. The caller must keep it out of logs and errors.
func (u URI) Reveal() string {
	if u.text == nil {
		return ""
	}
	return *u.text
}

// IsZero reports whether there is no address.
func (u URI) IsZero() bool { return u.text == nil }

var schemeName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9+.-]*$`)

// secretOption matches options whose values are secrets.
var secretOption = regexp.MustCompile(`(?i)([?&][^=&]*(?:password|passwd|token|secret|authmechanismproperties|credential)[^=&]*=)[^&]*`)

// String returns the address with *** in place of the user information and of secret options. The user
// information ends at the last @ of the address, so that a password with an unescaped @ is hidden
// completely.
func (u URI) String() string {
	if u.IsZero() {
		return ""
	}

	scheme, rest, ok := strings.Cut(*u.text, "://")
	if !ok || !schemeName.MatchString(scheme) {
		return mask
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		rest = mask + rest[at:]
	}
	return scheme + "://" + secretOption.ReplaceAllString(rest, "${1}"+mask)
}

// withoutLogin returns the address without its user information, and whether it had any.
func (u URI) withoutLogin() (address string, hadLogin bool) {
	scheme, rest, _ := strings.Cut(u.Reveal(), "://")
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		return scheme + "://" + rest[at+1:], true
	}
	return u.Reveal(), false
}

// GoString implements [fmt.GoStringer].
func (u URI) GoString() string { return `config.URI("` + u.String() + `")` }

// Format implements [fmt.Formatter], for the verbs that do not use String.
func (u URI) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(u.String())) }

// MarshalText implements [encoding.TextMarshaler]; JSON uses it too.
func (u URI) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// MarshalYAML implements yaml.Marshaler. [Print] uses it.
func (u URI) MarshalYAML() (any, error) { return u.String(), nil }

// LogValue implements [slog.LogValuer].
func (u URI) LogValue() slog.Value { return slog.StringValue(u.String()) }
