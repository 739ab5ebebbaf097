package waiting

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// N3: if the server is too slow for one transaction, outcomes are written in smaller ones, and so are the next ones:
// they do not start with a large transaction again.
func TestN03_FatesAreWrittenInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	var docs []bson.D
	for i := range 80 {
		docs = append(docs, h.newException(i, fmt.Sprint("k", i), "parked"))
	}
	h.insert(docs...)

	te := h.newTerm()
	defer te.out.kill(nil)
	slow := &stacktest.Hasty{Fence: h.held, Coll: h.coll, Done: hasField("sentAt"), Most: 5}
	shared := te.f.config.Shared
	shared.Fencer = slow
	f := NewFinisher(FinisherConfig{Shared: shared, Recording: "watermark"})
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()

	for from := range 2 {
		var batch []*decision
		for i := range 40 {
			_, id, err := bson.MarshalValue(fmt.Sprintf("e%06d", 40*from+i))
			if err != nil {
				t.Fatal(err)
			}
			a := &decision{Delivery: &Delivery{NS: h.ns(), ID: bson.RawValue{Type: bson.TypeString, Value: id}, Origin: outboxes.OriginStream}}
			a.fate.End, a.changed = Finished, true
			batch = append(batch, a)
		}

		before := slow.Late.Load()
		if err := f.writeOutcomes(ctx, batch); err != nil {
			t.Fatal(err)
		}
		if n := slow.Late.Load() - before; from > 0 && n > 6 {
			t.Errorf("%d attempts in vain at the second batch", n)
		}
	}

	if left := h.countLeft(); left != 0 {
		t.Errorf("%d exceptions are left", left)
	}
}

func hasField(field string) bson.D {
	return bson.D{{Key: field, Value: bson.D{{Key: "$exists", Value: true}}}}
}
