package lease

import (
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// The offsets of 60,000 partitions need a megabyte. A renewal or a checkpoint without new offsets does not send them.
func TestOffsetsWithoutNewsAreNotWrittenAgain(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, longConfig(coll, "a")))
	var at atomic.Uint32
	var offset atomic.Int64
	at.Store(1)
	offset.Store(3)
	startRunOf(t, h, func() Checkpoint {
		return Checkpoint{Position: newPosition(at.Load()), Offsets: map[string][]int64{"t": {offset.Load()}}}
	})
	reached := func(what string) {
		t.Helper()
		n := at.Add(1)
		stacktest.Eventually(t, what, func() bool { return readStored(t, coll).Position().Compare(newPosition(n)) == 0 })
	}

	reached("the first offsets")
	if _, err := coll.UpdateOne(t.Context(), bson.D{},
		bson.D{{Key: "$set", Value: bson.D{{Key: "offsets", Value: bson.A{}}}}}); err != nil {
		t.Fatal(err)
	}

	reached("a position without news of the offsets")
	if o := readStored(t, coll).OffsetMap(); len(o) != 0 {
		t.Errorf("unchanged offsets were sent again: %v", o)
	}

	offset.Store(4)
	reached("other offsets")
	stacktest.Eventually(t, "they are written", func() bool {
		o := readStored(t, coll).OffsetMap()
		return len(o["t"]) == 1 && o["t"][0] == 4
	})
}

// Each write moves the position of an idle stream, so a position without a delivery must not cause another write.
func TestAPositionWithoutADeliveryWaitsForARenewal(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := longConfig(coll, "a")
	cfg.Renew = patient
	h := mustAcquire(t, newLease(t, cfg))
	var at atomic.Uint32
	var offset atomic.Int64
	startRunOf(t, h, func() Checkpoint {
		return Checkpoint{Position: newPosition(at.Add(1)), Offsets: map[string][]int64{"t": {offset.Load()}}}
	})
	deliver := func(to int64) {
		t.Helper()
		offset.Store(to)
		stacktest.Eventually(t, "the offset", func() bool {
			list := readStored(t, coll).OffsetMap()["t"]
			return len(list) == 1 && list[0] == to
		})
	}

	deliver(3)
	before := readStored(t, coll).Position()
	moved := at.Load() + 20
	stacktest.Eventually(t, "twenty positions", func() bool { return at.Load() >= moved })
	if after := readStored(t, coll).Position(); after.Compare(before) != 0 {
		t.Error("a position was written although no event was delivered")
	}
	deliver(4)
}
