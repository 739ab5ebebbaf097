package scheduled

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// N19: five owners claim at the same time, and each considers envelopes due that the others consider due as well. Together the
// claims are all envelopes, once.
func TestN19_ClaimsThatOverlapShareNothing(t *testing.T) {
	t.Parallel()
	const rounds, owners, envelopes = 20, 5, 50
	coll := newDatabase(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}

	shared := 0
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
			mine := []bson.RawValue{}
			for i := range ids {
				// Neighbors share half of their envelopes, and the choice of some is random.
				if at := (i*owners/envelopes - o + owners) % owners; at < 2 || rand.IntN(4) == 0 {
					mine = append(mine, ids[i])
				}
			}
			wg.Go(func() {
				var took []string
				err := mongodb.ErrSlow
				// The claims of other owners conflict with this claim each time.
				for errors.Is(err, mongodb.ErrSlow) {
					fence := &plainFencer{client: coll.Database().Client()}
					err = fence.Fenced(t.Context(), nil, mongodb.LimitRuns(len(mine), func(tx context.Context) error {
						took = took[:0]
						_, err := takeDue(tx, coll, mine, 0, false, mongodb.MaxBytes, func(raw bson.Raw, _ time.Time) {
							took = append(took, string(raw.Lookup("_id").Value))
						})
						return err
					}))
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for _, id := range took {
					had[id] = append(had[id], o)
				}
			})
			shared += len(mine)
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
	if shared <= rounds*envelopes {
		t.Errorf("nothing overlapped: %d for %d", shared, rounds*envelopes)
	}
}
