package pipeline

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/record"
)

// N15: of an event that comes once more, those topics are left out that have refused it; its id may have come again elsewhere.
func TestN15_WhatIsDeadIsKnownByItsPlace(t *testing.T) {
	t.Parallel()
	id := func(s string) bson.RawValue {
		_, v, err := bson.MarshalValue(s)
		if err != nil {
			t.Fatal(err)
		}
		return bson.RawValue{Type: bson.TypeString, Value: v}
	}
	o := NewPreviousOwner()
	o.AddDeadLetter("d.c", deadletter.LaterLetter{ID: id("all"), Pos: "8201"})
	o.AddDeadLetter("d.c", deadletter.LaterLetter{ID: id("one"), Pos: "8202", Topic: "a"})
	for _, c := range []struct {
		ns, id, pos string
		left        int
		dead        bool
	}{
		{"d.c", "all", "8201", 0, true}, {"d.c", "one", "8202", 1, true}, {"d.c", "one", "8203", 2, false}, {"d.x", "one", "8202", 2, false}, {"d.c", "two", "8202", 2, false},
	} {
		rest, dead := o.removeDeadTopics(c.ns, id(c.id), []byte(c.pos), []record.Record{{Topic: "a"}, {Topic: "b"}})
		if len(rest) != c.left || dead != c.dead || c.left == 1 && rest[0].Topic != "b" {
			t.Errorf("%+v: %v, %v", c, rest, dead)
		}
	}
	o.Reset()
	if !o.IsEmpty() {
		t.Error("it forgets nothing")
	}
}
