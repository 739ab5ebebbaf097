package consumer

import (
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, typ string
		want         bool
	}{
		{"OrderPlaced", "OrderPlaced", true},
		{"OrderPlaced", "OrderPlacedTwice", false},
		{"order.*", "order.placed", true},
		{"order.*", "order.line.added", true},
		{"order.*", "order", false},
		{"*", "", true},
		{"*", "anything", true},
		{"*.placed", "order.placed", true},
		{"*.placed", "order.placed.late", false},
		{"order.*.added", "order.line.added", true},
		{"a.c", "abc", false},
	} {
		if got := matches(c.pattern, c.typ); got != c.want {
			t.Errorf("%q takes %q: %v", c.pattern, c.typ, got)
		}
	}
}

func TestPatternsMatchAsExpressionsDo(t *testing.T) {
	t.Parallel()
	word := rapid.StringMatching(`[ab.*]{0,7}`)
	typ := rapid.StringMatching(`[ab.]{0,7}`)
	rapid.Check(t, func(t *rapid.T) {
		p, s := word.Draw(t, "pattern"), typ.Draw(t, "type")
		re := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(p), `\*`, `.*`) + "$")
		if matches(p, s) != re.MatchString(s) {
			t.Fatalf("%q and %q", p, s)
		}
		q := word.Draw(t, "other")
		if matches(p, s) && matches(q, s) && !overlap(p, q) {
			t.Fatalf("%q and %q both take %q", p, q, s)
		}
		if overlap(p, q) != overlap(q, p) {
			t.Fatalf("%q and %q overlap one way", p, q)
		}
		if !strings.Contains(q, "*") && overlap(p, q) != matches(p, q) {
			t.Fatalf("%q overlaps the type %q: %v", p, q, overlap(p, q))
		}
	})
}
