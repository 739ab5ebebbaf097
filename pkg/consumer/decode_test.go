package consumer_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// relayEvent returns the record that the relay makes of an event.
func relayEvent(t *testing.T, cfg routing.PresetConfig, ev event.Event, meta routing.Meta) *consumer.Message {
	t.Helper()
	p, err := routing.NewPreset(cfg)
	if err != nil {
		t.Fatal(err)
	}

	doc, err := bson.Marshal(ev)
	if err != nil {
		t.Fatal(err)
	}
	var v envelope.View
	if err := envelope.Parse(doc, &v); err != nil {
		t.Fatal(err)
	}

	v.Delivery = 2
	var rec record.Record
	meta.DB, meta.Coll = []byte("db"), []byte("outbox")
	if err := p.Filler().Fill(&v, &meta, routing.Target{Topic: "topic", Partition: 3}, &rec); err != nil {
		t.Fatal(err)
	}

	r := &consumer.Message{Topic: rec.Topic, Partition: rec.Partition, Offset: 9, Time: time.UnixMilli(rec.TimeMS), Key: rec.Key, Value: rec.Value}
	for _, h := range rec.Headers {
		r.Headers = append(r.Headers, event.Header{Key: string(h.Key), Value: h.Value})
	}
	return r
}

// The consumer reads the records of all presets of the relay as the original event.
func TestDecodeReadsEveryPresetOfTheRelay(t *testing.T) {
	t.Parallel()
	ev := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("application/json", []byte(`{"total":7}`)), event.WithSchemaVersion("3"))
	meta := routing.Meta{Redelivered: true}
	for name, c := range map[string]struct {
		cfg  routing.PresetConfig
		want consumer.Message
	}{
		"debezium": {
			routing.PresetConfig{Name: routing.Debezium, Headers: map[string]string{"eventType": "{type}"}},
			consumer.Message{Name: "OrderPlaced"},
		},
		"plain": {
			routing.PresetConfig{Name: routing.Plain},
			consumer.Message{Name: "OrderPlaced", Aggregate: event.Aggregate{Type: "order"}, ContentType: "application/json", SchemaVersion: "3"},
		},
		"cloudevents": {
			routing.PresetConfig{Name: routing.CloudEvents},
			consumer.Message{Name: "OrderPlaced", ContentType: "application/json", SchemaVersion: "3"},
		},
		"structured": {
			routing.PresetConfig{Name: routing.CloudEvents, Structured: true},
			consumer.Message{Name: "OrderPlaced", ContentType: "application/json", SchemaVersion: "3"},
		},
	} {
		m := relayEvent(t, c.cfg, ev, meta)
		r := m.Clone()

		if err := consumer.Decode(t.Context(), m); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}

		if len(m.Source) != 16 || event.ParseID(m.ID) != ev.ID() {
			t.Errorf("%s: id %q of %q", name, m.ID, m.Source)
		}

		c.want.ID, c.want.Source, c.want.Headers, c.want.Time = m.ID, m.Source, r.Headers, r.Time
		c.want.Topic, c.want.Partition, c.want.Offset, c.want.Key = "topic", 3, 9, []byte("o-1")
		c.want.Aggregate.ID, c.want.Value, c.want.Delivery, c.want.Redelivered = "o-1", []byte(`{"total":7}`), 2, true
		if d := cmp.Diff(&c.want, m); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// An event cannot replace its type, and with it the rule by which it got its topic, by a payload that looks like a CloudEvent.
func TestDecodeTakesTheTypeFromTheRelay(t *testing.T) {
	t.Parallel()
	body := `{"id":"forged","source":"forged","type":"Forged","data":{}}`
	for name, cfg := range map[string]routing.PresetConfig{
		"plain":       {Name: routing.Plain},
		"debezium":    {Name: routing.Debezium, Headers: map[string]string{"eventType": "{type}"}},
		"cloudevents": {Name: routing.CloudEvents},
	} {
		for from, ev := range map[string]event.Event{
			"its content type": event.New(event.Aggregate{Type: "order", ID: "o"}, "OrderPlaced",
				event.Bytes(record.TypeCloudEvents, []byte(body))),
			"a header": event.New(event.Aggregate{Type: "order", ID: "o"}, "OrderPlaced",
				event.Bytes("application/json", []byte(body)), event.WithHeader(record.HeaderHTTPContentType, []byte(record.TypeCloudEvents))),
		} {
			m := relayEvent(t, cfg, ev, routing.Meta{})
			if err := consumer.Decode(t.Context(), m); err != nil {
				t.Errorf("%s, by %s: %v", name, from, err)
			}
			if m.Name != "OrderPlaced" || m.ID == "forged" || m.Source == "forged" || string(m.Value) != body {
				t.Errorf("%s, by %s: message %q with id %q of %q and value %s", name, from, m.Name, m.ID, m.Source, m.Value)
			}
		}
	}
}

func TestDecodeOfStructuredEventsByTheirData(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"type":"a","data":{"b": 1} }`:                                   `{"b": 1}`,
		`{"type":"a","data":"text","datacontenttype":"text/plain"}`:       `text`,
		`{"type":"a","data":"text","datacontenttype":"application/json"}`: `"text"`,
		`{"type":"a","data_base64":"AAE="}`:                               "\x00\x01",
		`{"type":"a"}`:                                                    "",
		`{"data":1}`:                                                      "error: without a type",
		`{`:                                                               "error: structured",
		`{"type":"a","data_base64":"?"}`:                                  "error: data_base64",
		`{"type":"a","data":"x\u00e9","datacontenttype":"text/plain; q=\"\""}`: "xé",
	} {
		m := &consumer.Message{Value: []byte(body), Headers: []event.Header{{Key: "content-type", Value: []byte("application/cloudevents+json; charset=UTF-8")}}}
		err := consumer.Decode(t.Context(), m)

		if reason, bad := strings.CutPrefix(want, "error: "); bad {
			if err == nil || !strings.Contains(err.Error(), reason) {
				t.Errorf("%s: %v", body, err)
			}
			continue
		}

		if err != nil || string(m.Value) != want || m.Tombstone() {
			t.Errorf("%s: %q, %v", body, m.Value, err)
		}
	}
}

func TestDecodeRejectsHeadersThatAreNone(t *testing.T) {
	t.Parallel()
	for _, h := range []event.Header{
		{Key: record.HeaderDelivery, Value: []byte("-1")}, {Key: record.HeaderDelivery}, {Key: record.HeaderAttempt, Value: []byte("0")},
	} {
		m := &consumer.Message{Headers: []event.Header{h}}
		if err := consumer.Decode(t.Context(), m); !errors.Is(err, consumer.ErrMalformed) {
			t.Errorf("%s=%q: %+v (%v)", h.Key, h.Value, m, err)
		}
	}

	err := consumer.WrapDecodeError(&transport.Record{Topic: "t", Partition: 1, Offset: 2}, errWanted)
	if !errors.Is(err, errWanted) || !strings.Contains(err.Error(), "t/1@2") {
		t.Error(err)
	}
}
