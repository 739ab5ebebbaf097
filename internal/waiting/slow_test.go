package waiting

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/purge"
)

// N3: a write that is too large for one transaction, because the server is slow and the lease short, is divided.
// Otherwise it would be repeated forever, and the watermark would not move.
func TestN03_ATransactionThatNeverEndsInTimeIsMadeSmaller(t *testing.T) {
	t.Parallel()
	coll, _ := exceptionOutbox(t)
	var list []Exception
	for i := range 300 {
		list = append(list, Exception{
			NS: mongodb.Namespace(coll), State: "parked", Pos: fmt.Sprintf("82%08X", i), Pending: []string{"a"}, Key: "k",
			Raw: marshal(t, bson.D{{Key: "_id", Value: fmt.Sprint(i)}, {Key: "aggregateid", Value: "k"}}),
		})
	}

	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	h := &stacktest.Hasty{Fence: &plainFencer{client: coll.Database().Client()}, Coll: coll, Most: 40}
	size := mongodb.NewPartSize(mongodb.MaxDocuments)
	if err := WriteExceptions(ctx, h, list, size); err != nil {
		t.Fatalf("after %d in vain: %v", h.Late.Load(), err)
	}
	if n, err := coll.CountDocuments(ctx, bson.D{}); err != nil || n != 300 {
		t.Errorf("%d of 300 are written, %v", n, err)
	}

	// The writer of a term has many lists one after the other.
	late := h.Late.Load()
	if err := WriteExceptions(ctx, h, list[:100], size); err != nil || h.Late.Load() > late {
		t.Errorf("the next list: %v, after %d in vain", err, h.Late.Load()-late)
	}
}

// The same for the writes of a takeover, which would never end, and for the marks of delivered
// envelopes.
func TestN03_ATakeOverWritesPartsThatEndInTime(t *testing.T) {
	t.Parallel()
	const all = 120
	for name, write := range map[string]struct {
		doc, done bson.D
		run       func(ctx context.Context, f mongodb.Fencer, coll *mongo.Collection, ids []bson.RawValue) error
	}{
		"exceptions that wait for more": {
			doc:  bson.D{{Key: "state", Value: "parked"}, {Key: "pending", Value: bson.A{"a"}}},
			done: bson.D{{Key: "pending", Value: "b"}},
			run: func(ctx context.Context, f mongodb.Fencer, coll *mongo.Collection, ids []bson.RawValue) error {
				var list []widening
				for _, id := range ids {
					list = append(list, widening{NS: mongodb.Namespace(coll), ID: id, Topics: []string{"b"}})
				}
				return widenExceptions(ctx, f, list)
			},
		},
		"marks of delivered envelopes": {
			done: bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}},
			run: func(ctx context.Context, f mongodb.Fencer, coll *mongo.Collection, ids []bson.RawValue) error {
				var list []purge.Sent
				for _, id := range ids {
					list = append(list, purge.Sent{NS: mongodb.Namespace(coll), ID: id})
				}
				return purge.RecordSent(ctx, f, purge.RecordMark, list)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			coll, _ := exceptionOutbox(t)

			var ids []bson.RawValue
			var docs []any
			for i := range all {
				_, id, err := bson.MarshalValue(fmt.Sprint(i))
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, bson.RawValue{Type: bson.TypeString, Value: id})
				docs = append(docs, append(bson.D{{Key: "_id", Value: fmt.Sprint(i)}}, write.doc...))
			}
			if _, err := coll.InsertMany(t.Context(), docs); err != nil {
				t.Fatal(err)
			}

			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			h := &stacktest.Hasty{Fence: &plainFencer{client: coll.Database().Client()}, Coll: coll, Done: write.done, Most: 40}
			if err := write.run(ctx, h, coll, ids); err != nil {
				t.Fatalf("after %d in vain: %v", h.Late.Load(), err)
			}

			if n, err := coll.CountDocuments(ctx, write.done); err != nil || n != all {
				t.Errorf("%d of %d are written, %v", n, all, err)
			}
		})
	}
}
