package changestream

import (
	"bytes"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/changes"
)

func TestRebuildGivesAnOrdinaryEvent(t *testing.T) {
	t.Parallel()
	raw, err := bson.Marshal(bson.D{
		{Key: "_id", Value: bson.D{{Key: "_data", Value: "82"}}},
		{Key: "operationType", Value: "insert"},
	})
	if err != nil {
		t.Fatal(err)
	}

	doc, _ := bson.Marshal(bson.D{{Key: "_id", Value: 1}})
	var ev changes.Event
	if err := changes.Parse(rebuildEvent(raw, doc), &ev); err != nil || !ev.HasDocument ||
		!bytes.Equal(ev.Document, doc) || ev.Note != nil {
		t.Errorf("%v %+v", err, ev)
	}
	if err := changes.Parse(rebuildEvent(raw, nil), &ev); err != nil || ev.HasDocument || string(ev.Note) != goneNote {
		t.Errorf("%v %+v", err, ev)
	}
	if err := bson.Raw(rebuildEvent(raw, nil)).Validate(); err != nil {
		t.Error(err)
	}
}
