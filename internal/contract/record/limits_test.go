package record

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestShortenedTextsAreBounded(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                         "",
		"short":                    "short",
		"longer text":              "longer…",
		"ääääääää":                 "äää…",
		"\xffa":                    "\uFFFDa",
		strings.Repeat("\xff", 20): "…",
	} {
		if got := Shorten(in, 9); got != want || !utf8.ValidString(got) || len(got) > 9 {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}

	if got := Shorten("text", 1); got != "…" {
		t.Errorf("without room: %q, want the ellipsis", got)
	}
}
