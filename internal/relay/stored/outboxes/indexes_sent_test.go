package outboxes_test

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

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

	// The index contains only marked envelopes.
	if _, err := coll.InsertMany(t.Context(), []any{
		bson.D{{Key: "_id", Value: 1}, {Key: "sentAt", Value: time.Now()}},
		bson.D{{Key: "_id", Value: 2}},
	}); err != nil {
		t.Fatal(err)
	}
	n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}, options.Count().SetHint(outboxes.SentIndexName))
	if err != nil || n != 1 {
		t.Errorf("%d envelopes by the index, %v", n, err)
	}
}
