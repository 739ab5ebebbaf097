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
		in   any
		want []byte
	}{
		"bytes":     {[]byte{0, 255, 1}, []byte{0, 255, 1}},
		"no bytes":  {[]byte{}, []byte{}},
		"string":    {"hé", []byte("hé")},
		"document":  {bson.D{{Key: "a", Value: int32(1)}}, []byte(`{"a":1}`)},
		"array":     {bson.A{"x", int32(2)}, []byte(`["x",2]`)},
		"tombstone": {nil, nil},
	} {
		got, err := event.New("order", "1", "T", c.in).Payload()
		if err != nil || !cmp.Equal(got, c.want) {
			t.Errorf("%s: payload = %q, %v; want %q", name, got, err, c.want)
		}
	}
}

func TestAChangedCopyLeavesTheEventAsItWas(t *testing.T) {
	t.Parallel()
	until := time.UnixMilli(1_900_000_000_000)
	e := event.New("order", "1", "T", "old", event.WithHeader("a", []byte("1")), event.WithHeader("b", []byte("2")), event.WithExpiresAt(until))
	c := e.With(event.WithPayload([]byte("new")), event.WithType("U"), event.WithoutHeader("a"), event.WithTopic("t"),
		event.WithContentType("text/plain"), event.WithSchemaVersion("2"))
	if p, _ := c.Payload(); string(p) != "new" || c.Type() != "U" || c.HasHeader("a") || !c.HasHeader("b") || c.ID() != e.ID() {
		t.Errorf("changed: payload %q type %q headers %v", p, c.Type(), c.Headers())
	}

	if c.Topic() != "t" || c.ContentType() != "text/plain" || c.SchemaVersion() != "2" {
		t.Errorf("changed: topic %q content type %q version %q", c.Topic(), c.ContentType(), c.SchemaVersion())
	}

	if p, _ := e.Payload(); string(p) != "old" || e.Type() != "T" || !e.HasHeader("a") || e.Topic() != "" {
		t.Errorf("the original changed: payload %q type %q headers %v", p, e.Type(), e.Headers())
	}

	if at, ok := c.ExpiresAt(); !ok || !at.Equal(until) {
		t.Errorf("expires at %v, %v", at, ok)
	}

	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}
