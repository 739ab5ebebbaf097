package slot

import (
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
)

func TestN28_EveryHashSlotHasOneSlot(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 3, 5, 7, 16, MaxSlots} {
		least, most := keyhash.Slots, 0
		seen := make([]int, keyhash.Slots)

		for _, p := range Ranges(n) {
			low, high := p.hashSlots()
			for s := low; s < high; s++ {
				seen[s]++
			}
			least, most = min(least, int(high-low)), max(most, int(high-low))
		}

		for s, c := range seen {
			if c != 1 {
				t.Fatalf("hash slot %d is in %d of %d slots", s, c, n)
			}
		}
		if most-least > 1 {
			t.Errorf("of %d slots, one has %d hash slots and one %d", n, least, most)
		}
	}
}

func TestN28_SlotsOverlapThatShareHashSlots(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 7; n++ {
		for m := 1; m <= 7; m++ {
			for _, p := range Ranges(n) {
				for _, q := range Ranges(m) {
					shared := false

					for s := range int32(keyhash.Slots) {
						doc, err := bson.Marshal(bson.D{{Key: "slot", Value: s}})
						if err != nil {
							t.Fatal(err)
						}
						shared = shared || p.Contains(doc) && q.Contains(doc)
					}

					if p.Overlaps(q) != shared {
						t.Errorf("%v and %v: %v", p, q, !shared)
					}
				}
			}
		}
	}
}

// For any value of the field, exactly one slot has the document.
func TestN28_EveryDocumentHasOneSlot(t *testing.T) {
	t.Parallel()
	big, _ := bson.ParseDecimal128("700.5")
	for _, v := range []any{
		int32(0), int32(511), int32(512), int32(1023), int32(1024), int32(-1), int64(700), 511.5, 1023.5, 1024.0, big, "512", nil, true,
		bson.A{int32(5), int32(700)},
		bson.A{int32(700)},
		bson.D{{Key: "x", Value: int32(700)}},
	} {
		raw, err := bson.Marshal(bson.D{{Key: "slot", Value: v}})
		if err != nil {
			t.Fatal(err)
		}
		for n := 1; n <= 7; n++ {
			if c := owners(raw, n); c != 1 {
				t.Errorf("hash slot %v is in %d of %d slots", v, c, n)
			}
		}
	}

	empty, _ := bson.Marshal(bson.D{})
	if !(Range{0, 3}).Contains(empty) {
		t.Error("a document without a hash slot is not in slot 0")
	}
}

func owners(raw bson.Raw, n int) (c int) {
	for _, p := range Ranges(n) {
		if p.Contains(raw) {
			c++
		}
	}
	return c
}

func TestNames(t *testing.T) {
	t.Parallel()
	for _, p := range append(Ranges(1), Ranges(12)...) {
		if got, err := Parse(p.String()); err != nil || got != p {
			t.Errorf("%v reads as %v, %v", p, got, err)
		}
		if w, got, ok := ParseID(p.ID("a.b")); !ok || w != "a.b" || got != p {
			t.Errorf("%s reads as %s %v %v", p.ID("a.b"), w, got, ok)
		}
	}

	for _, text := range []string{"", "of", "0of0", "1of1", "-1of2", "01of2", "0of2x", "2of2", "0 of2"} {
		if p, err := Parse(text); err == nil {
			t.Errorf("%q reads as %v", text, p)
		}
	}
	if (Range{}).ID("w") != "w/0of1" {
		t.Error("the zero value is not the whole")
	}
}

func tables(t *rapid.T) Table {
	tab := Table{}
	for i := range rapid.IntRange(1, 7).Draw(t, "nodes") {
		tab.Nodes = append(tab.Nodes, fmt.Sprintf("n%d", i))
	}
	who := rapid.SampledFrom(append([]string{"", "", "gone"}, tab.Nodes...))
	pin := rapid.SampledFrom(append([]string{"", "", "", "", "gone"}, tab.Nodes...))
	for range rapid.IntRange(1, 20).Draw(t, "slots") {
		tab.Slots = append(tab.Slots, Holding{Node: who.Draw(t, "owner"), Pin: pin.Draw(t, "pin"), Paused: rapid.IntRange(0, 9).Draw(t, "paused") == 0})
	}
	return tab
}

