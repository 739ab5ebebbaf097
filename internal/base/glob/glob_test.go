package glob

import (
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, name string
		want          bool
	}{
		{"OrderPlaced", "OrderPlaced", true},
		{"OrderPlaced", "OrderPlacedTwice", false},
		{"order.*", "order.placed", true},
		{"order.*", "order", false},
		{"*", "", true},
		{"*/b", "a/b", true},
		{"shop_?", "shop_1", true},
		{"shop_?", "shop_12", false},
		{"shop_?", "shop_", false},
		{"shop_??", "shop_é1", true},
		{"??", "é", false},
		{"a[b]", "a[b]", true},
		{"a[b]", "ab", false},
	} {
		if got := Match(c.pattern, c.name); got != c.want {
			t.Errorf("%q matches %q: %v", c.pattern, c.name, got)
		}
	}

	if !HasWildcard("a?") || !HasWildcard("*") || HasWildcard("a.b[c]") {
		t.Error("a pattern without * and ? is one name")
	}
}

func TestPatternsMatchAsExpressionsDo(t *testing.T) {
	t.Parallel()
	word := rapid.StringMatching(`[abé.*?]{0,7}`)
	name := rapid.StringMatching(`[abé.]{0,7}`)
	rapid.Check(t, func(t *rapid.T) {
		p, q, s := word.Draw(t, "pattern"), word.Draw(t, "other"), name.Draw(t, "name")
		re := regexp.MustCompile("^" + strings.NewReplacer(`\*`, `.*`, `\?`, `.`).Replace(regexp.QuoteMeta(p)) + "$")

		if Match(p, s) != re.MatchString(s) || Match(p, []byte(s)) != Match(p, s) {
			t.Fatalf("%q matches %q: %v", p, s, Match(p, s))
		}

		if Overlap(p, q) != Overlap(q, p) {
			t.Fatalf("%q and %q meet one way", p, q)
		}
		if Match(p, s) && Match(q, s) && !Overlap(p, q) {
			t.Fatalf("%q and %q both match %q and do not meet", p, q, s)
		}
		if !HasWildcard(q) && Overlap(p, q) != Match(p, q) {
			t.Fatalf("%q meets the name %q: %v", p, q, Overlap(p, q))
		}

		if Covers(p, q) && Match(q, s) && !Match(p, s) {
			t.Fatalf("%q covers %q, which alone matches %q", p, q, s)
		}
	})
}
