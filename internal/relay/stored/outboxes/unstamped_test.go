package outboxes_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func TestIDTimeReadsTheIDsThatContainATime(t *testing.T) {
	t.Parallel()
	now := time.Now()
	v7 := uuid.Must(uuid.NewV7())
	v4 := uuid.New()
	notTheVariant := v7
	notTheVariant[8] = 0xc0
	for name, c := range map[string]struct {
		id  any
		has bool
	}{
		"an ObjectId":                     {bson.NewObjectID(), true},
		"a UUID of version 7":             {bson.Binary{Subtype: bson.TypeBinaryUUID, Data: v7[:]}, true},
		"a UUID of version 4":             {bson.Binary{Subtype: bson.TypeBinaryUUID, Data: v4[:]}, false},
		"version 7 of another variant":    {bson.Binary{Subtype: bson.TypeBinaryUUID, Data: notTheVariant[:]}, false},
		"a UUID of the legacy subtype":    {bson.Binary{Subtype: bson.TypeBinaryUUIDOld, Data: v7[:]}, false},
		"bytes that look like a UUID":     {bson.Binary{Data: v7[:]}, false},
		"short bytes":                     {bson.Binary{Subtype: bson.TypeBinaryUUID, Data: v7[:8]}, false},
		"a text":                          {v7.String(), false},
		"a number":                        {int64(7), false},
		"a date":                          {now, false},
		"a document that has an ObjectId": {bson.D{{Key: "a", Value: bson.NewObjectID()}}, false},
		"null":                            {bson.Null{}, false},
	} {
		typ, val, err := bson.MarshalValue(c.id)
		if err != nil {
			t.Fatal(name, err)
		}
		at, ok := outboxes.IDTime(byte(typ), val)
		if ok != c.has || ok && at.Sub(now).Abs() > 2*time.Second {
			t.Errorf("%s: %v, %v", name, at, ok)
		}
	}

	if _, ok := outboxes.IDTime(byte(bson.TypeObjectID), []byte{1, 2}); ok {
		t.Error("a cut id has a time")
	}
}

func TestFirstIDsBeginWithTheirTime(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_750_000_000_123)
	id := outboxes.FirstObjectID(at)
	if got, ok := outboxes.IDTime(byte(bson.TypeObjectID), id[:]); !ok || got.Unix() != at.Unix() {
		t.Errorf("ObjectId: %v, %v", got, ok)
	}

	u := outboxes.FirstUUID(at)
	u.Data[6], u.Data[8] = 0x70, 0x80
	typ, val, err := bson.MarshalValue(u)
	if got, ok := outboxes.IDTime(byte(typ), val); err != nil || !ok || !got.Equal(at) {
		t.Errorf("UUID: %v, %v, %v", got, ok, err)
	}
	if outboxes.FirstObjectID(time.Time{}) != (bson.ObjectID{}) {
		t.Error("the zero time is not before all ids")
	}
}
