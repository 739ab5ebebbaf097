package eventid

import (
	"encoding/json"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// An id is a field of the documents and responses of services: nothing of it may get lost there.
func TestAnIDIsAFieldOfADocument(t *testing.T) {
	t.Parallel()
	type document struct {
		Reminder ID `bson:"reminder,omitempty" json:"reminder"`
	}
	for _, id := range []ID{
		{}, New([16]byte{1, 2}), New(bson.ObjectID{3}), New("o-1"),
	} {
		text, err := json.Marshal(document{id})
		var ofJSON document
		if err != nil || json.Unmarshal(text, &ofJSON) != nil || ofJSON.Reminder != id || string(text) != `{"reminder":"`+id.String()+`"}` {
			t.Errorf("JSON of %q: got %s and %q, %v", id, text, ofJSON.Reminder, err)
		}
		raw, err := bson.Marshal(document{id})
		var ofBSON document
		if err != nil || bson.Unmarshal(raw, &ofBSON) != nil || ofBSON.Reminder != id {
			t.Errorf("BSON of %q: got %v and %q, %v", id, bson.Raw(raw), ofBSON.Reminder, err)
		}
	}
}