func TestN28_QuotasAreFair(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tab := tables(t)
		loose, sum := 0, 0
		pins := map[string]int{}

		for i, s := range tab.Slots {
			if tab.CountsForQuota(i) {
				loose++
			} else if !s.Paused {
				pins[s.Pin]++
			}
		}

		least := 1 << 30
		for _, n := range tab.Nodes {
			q := tab.Quota(n)
			sum += q
			least = min(least, q+pins[n])
		}

		// No node runs two slots more than another.
		for _, n := range tab.Nodes {
			if q := tab.Quota(n); q > 0 && q+pins[n] > least+1 {
				t.Fatalf("%s is to run %d, another %d: %+v", n, q+pins[n], least, tab)
			}
		}

		if sum != loose {
			t.Fatalf("quotas add up to %d of %d", sum, loose)
		}
	})
}

// Nodes give back surplus slots and take free ones, one step at a time in any order. They come to rest, and then no
// node has moved more slots than necessary.
func TestN28_SharingComesToRest(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tab := tables(t)

		for i := range tab.Slots {
			if tab.Slots[i].Node == "gone" {
				tab.Slots[i].Node = ""
			}
		}

		needed := 0
		for _, n := range tab.Nodes {
			needed += tab.Surplus(n)
		}

		// The nodes take steps in turn, some nodes slowly, until no node has a reason to act.
		moved, resting := 0, map[string]bool{}
		for steps := 0; len(resting) < len(tab.Nodes); steps++ {
			if steps > 10_000 {
				t.Fatalf("it never rests: %+v", tab)
			}
			n := tab.Nodes[steps%len(tab.Nodes)]
			if rapid.Bool().Draw(t, "slow") {
				continue
			}
			resting[n] = true

			if at := tab.held(n); tab.Surplus(n) > 0 && at >= 0 {
				tab.Slots[at].Node, moved = "", moved+1
				clear(resting)
			}

			for i, s := range tab.Slots {
				if s.Node == "" && tab.CountsForQuota(i) && tab.countSlots(n) < tab.Quota(n) {
					tab.Slots[i].Node = n
					clear(resting)
					break
				}
			}
		}

		for i, s := range tab.Slots {
			if tab.CountsForQuota(i) && s.Node == "" {
				t.Fatalf("slot %d stays free: %+v", i, tab)
			}
		}
		if moved != needed {
			t.Fatalf("%d slots moved, %d had to", moved, needed)
		}
	})
}

func (t Table) held(node string) int {
	for i, s := range t.Slots {
		if s.Node == node && t.CountsForQuota(i) {
			return i
		}
	}
	return -1
}

func (t Table) countSlots(node string) (c int) {
	for i, s := range t.Slots {
		if s.Node == node && t.CountsForQuota(i) {
			c++
		}
	}
	return c
}

// Surplus is how many slots the node runs beyond its quota.
func (t Table) Surplus(node string) int {
	n := -t.Quota(node)
	for i, s := range t.Slots {
		if s.Node == node && t.CountsForQuota(i) {
			n++
		}
	}
	return max(n, 0)
}

func TestN28_IDsOfDocumentsNameTheirSlot(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]string{
		"w/0of1": "w 1", "a/b/3of12": "a/b 12",
		"w": "", "w/": "", "w/of2": "", "w/xof2": "", "w/0of": "", "w/0of0": "", "w/2of2": "",
	} {
		name, p, ok := ParseID(id)
		if got := fmt.Sprint(name, " ", p.N); ok != (want != "") || ok && got != want {
			t.Errorf("ParseID(%q): got %s, %v, want %q", id, got, ok, want)
		}
	}
}
