package record

import (
	"strings"
	"testing"
)

// Reasons that differ only in ids, numbers and quoted texts are one failure. Other reasons and other places are others.
func TestReasonsOfOneCauseAreOneFailure(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ a, b, message string }{
		{"order 17 has 3.5 EUR", "order 18 has 12,50 EUR", "order N has N EUR"},
		{`field "a" is missing`, `field "bcd" is missing`, `field "…" is missing`},
		{"customer 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10 is gone", "customer 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f11 is gone", "customer ID is gone"},
		{"document 65f0c0ffee65f0c0ffee6501 is locked", "document 65f0c0ffee65f0c0ffee6502 is locked", "document ID is locked"},
		{"at 10:15:30 after 5s", "at 23:59:01 after 17s", "at N after Ns"},
	} {
		a, b := FailureOf(c.a, "relay", "malformed"), FailureOf(c.b, "relay", "malformed")
		if a != b || a.Message != c.message || len(a.Fingerprint) != 16 {
			t.Errorf("%q and %q: %+v, %+v", c.a, c.b, a, b)
		}
		if other := FailureOf(c.a, "relay", "expired"); other.Fingerprint == a.Fingerprint || other.Message != a.Message {
			t.Errorf("another place: %+v", other)
		}
	}

	if FailureOf("insufficient funds", "x") == FailureOf("unknown account", "x") {
		t.Error("two reasons are one failure")
	}
	if got := FailureOf(strings.Repeat("é", 500), "x"); len(got.Message) > 210 {
		t.Errorf("%d bytes", len(got.Message))
	}
}
