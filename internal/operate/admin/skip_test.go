package admin_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// An order may fail after its letter was stored, so the operator repeats it.
func TestARepeatedSkipStoresNoOtherLetter(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.insert(f.a, letterOf("poison", planted))
	order := admin.SkipOrder{Collection: mongodb.Namespace(f.a), ID: "poison"}
	first, err := f.op.Recovery().PassOver(t.Context(), order)
	if err != nil {
		t.Fatal(err)
	}
	again, err := f.op.Recovery().PassOver(t.Context(), order)
	if err != nil || again.Letter != first.Letter {
		t.Errorf("repeated: got the letter %s (%v), want %s", again.Letter, err, first.Letter)
	}

	var doc lease.Document
	watchers := f.state.Collection("watchers")
	if err := watchers.FindOne(t.Context(), bson.D{{Key: "control.skips.id", Value: "poison"}}).Decode(&doc); err != nil || len(doc.Control.Skips) != 1 {
		t.Fatalf("orders: got %+v (%v), want one", doc.Control.Skips, err)
	}

	// Another event gets the id after the stream has passed the first one.
	passed := bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: uint32(time.Now().Add(time.Hour).Unix())}}}}}
	if _, err := watchers.UpdateByID(t.Context(), doc.ID, passed); err != nil {
		t.Fatal(err)
	}
	if other, err := f.op.Recovery().PassOver(t.Context(), order); err != nil || other.Letter == first.Letter {
		t.Errorf("another event: got the letter %s (%v)", other.Letter, err)
	}
}

func TestTooManySkipsAreRejectedBeforeTheirLetter(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.insert(f.a, letterOf("e-0", planted), letterOf("poison", planted))
	var orders []admin.SkipOrder
	for n := range 100 {
		orders = append(orders, admin.SkipOrder{Collection: mongodb.Namespace(f.a), ID: fmt.Sprintf("e-%d", n)})
	}
	for _, order := range append(orders, orders[0]) {
		if _, err := f.op.Recovery().PassOver(t.Context(), order); err != nil {
			t.Fatalf("%s: %v", order.ID, err)
		}
	}

	got, err := f.op.Recovery().PassOver(t.Context(), admin.SkipOrder{Collection: mongodb.Namespace(f.a), ID: "poison"})
	if !isInvalid(err) || !strings.Contains(err.Error(), "100 events") || got.Letter != "" {
		t.Errorf("one too many: got %+v, %v", got, err)
	}
	n, err := f.state.Collection("letters").CountDocuments(t.Context(), bson.D{{Key: "class", Value: "skipped"}})
	if n != 100 || err != nil {
		t.Errorf("letters: got %d (%v), want 100", n, err)
	}
}
