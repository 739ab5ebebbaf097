package reconcile

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/store"
)

// hasty attempts again and again what writes more than most documents, as a lease does whose server is slow.
type hasty struct {
	store.Fencer
	coll *mongo.Collection
	most int64
	what bson.D // which documents are meant
	late int    // attempts in vain
}

func (h *hasty) Fenced(ctx context.Context, dirty []string, fn func(context.Context) error) error {
	for {
		late := false
		err := h.Fencer.Fenced(ctx, dirty, func(tx context.Context) error {
			coll := mongo.SessionFromContext(tx).Client().Database(h.coll.Database().Name()).Collection(h.coll.Name())
			before, err := coll.CountDocuments(tx, h.what)
			if err == nil {
				err = fn(tx)
			}
			if err != nil {
				return err
			}
			n, err := coll.CountDocuments(tx, h.what)
			if late = err == nil && n-before > h.most; late {
				return context.Canceled
			}
			return err
		})
		if !late || ctx.Err() != nil {
			return err
		}
		h.late++
	}
}

// N3: what became of many is written in smaller transactions where the server is too slow for one, and so is what comes behind it:
// it does not begin with a large one each time.
func TestN03_FatesAreWrittenInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	var docs []bson.D
	for i := range 80 {
		docs = append(docs, h.exception(i, fmt.Sprint("k", i), "parked"))
	}
	h.put(docs...)
	te := h.begin()
	defer te.out.kill(nil)
	slow := &hasty{Fencer: h.held, coll: h.coll, most: 5, what: bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}}
	f := NewFinisher(Finishing{Client: h.client, Fencer: slow, Outlet: te.out, Recording: "watermark", Now: time.Now})
	ctx, cancel := context.WithTimeout(t.Context(), overdue)
	defer cancel()
	for from := range 2 {
		var batch []*answered
		for i := range 40 {
			_, id, err := bson.MarshalValue(fmt.Sprintf("e%06d", 40*from+i))
			if err != nil {
				t.Fatal(err)
			}
			a := &answered{Delivery: &Delivery{NS: h.ns(), ID: bson.RawValue{Type: bson.TypeString, Value: id}, Origin: store.OriginStream}}
			a.outcome = a.result(store.FateSent)
			batch = append(batch, a)
		}
		before := slow.late
		if err := f.outcomes(ctx, batch); err != nil {
			t.Fatal(err)
		}
		if n := slow.late - before; from > 0 && n > 6 {
			t.Errorf("%d attempts in vain at the second batch", n)
		}
	}
	if left := h.left(); left != 0 {
		t.Errorf("%d exceptions are left", left)
	}
}

// N3, N19: so are claims, else nothing that is due would ever be sent.
func TestN03_DueOnesAreClaimedInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	p := plan(t)
	ids := p.schedule(200, -time.Minute)
	x := p.take(func(_ *Finishing, c *ScheduledConfig) {
		c.Fencer = &hasty{Fencer: c.Fencer, coll: p.coll, most: 30, what: bson.D{{Key: "claim", Value: bson.D{{Key: "$exists", Value: true}}}}}
	})
	x.settles(200)
	x.once(time.UnixMilli(0), ids...)
}
