package process_test

import (
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// readProfile returns the operations of the relay on the outbox, from the profiler of the server.
func (b *bundle) readProfile(filter bson.D) []bson.M {
	b.t.Helper()
	filter = append(bson.D{{Key: "appName", Value: bson.D{{Key: "$regex", Value: "^outrelay "}}}, {Key: "ns", Value: b.db.Name() + ".outbox"}}, filter...)
	cur, err := b.db.Collection("system.profile").Find(b.t.Context(), filter)
	if err != nil {
		b.t.Fatal(err)
	}
	var ops []bson.M
	if err := cur.All(b.t.Context(), &ops); err != nil {
		b.t.Fatal(err)
	}
	return ops
}

// TestTheHealthyPathWritesNothing: with the resolved position recorded and nothing that waits, an event costs the outbox its insert and
// nothing else; recording them costs one statement for many.
func TestTheHealthyPathWritesNothing(t *testing.T) {
	t.Parallel()
	const events = 2000
	write := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "op", Value: bson.D{{Key: "$in", Value: bson.A{"insert", "update", "remove"}}}}},
		bson.D{{Key: "command.findAndModify", Value: bson.D{{Key: "$exists", Value: true}}}},
	}}}

	// If creating an index takes long, an update that matches no document probes whether writers wait for it. It is no write.
	write = append(write, bson.E{Key: "nMatched", Value: bson.D{{Key: "$ne", Value: 0}}})
	for _, c := range []struct {
		set  string
		some bool
	}{{"recording=position", false}, {"recording=mark", true}} {
		t.Run(c.set, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.append(1)
			if err := b.db.RunCommand(t.Context(), bson.D{{Key: "create", Value: "system.profile"}, {Key: "capped", Value: true}, {Key: "size", Value: 16 << 20}}).Err(); err != nil {
				t.Fatal(err)
			}
			if err := b.db.RunCommand(t.Context(), bson.D{{Key: "profile", Value: 2}}).Err(); err != nil {
				t.Fatal(err)
			}
			stop := b.start(c.set, "retention=0")
			var list []event.Event
			for i := range events - 1 {
				list = append(list, event.New(event.Aggregate{Type: "order", ID: fmt.Sprint(i % 5)}, "Placed", event.Bytes("", []byte("x"))))
			}
			if err := b.box.Append(t.Context(), list...); err != nil {
				t.Fatal(err)
			}
			b.consume(events)
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			if read := b.readProfile(bson.D{{Key: "command.getMore", Value: bson.D{{Key: "$exists", Value: true}}}}); len(read) == 0 {
				t.Fatal("the profiler saw no read of the stream; it proves nothing")
			}
			ops := b.readProfile(write)
			n := len(ops)
			switch {
			case !c.some && n > 0:
				t.Errorf("%d writes to the outbox for %d events, want none: %v", n, events, ops[0]["command"])
			case c.some && (n == 0 || n > events/2):
				t.Errorf("%d writes to the outbox to mark %d events, want some for many", n, events)
			}
		})
	}
}
