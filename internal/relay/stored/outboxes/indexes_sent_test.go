package outboxes_test

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// An index of a service with the name of the relay's stays as it is: with a TTL, the server would delete documents that were never
// delivered.
func TestEnsureSentTTLChangesNoIndexOfServices(t *testing.T) {
	t.Parallel()
	exists := bson.D{{Key: "$exists", Value: true}}
	marked := bson.D{{Key: "sentAt", Value: exists}, {Key: "sent", Value: exists}, {Key: "dueAt", Value: nil}}
	for name, index := range map[string]*options.IndexOptionsBuilder{
		"plain":               options.Index(),
		"with its TTL":        options.Index().SetExpireAfterSeconds(60),
		"of marked envelopes": options.Index().SetPartialFilterExpression(marked),
	} {
		coll, o := makeOutbox(t)
		model := mongo.IndexModel{Keys: bson.D{{Key: "sentAt", Value: 1}}, Options: index.SetName(outboxes.SentIndexName)}
		if _, err := coll.Indexes().CreateOne(t.Context(), model); err != nil {
			t.Fatal(err)
		}
		before, err := coll.Indexes().ListSpecifications(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		client := coll.Database().Client()
		if changed, err := outboxes.EnsureSentTTL(t.Context(), client, o, 0); changed || err != nil {
			t.Errorf("%s, without a TTL: changed %v, %v", name, changed, err)
		}
		if changed, err := outboxes.EnsureSentTTL(t.Context(), client, o, time.Hour); changed || !errors.Is(err, mongodb.ErrIndexConflict) {
			t.Errorf("%s, with a TTL: changed %v, %v, want %v", name, changed, err, mongodb.ErrIndexConflict)
		}
		if after, err := coll.Indexes().ListSpecifications(t.Context()); err != nil || !reflect.DeepEqual(after, before) {
			t.Errorf("%s: the indexes were changed (%v)", name, err)
		}
	}
}

// A collection that was created again under the name keeps its indexes.
func TestEnsureSentTTLChangesOnlyItsCollection(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t)
	client := coll.Database().Client()
	if _, err := outboxes.EnsureSentTTL(t.Context(), client, o, time.Hour); err != nil {
		t.Fatal(err)
	}

	o.UUID[0]++
	for _, ttl := range []time.Duration{0, time.Minute} {
		if changed, err := outboxes.EnsureSentTTL(t.Context(), client, o, ttl); changed || !errors.Is(err, mongodb.ErrCollectionGone) {
			t.Errorf("TTL %s: changed %v, %v, want %v", ttl, changed, err, mongodb.ErrCollectionGone)
		}
	}
}

func TestEnsureSentTTL(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t)
	client := coll.Database().Client()
	for i, step := range []struct {
		ttl     time.Duration
		changed bool
	}{{0, false}, {time.Hour, true}, {time.Hour, false}, {2*time.Hour - time.Millisecond, true}, {0, true}, {0, false}, {time.Minute, true}} {
		changed, err := outboxes.EnsureSentTTL(t.Context(), client, o, step.ttl)
		if err != nil || changed != step.changed {
			t.Fatalf("step %d: changed %v, %v", i, changed, err)
		}
		var have int32
		specs, err := coll.Indexes().ListSpecifications(t.Context())
		for _, s := range specs {
			if s.Name == outboxes.SentIndexName {
				have = *s.ExpireAfterSeconds
			}
		}
		if err != nil || have != int32((step.ttl+time.Second-1)/time.Second) {
			t.Fatalf("step %d: TTL %d, %v", i, have, err)
		}
	}

	// The index contains only marked envelopes. A poller of a service may store sent and sentAt before the relay delivers the envelope.
	place := bson.D{{Key: "topic", Value: "a"}, {Key: "partition", Value: int32(0)}, {Key: "offset", Value: int64(7)}}
	if _, err := coll.InsertMany(t.Context(), []any{
		bson.D{{Key: "_id", Value: 1}, {Key: "sentAt", Value: time.Now()}, {Key: "sent", Value: bson.A{place}}},
		bson.D{{Key: "_id", Value: 2}},
		bson.D{{Key: "_id", Value: 3}, {Key: "sentAt", Value: time.Now()}},
		bson.D{{Key: "_id", Value: 4}, {Key: "sentAt", Value: time.Now()}, {Key: "sent", Value: true}},
		bson.D{{Key: "_id", Value: 5}, {Key: "sentAt", Value: time.Now()}, {Key: "sent", Value: bson.A{"mail"}}},
	}); err != nil {
		t.Fatal(err)
	}
	var indexed []struct {
		ID int `bson:"_id"`
	}
	found, err := coll.Find(t.Context(), bson.D{
		{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}},
		{Key: "sent.topic", Value: bson.D{{Key: "$type", Value: "string"}}},
		{Key: "sent.offset", Value: bson.D{{Key: "$type", Value: "number"}}},
	}, options.Find().SetHint(outboxes.SentIndexName))
	if err == nil {
		err = found.All(t.Context(), &indexed)
	}
	if err != nil || len(indexed) != 1 || indexed[0].ID != 1 {
		t.Errorf("the index contains %v, %v", indexed, err)
	}
}
