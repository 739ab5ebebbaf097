package inbox_test

import (
	"math/rand/v2"
	"testing"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

// N29: MongoDB advances a watermark in the same way as the method that the stores share.
func TestN29_AStoredWatermarkAdvancesLikeItsMethod(t *testing.T) {
	t.Parallel()
	b := setup(t)
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the test needs the same numbers each time
	anyMark := func() inbox.Mark {
		return inbox.Mark{Generation: random.Int64N(2), Next: 1 + random.Int64N(3), Epoch: random.Int32N(4) - 1}
	}

	const partitions, rounds = 40, 6
	want := inbox.Marks{}
	for range rounds {
		var moves []inbox.Move
		for number := range int32(partitions) {
			lane := inbox.LaneKey{Partition: inbox.Partition{Consumer: "group/a", Topic: "orders", Number: number}, Lane: number % inbox.Lanes}
			move := inbox.Move{LaneKey: lane, Mark: anyMark()}
			moves = append(moves, move)
			if mark, ok := want[lane]; ok {
				move.Mark = mark.Advance(move.Mark)
			}
			want[lane] = move.Mark
		}
		if err := b.store().AdvanceMarks(t.Context(), moves); err != nil {
			t.Fatal(err)
		}
	}

	lanes := make([]inbox.LaneKey, 0, len(want))
	for lane := range want {
		lanes = append(lanes, lane)
	}
	got, err := b.store().ReadMarks(t.Context(), lanes)
	if err != nil || len(got) != len(want) {
		t.Fatalf("%d watermarks of %d, %v", len(got), len(want), err)
	}
	for lane, mark := range want {
		if got[lane] != mark {
			t.Errorf("partition %d: stored %+v, want %+v", lane.Number, got[lane], mark)
		}
	}
}
