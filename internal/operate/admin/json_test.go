package admin

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
)

// A response is JSON for every date that a service can store.
func TestDatesBeyondJSONAreFitted(t *testing.T) {
	t.Parallel()
	far, early, good := time.UnixMilli(math.MaxInt64), time.UnixMilli(math.MinInt64), time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	type inner struct {
		At   time.Time  `json:"at"`
		Next *time.Time `json:"next"`
		// A type may contain itself.
		Self *inner `json:"self,omitempty"`
	}

	for name, v := range map[string]any{
		"struct":    inner{At: far, Next: &early},
		"pointer":   &inner{At: far, Next: &early},
		"slice":     []inner{{At: far, Next: &good}, {At: early}},
		"page":      Page[Scheduled]{Items: []Scheduled{{ID: "a", DueAt: far, ExpiresAt: early}, {ID: "b", DueAt: good}}},
		"map":       map[string]inner{"x": {At: far, Next: &far}},
		"interface": map[string]any{"x": []any{inner{At: far}, &inner{At: early}, "text", nil}},
		"array":     [2]time.Time{far, good},
		"nothing":   nil,
	} {
		var out bytes.Buffer
		if err := WriteJSON(&out, v, ""); err != nil || !json.Valid(out.Bytes()) {
			t.Errorf("%s: %v, %s", name, err, out.String())
		}
	}

	var out bytes.Buffer
	page := Page[Scheduled]{Items: []Scheduled{{ID: "a", DueAt: far}, {ID: "b", DueAt: good}}}
	if err := WriteJSON(&out, page, ""); err != nil || !strings.Contains(out.String(), "9999-12-31T23:59:59Z") || !strings.Contains(out.String(), "2026-01-02T03:04:05Z") {
		t.Errorf("%v, %s", err, out.String())
	}
}
