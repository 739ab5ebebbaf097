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
}

func (h *hasty) Fenced(ctx context.Context, dirty []string, fn func(context.Context) error) error {
	for {
		late := false
		err := h.Fencer.Fenced(ctx, dirty, func(tx context.Context) error {
			coll := mongo.SessionFromContext(tx).Client().Database(h.coll.Database().Name()).Collection(h.coll.Name())
			sent := bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}
			before, err := coll.CountDocuments(tx, sent)
			if err == nil {
				err = fn(tx)
			}
			if err != nil {
				return err
			}
			n, err := coll.CountDocuments(tx, sent)
			if late = err == nil && n-before > h.most; late {
				return context.Canceled
			}
			return err
		})
		if !late || ctx.Err() != nil {
			return err
		}
	}
}

// N3: what became of many is written in smaller transactions where the server is too slow for one.
func TestN03_FatesAreWrittenByHalvesWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	var docs []bson.D
	for i := range 40 {
		docs = append(docs, h.exception(i, fmt.Sprint("k", i), "parked"))
	}
	h.put(docs...)
	te := h.begin()
	defer te.out.kill(nil)
	f := NewFinisher(Finishing{Client: h.client, Fencer: &hasty{h.held, h.coll, 5}, Outlet: te.out, Recording: "watermark", Now: time.Now})
	var batch []*answered
	for i := range 40 {
		_, id, err := bson.MarshalValue(fmt.Sprintf("e%06d", i))
		if err != nil {
			t.Fatal(err)
		}
		a := &answered{Delivery: &Delivery{NS: h.ns(), ID: bson.RawValue{Type: bson.TypeString, Value: id}, Origin: store.OriginStream}}
		a.outcome = a.result(store.FateSent)
		batch = append(batch, a)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := f.outcomes(ctx, batch); err != nil {
		t.Fatal(err)
	}
	if left := h.left(); left != 0 {
		t.Errorf("%d exceptions are left", left)
	}
}
