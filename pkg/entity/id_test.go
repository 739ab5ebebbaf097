package entity_test

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/entity"
)

type doc[I entity.ID] struct {
	Key  I `bson:"_id"`
	Peer uuid.UUID
	N    int
}

func testID[I entity.ID](t *testing.T, w world, typ bson.Type, ids ...I) {
	t.Helper()
	name := "c" + strconv.Itoa(int(typ))
	db := w.db
	r, err := entity.NewRecorded(db.Collection(name), w.box, name, func(d *doc[I]) *I { return &d.Key })
	if err != nil {
		t.Fatal(err)
	}

	p, err := entity.NewProjector[doc[I], I](db.Collection(name+"_read"), name)
	if err != nil {
		t.Fatal(err)
	}

	from := len(w.readMessages(0))
	peer := uuid.New()
	w.tx(func(ctx context.Context) error {
		for i, id := range ids {
			if _, err := r.Insert(ctx, doc[I]{id, peer, i}); err != nil {
				return err
			}
		}

		got, err := r.Load(ctx, ids[0])
		if diff := cmp.Diff(doc[I]{ids[0], peer, 0}, got); diff != "" || err != nil {
			t.Errorf("%v: %s", err, diff)
		}

		var zero I
		if _, err := r.Store(ctx, doc[I]{zero, peer, 0}); !errors.Is(err, entity.ErrNoID) {
			t.Errorf("without an id: %v", err)
		}

		return nil
	})

	for _, m := range w.readMessages(from) {
		if err := p.Handle(t.Context(), m); err != nil {
			t.Error(err)
		}
	}

	if diff := cmp.Diff(w.listStored(name), w.listStored(name+"_read")); diff != "" || len(w.listStored(name)) != len(ids) {
		t.Errorf("the read side differs: %s", diff)
	}

	var raw bson.Raw
	if err := db.Collection(name).FindOne(t.Context(), bson.D{}).Decode(&raw); err != nil {
		t.Fatal(err)
	}

	if got := raw.Lookup("_id").Type; got != typ {
		t.Errorf("stored as %s", got)
	}

	if sub, _ := raw.Lookup("peer").Binary(); sub != bson.TypeBinaryUUID {
		t.Errorf("a UUID inside is of subtype %d", sub)
	}
}

func TestIDsAreStoredNatively(t *testing.T) {
	t.Parallel()
	w := setup(t)
	testID(t, w, bson.TypeString, "a", "string:with:colons", "ü")
	testID(t, w, bson.TypeInt32, int32(1), -5)
	testID(t, w, bson.TypeInt64, int64(1), 1<<60, -1)
	testID(t, w, bson.TypeObjectID, bson.NewObjectID(), bson.NewObjectID())
	testID(t, w, bson.TypeBinary, uuid.New(), uuid.New())
	var raw bson.Raw
	if err := w.db.Collection("c5").FindOne(t.Context(), bson.D{}).Decode(&raw); err != nil {
		t.Fatal(err)
	}

	if sub, _ := raw.Lookup("_id").Binary(); sub != bson.TypeBinaryUUID {
		t.Errorf("a UUID is of subtype %d", sub)
	}

	// The same text as another type is another entity.
	if err := just(w.db.Collection("orders").InsertOne(t.Context(), bson.D{{Key: "_id", Value: int32(7)}})); err != nil {
		t.Fatal(err)
	}

	w.tx(func(ctx context.Context) error {
		if _, ok, err := w.collection().Find(ctx, "7"); ok || err != nil {
			t.Errorf("found %v, %v", ok, err)
		}
		return nil
	})
}
