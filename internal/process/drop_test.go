package process_test

import (
	"testing"

	"github.com/outrelay/outrelay/internal/record"
)

// TestADroppedCollectionIsFollowed: after a drop, the same owner delivers the envelopes of the next collection of that
// name, without a sweep.
func TestADroppedCollectionIsFollowed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(3)
	b.start()
	b.consume(3)
	epoch := b.status().Epoch

	for round := range 2 {
		if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.append(3)
		got := b.consume(3 * (round + 2))

		if n := len(got); n != 3*(round+2) {
			t.Errorf("%d records after %d drops: something came twice", n, round+1)
		}

		for _, r := range got {
			for _, h := range r.Headers {
				if h.Key == record.HeaderRedelivered {
					t.Errorf("%d/%d is flagged", r.Partition, r.Offset)
				}
			}
		}
	}

	if now := b.status().Epoch; now != epoch {
		t.Errorf("the epoch went from %d to %d", epoch, now)
	}
}
