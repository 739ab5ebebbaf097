package purge

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/waiting"
)

// What waited, or was scheduled, is stamped when it is delivered, so that its retention counts from there.
func TestWhatWaitedIsStampedWhenItIsDelivered(t *testing.T) {
	t.Parallel()
	coll, o := exceptionOutbox(t)
	old := bson.E{Key: "ts", Value: bson.Timestamp{T: 1000, I: 1}}
	if _, err := coll.InsertMany(t.Context(), []any{
		bson.D{{Key: "_id", Value: "parked"}, old, {Key: "state", Value: "parked"}, {Key: "pos", Value: "82"}},
		bson.D{{Key: "_id", Value: "due"}, old, {Key: "dueAt", Value: time.UnixMilli(9)}, {Key: "claim", Value: bson.D{{Key: "token", Value: "t"}}}},
	}); err != nil {
		t.Fatal(err)
	}

	begun := uint32(time.Now().Add(-time.Minute).Unix())
	for id, claim := range map[string]string{"parked": "", "due": "t"} {
		typ, val, err := bson.MarshalValue(id)
		if err != nil {
			t.Fatal(err)
		}
		sent := waiting.Outcome{Fate: waiting.OutcomeSent, NS: mongodb.Namespace(coll), ID: bson.RawValue{Type: typ, Value: val}, Claim: claim}
		if err := o.Fenced(t.Context(), nil, func(tx context.Context) error {
			_, err := waiting.WriteOutcomes(tx, []waiting.Outcome{sent})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if d := read(t, coll, id); d["sentAt"] == nil || d["ts"].(bson.Timestamp).T < begun {
			t.Errorf("%s: %v", id, d)
		}
	}
}
