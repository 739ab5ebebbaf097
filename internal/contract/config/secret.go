package config

import (
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"strings"
)

const mask = "***"

// hiddenText is a text that must not be printed. It is behind a pointer, so that a printer that reads
// unexported fields shows only an address.
type hiddenText struct{ text *string }

func hideText(text string) hiddenText {
	if text == "" {
		return hiddenText{}
	}
	return hiddenText{&text}
}

// Reveal returns the whole text. The caller must keep it out of logs and errors.
func (h hiddenText) Reveal() string {
	if h.text == nil {
		return ""
	}
	return *h.text
}

// IsZero reports whether there is no text.
func (h hiddenText) IsZero() bool { return h.text == nil }

// Secret is a string that prints as *** with each verb of fmt and in slog, JSON, YAML and text
// encodings.
type Secret struct {
	hiddenText
	// written is the text with its references to files, as it was written; nil without such a reference.
	written *string
}

// NewSecret wraps text.
func NewSecret(text string) Secret { return Secret{hiddenText: hideText(text)} }

// Current returns the whole text, with the present contents of the files in ${file:…}. If one of them cannot be read now, it
// returns the text of the start. The caller must keep it out of logs and errors.
func (s Secret) Current() string {
	if s.written == nil {
		return s.Reveal()
	}
	text, err := newExpander(os.Environ())(*s.written)
	if err != nil || text == "" {
		return s.Reveal()
	}
	return text
}

// String returns ***, or "" without a text.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return mask
}

// Format implements [fmt.Formatter] for all verbs.
func (s Secret) Format(state fmt.State, _ rune) { _, _ = state.Write([]byte(s.String())) }

// MarshalText implements [encoding.TextMarshaler]; JSON and YAML use it too.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue implements [slog.LogValuer].
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// URI is an address that may contain a login. It prints without the login.
type URI struct{ hiddenText }

// NewURI wraps text.
func NewURI(text string) URI { return URI{hideText(text)} }

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

// hasUnencodedLogin reports whether a character of the user name or password must be percent-encoded and is not. Each @ counts except the one
// that ends the login: an @ in a database or an option may be the end of a login with a /, ? or #.
func (u URI) hasUnencodedLogin() bool {
	_, rest, _ := strings.Cut(u.Reveal(), "://")
	login, after, found := strings.Cut(rest, "@")
	if !found {
		return false
	}

	_, err := url.PathUnescape(login)
	return err != nil || strings.Contains(after, "@") || strings.ContainsAny(login, "/?#[]") || strings.Count(login, ":") > 1
}

// Format implements [fmt.Formatter] for all verbs.
func (u URI) Format(state fmt.State, _ rune) { _, _ = state.Write([]byte(u.String())) }

// MarshalText implements [encoding.TextMarshaler]; JSON and YAML use it too.
func (u URI) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// LogValue implements [slog.LogValuer].
func (u URI) LogValue() slog.Value { return slog.StringValue(u.String()) }
