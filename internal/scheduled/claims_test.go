package scheduled

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// N19: five owners claim at the same time, and each considers envelopes due that the others consider due as well. Each
// owner's read by its token returns only its own claims, and together the claims are all envelopes, once.
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
				claim := dueClaim{Token: fmt.Sprint("owner", o), Epoch: 7}
				group := []*claimGroup{{coll: coll, ids: mine}}
				err := mongodb.ErrSlow
				// The claims of other owners conflict with this claim each time.
				for errors.Is(err, mongodb.ErrSlow) {
					err = claimGroups(t.Context(), &plainFencer{client: coll.Database().Client()}, claim, time.Now(), group)
				}
				if err != nil {
					t.Error(err)
					return
				}
				n, err := readClaimed(t.Context(), *group[0], claim, bson.Timestamp{}, 10, func(raw bson.Raw) error {
					mu.Lock()
					defer mu.Unlock()
					id := string(raw.Lookup("_id").Value)
					had[id] = append(had[id], o)
					return nil
				})
				if err != nil || n != group[0].have {
					t.Errorf("%d claimed, %d read, %v", group[0].have, n, err)
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
		if _, err := coll.DeleteMany(t.Context(), bson.D{}); err != nil {
			t.Fatal(err)
		}
	}
	if shared <= rounds*envelopes {
		t.Errorf("nothing overlapped: %d for %d", shared, rounds*envelopes)
	}
}
