package event_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

func TestPayloadIsTheRecordsValue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		in   event.Payload
		want []byte
	}{
		"bytes":     {event.Bytes("", []byte{0, 255, 1}), []byte{0, 255, 1}},
		"no bytes":  {event.Bytes("", nil), []byte{}},
		"string":    {event.Bytes("text/plain", []byte("hé")), []byte("hé")},
		"document":  {event.Document(bson.D{{Key: "a", Value: int32(1)}}), []byte(`{"a":1}`)},
		"array":     {event.Document(bson.A{"x", int32(2)}), []byte(`["x",2]`)},
		"tombstone": {event.Payload{}, nil},
	} {
		got, err := event.New(event.Aggregate{Type: "order", ID: "1"}, "T", c.in).Payload()
		if err != nil || !cmp.Equal(got, c.want) {
			t.Errorf("%s: payload = %q, %v; want %q", name, got, err, c.want)
		}
	}
}

func TestAChangedCopyLeavesTheEventAsItWas(t *testing.T) {
	t.Parallel()
	until := time.UnixMilli(1_900_000_000_000)
	e := event.New(event.Aggregate{Type: "order", ID: "1"}, "T", event.Bytes("", []byte("old")), event.WithHeader("a", []byte("1")), event.WithHeader("b", []byte("2")), event.WithExpiry(until))
	c := e.With(event.WithPayload(event.Bytes("text/plain", []byte("new"))), event.WithHeader("c", nil), event.WithTopic("t"),
		event.WithSchemaVersion("2"))
	if p, _ := c.Payload(); string(p) != "new" || !hasHeader(c, "a") || !hasHeader(c, "b") || !hasHeader(c, "c") || c.ID() != e.ID() || c.Name() != "T" {
		t.Errorf("changed: payload %q name %q headers %v", p, c.Name(), c.Headers())
	}

	if v, _ := encodeAndParse(t, c); c.Topic() != "t" || c.ContentType() != "text/plain" || string(v.SchemaVersion) != "2" {
		t.Errorf("changed: topic %q content type %q version %q", c.Topic(), c.ContentType(), v.SchemaVersion)
	}

	if p, _ := e.Payload(); string(p) != "old" || e.ContentType() != "" || hasHeader(e, "c") || e.Topic() != "" {
		t.Errorf("the original changed: payload %q topic %q headers %v", p, e.Topic(), e.Headers())
	}

	if at, ok := c.ExpiresAt(); !ok || !at.Equal(until) {
		t.Errorf("expires at %v, %v", at, ok)
	}

	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}
