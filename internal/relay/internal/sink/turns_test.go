package sink

import (
	"fmt"
	"slices"
	"testing"
)

// Each topic gets its turn, also if others come and go in between.
func TestTopicsTakeTurns(t *testing.T) {
	t.Parallel()
	var names []string
	for i := range 25 {
		names = append(names, fmt.Sprintf("topic-%02d", i))
	}

	var rounds turns
	seen := map[string]int{}
	for round := range 3 {
		part := rounds.next(names, 10)
		if len(part) != 10 {
			t.Fatalf("round %d has %d topics", round, len(part))
		}
		for _, name := range part {
			seen[name]++
		}
		names = slices.DeleteFunc(names, func(name string) bool { return name == part[9] })
	}
	if len(seen) != 25 {
		t.Errorf("%d of 25 topics had a turn in 3 rounds", len(seen))
	}
	if all := rounds.next(names, 100); len(all) != len(names) {
		t.Errorf("a short list is divided: %d of %d", len(all), len(names))
	}
}
