package term

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
)

// N16: two shards may commit at one cluster time, so their events have one position. Each record gets the image of the right event.
func TestN16_TheImageOfAnotherShardIsNotTaken(t *testing.T) {
	t.Parallel()
	position := []byte("8266A1B2C3000000052C01002B0A")
	insert := func(coll string, id eventid.ID) *changes.Event {
		kind, val, err := id.MarshalBSONValue()
		if err != nil {
			t.Fatal(err)
		}
		return &changes.Event{Op: changes.Insert, Pos: position, IDType: kind, ID: val, DB: []byte("d"), Coll: []byte(coll)}
	}
	outcome := func(coll, id string, isString bool) *ledger.Outcome {
		ns := routing.NamespaceHash("d." + coll)
		return &ledger.Outcome{Headers: ledger.Headers{Event: pipeline.EventNumber(position), ID: []byte(id), StringID: isString, NSHash: ns[:]}}
	}

	object := bson.ObjectID{7}
	missing := missingImages{}
	text, again, uuid, hex, other := outcome("a", "text", false), outcome("a", "text", false),
		outcome("a", "AQIDAAAAAAAAAAAAAAAAAA==", false), outcome("a", object.Hex(), true), outcome("b", "text", false)
	for _, o := range []*ledger.Outcome{text, again, uuid, hex, other} {
		missing[o.Event] = append(missing[o.Event], o)
	}

	for _, step := range []struct {
		event *changes.Event
		want  []*ledger.Outcome
	}{
		{insert("a", eventid.New("foreign")), nil},
		{insert("c", eventid.New("text")), nil},
		{insert("b", eventid.New("text")), []*ledger.Outcome{other}},
		{insert("a", eventid.New([16]byte{1, 2, 3})), []*ledger.Outcome{uuid}},
		{insert("a", eventid.New("text")), []*ledger.Outcome{text, again}},
		{insert("a", eventid.New("text")), nil},
		{insert("a", eventid.New(object.Hex())), []*ledger.Outcome{hex}},
	} {
		got := missing.findOf(step.event)
		if len(got) != len(step.want) {
			t.Errorf("%s in %s: %d outcomes, want %d", step.event.ID, step.event.Coll, len(got), len(step.want))
			continue
		}
		for i := range got {
			if got[i] != step.want[i] {
				t.Errorf("%s in %s: outcome %d has the id %s", step.event.ID, step.event.Coll, i, got[i].ID)
			}
			got[i].Raw = bson.Raw{0}
		}
	}
}
