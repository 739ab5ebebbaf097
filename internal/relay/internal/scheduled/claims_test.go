package scheduled

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// N19: five owners claim at the same time, and each takes the envelopes that are due first. Together the
// claims are all envelopes, once.
func TestN19_ClaimsThatOverlapShareNothing(t *testing.T) {
	t.Parallel()
	const rounds, owners, envelopes = 20, 5, 50
	coll := newDatabase(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}

	var conflicts, claims atomic.Int64
	for round := range rounds {
		docs := make([]any, envelopes)
		ids := make([]bson.RawValue, envelopes)
		for i := range docs {
			id := bson.NewObjectID()
			docs[i] = bson.D{{Key: "_id", Value: id}, {Key: "dueAt", Value: time.Now().Add(-time.Minute)}}
			ids[i] = bson.RawValue{Type: bson.TypeObjectID, Value: id[:]}
		}
		if _, err := coll.InsertMany(t.Context(), docs); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		had := map[string][]int{}
		for o := range owners {
			mine := &query{limit: 1 + rand.IntN(envelopes/2), bytes: maxClaimBytes}
			wg.Go(func() {
				for {
					var took []taken
					err := mongodb.ErrSlow
					// The claims of other owners conflict with this claim each time.
					for errors.Is(err, mongodb.ErrSlow) {
						fence := &plainFencer{client: coll.Database().Client()}
						err = fence.Fenced(t.Context(), nil, mongodb.LimitRuns(func(tx context.Context) (err error) {
							conflicts.Add(1)
							took, _, err = takeAll(tx, coll, mine, bson.NewDateTimeFromTime(time.Now()))
							return err
						}))
					}
					if err != nil {
						t.Error(err)
						return
					}
					claims.Add(1)
					mu.Lock()
					for i := range took {
						had[string(took[i].id().Value)] = append(had[string(took[i].id().Value)], o)
					}
					mu.Unlock()
					if len(took) == 0 {
						return
					}
				}
			})
		}
		wg.Wait()
		for i, id := range ids {
			if who := had[string(id.Value)]; len(who) != 1 {
				t.Fatalf("round %d: envelope %d was had by %v", round, i, who)
			}
		}
		if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 {
			t.Fatalf("%d are left in the outbox, %v", n, err)
		}
	}
	if conflicts.Load() <= claims.Load() {
		t.Errorf("nothing overlapped: %d runs of %d claims", conflicts.Load(), claims.Load())
	}
}
