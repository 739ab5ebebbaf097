package scheduled

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/waiting"
)

// N3: if the server is too slow for one transaction, due envelopes are claimed in smaller ones. They are late, but they
// are sent.
func TestN03_DueEnvelopesAreClaimedInPartsOnASlowServer(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(120, 0)
	slow := &stacktest.Hasty{Coll: p.coll, Done: hasField("claim"), Most: 5}
	x := p.takeOver(func(_ *waiting.FinisherConfig, c *Config) { slow.Fence, c.Fencer = c.Fencer, slow })
	x.waitSettled(len(ids))
	x.release()
	x.checkSentOnce(time.Time{}, ids...)
	if n := slow.Late.Load(); n == 0 || n > 40 {
		t.Errorf("%d attempts in vain", n)
	}
}

// N3: a takeover removes the claims of an earlier life in smaller transactions where the server is too slow for one of all, or it
// would never be over.
func TestN03_ClaimsOfAnotherLifeAreDisownedInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	const all = 120
	coll := newDatabase(t).Collection("outbox")
	var ids []bson.RawValue
	var docs []any
	for i := range all {
		id := bson.NewObjectID()
		ids = append(ids, bson.RawValue{Type: bson.TypeObjectID, Value: id[:]})
		docs = append(docs, bson.D{{Key: "_id", Value: id}, {Key: "n", Value: i}, {Key: "claim", Value: bson.D{{Key: "epoch", Value: int64(9)}}}})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), overdue)
	defer cancel()
	done := bson.D{{Key: "claim.epoch", Value: int64(1)}}
	slow := &stacktest.Hasty{Fence: &plainFencer{client: coll.Database().Client()}, Coll: coll, Done: done, Most: 40}
	if err := disownClaims(ctx, slow, coll, 2, ids); err != nil {
		t.Fatalf("after %d in vain: %v", slow.Late.Load(), err)
	}
	if n, err := coll.CountDocuments(ctx, done); err != nil || n != all {
		t.Errorf("%d of %d are disowned, %v", n, all, err)
	}
	if slow.Late.Load() == 0 {
		t.Error("no attempt was late")
	}
}
