package scheduled

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// For all sequences of claims, sends and withdrawals: no envelope is returned before its time, twice, or after it was withdrawn, and due envelopes
// are returned in the order of their times.
func TestHeldEnvelopesAgainstAModel(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		h := held{wake: make(chan struct{}, 1)}
		base := time.Now()
		at := func(i int64) time.Time { return base.Add(time.Duration(i) * time.Second) }
		model := map[*dueEnvelope]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				var list []*dueEnvelope
				for _, i := range rapid.SliceOfN(rapid.Int64Range(0, 20), 0, 8).Draw(t, "due") {
					e := &dueEnvelope{due: i, sendAt: at(i)}
					list, model[e] = append(list, e), true
				}
				h.hold(list)
			},
			"take": func(t *rapid.T) {
				now, n := rapid.Int64Range(0, 20).Draw(t, "now"), rapid.IntRange(1, 5).Draw(t, "n")
				due := 0
				for e := range model {
					if e.due <= now {
						due++
					}
				}
				list, next := h.takeDue(at(now), n)
				if len(list) != min(n, due) {
					t.Fatalf("%d of %d that are due at %d are taken, at most %d", len(list), due, now, n)
				}
				for i, e := range list {
					if !model[e] || e.due > now || i > 0 && e.due < list[i-1].due {
						t.Fatalf("the envelope that is due at %d is taken at %d; held: %v", e.due, now, model[e])
					}
					delete(model, e)
				}
				for e := range model {
					if len(list) < n && e.sendAt.Before(next) {
						t.Fatalf("the next is due at %d, and the wait ends at %s", e.due, next.Sub(base))
					}
				}
			},
			"withdraw": func(t *rapid.T) {
				part := rapid.Int64Range(0, 3).Draw(t, "part")
				for _, e := range h.withdraw(func(e *dueEnvelope) bool { return e.due%4 == part }) {
					if !model[e] || e.due%4 != part {
						t.Fatalf("the envelope that is due at %d is withdrawn; held: %v", e.due, model[e])
					}
					delete(model, e)
				}
				for e := range model {
					if e.due%4 == part {
						t.Fatalf("the envelope that is due at %d stays", e.due)
					}
				}
			},
		})
	})
}
