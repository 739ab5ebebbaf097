package consumer

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/pkg/event"
)

// relayEvent returns the record that the relay writes for an event, with the given preset.
func relayEvent(t *rapid.T, ev event.Event, preset string) *Record {
	doc, err := ev.MarshalBSON()
	if err != nil {
		t.Fatal(err)
	}
	var v envelope.View
	if err := envelope.Parse(doc, &v); err != nil {
		t.Fatal(err)
	}

	r := &Record{Topic: string(v.Topic), Key: v.OrderingKey(), Value: v.Payload}
	add := func(k string, val []byte) { r.Headers = append(r.Headers, event.Header{Key: k, Value: val}) }
	add("id", v.AppendID(nil))
	add("outrelay-ns", []byte("12345678"))

	switch preset {
	case "plain":
		add("type", v.Type)
		add("aggregatetype", v.AggregateType)
		add("aggregateid", v.AggregateID)
		if v.ContentType != nil {
			add("contenttype", v.ContentType)
		}
	case "cloudevents":
		add("ce_specversion", []byte("1.0"))
		add("ce_id", v.AppendID(nil))
		add("ce_type", v.Type)
		add("ce_source", []byte("somewhere"))
	case "structured":
		add("content-type", []byte("application/cloudevents+json; charset=UTF-8"))
		data, _ := json.Marshal(v.Payload)
		r.Value, _ = json.Marshal(map[string]any{
			"id": string(v.AppendID(nil)), "type": string(v.Type), "data_base64": json.RawMessage(data),
		})
	}

	for it := v.Headers.Iter(); it.Next(); {
		add(string(it.Key), it.Value)
	}
	return r
}

func TestAMessageIsTheSameAfterItsWayThroughTheOutbox(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`[a-zA-Z0-9]{0,8}`)
		from := &Record{Topic: "orders", Partition: 3, Offset: 17, Value: rapid.SliceOfN(rapid.Byte(), 1, 40).Draw(t, "value")}
		if k := text.Draw(t, "key"); k != "" {
			from.Key = []byte(k)
		}
		nonEmpty := text.Filter(func(s string) bool { return s != "" })
		for _, name := range []string{
			"id", "outrelay-ns", "outrelay-id-type", "type", "ce_type", "aggregatetype", "aggregateid", "contenttype",
			"traceparent", "bin",
		} {
			if rapid.Bool().Draw(t, name) {
				from.Headers = append(from.Headers, event.Header{Key: name, Value: []byte(nonEmpty.Draw(t, name+" value"))})
			}
		}

		before, err := Decode(from)
		if err != nil {
			t.Fatal(err)
		}
		before = completeMessage(before, from, "g")

		v := Verdict{Action: Schedule, Attempts: Attempts{}.Note(errBatchNotRun, before, time.Unix(1, 0))}
		// The disposer gets the message with the record's own bytes.
		ev := newScheduledRetry(newRetryMessage(before, "h", v, time.Time{}), "h", time.Now())
		if err := ev.Validate(); err != nil {
			t.Fatal(err)
		}

		r := relayEvent(t, ev, rapid.SampledFrom([]string{"debezium", "plain", "cloudevents"}).Draw(t, "preset"))
		r.Partition, r.Offset = 1, 99
		r.Headers, r.Key = restoreHeaders(r.Headers, r.Key)
		after, err := Decode(r)
		if err != nil {
			t.Fatal(err)
		}
		after = completeMessage(after, r, "g")

		if after.Attempt != 2 || after.Origin() != (Origin{"orders", 3, 17}) {
			t.Errorf("got attempt %d, origin %v, want attempt 2, origin orders/3/17", after.Attempt, after.Origin())
		}
		if only, _ := after.Header(HeaderOnly); string(only) != "g/h" {
			t.Errorf("header %s: got %q, want g/h", HeaderOnly, only)
		}

		// These fields and the other headers differ in every redelivery.
		for _, m := range []*Message{before, after} {
			m.Partition, m.Offset, m.Attempt = 0, 0, 0
			var own []event.Header
			for _, name := range []string{
				"id", "outrelay-ns", "outrelay-id-type", "type", "ce_type", "ce_id", "aggregatetype", "aggregateid",
				"contenttype", "traceparent", "bin",
			} {
				if val, ok := m.Header(name); ok {
					own = append(own, event.Header{Key: name, Value: val})
				}
			}
			m.Headers = own
		}
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("message (-before +after):\n%s", diff)
		}
		if dedupID(before) != dedupID(after) {
			t.Errorf("identity: got %q after the outbox, want %q", dedupID(after), dedupID(before))
		}
	})
}

func TestAStructuredEventComesBackWithTheSamePayload(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		body := rapid.SliceOfN(rapid.Byte(), 1, 40).Draw(t, "value")
		first := relayEvent(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", body), event.WithID("one"), event.WithTopic("orders")), "structured")
		before, err := Decode(first)
		if err != nil {
			t.Fatal(err)
		}
		before = completeMessage(before, first, "g")

		original := before.Copy()
		original.Value = first.Value
		ev := newScheduledRetry(newRetryMessage(original, "h", Verdict{Action: Schedule}, time.Time{}), "h", time.Now())

		r := relayEvent(t, ev, rapid.SampledFrom([]string{"plain", "structured"}).Draw(t, "preset"))
		r.Headers, r.Key = restoreHeaders(r.Headers, r.Key)
		after, err := Decode(r)
		if err != nil {
			t.Fatal(err)
		}
		after = completeMessage(after, r, "g")

		if !bytes.Equal(after.Value, body) || after.Name != "A" || after.ID != "one" {
			t.Errorf("got type %q, id %q, value %x; want type \"A\", id \"one\", value %x", after.Name, after.ID, after.Value, body)
		}
	})
}

func TestRecordsThatCameStraightStayAsTheyAre(t *testing.T) {
	t.Parallel()
	headers := []event.Header{{Key: "id", Value: []byte("1")}, {Key: "retry-no-key", Value: []byte("true")}, {Key: "type", Value: []byte("A")}}
	got, key := restoreHeaders(headers, []byte("k"))
	if diff := cmp.Diff(headers, got); diff != "" || string(key) != "k" {
		t.Errorf("key: got %q, want k; headers (-want +got):\n%s", key, diff)
	}

	for _, bad := range []string{"", "a/b", "a/x/1", "a/1/x", "a/1/2/3"} {
		m := &Message{Topic: "own", Headers: []event.Header{{Key: HeaderRetryOrigin, Value: []byte(bad)}}}
		if o := m.Origin(); o.Topic != "own" {
			t.Errorf("origin of header %q: got %v, want the own place", bad, o)
		}
	}

	m := &Message{Headers: []event.Header{{Key: HeaderRetryHistory, Value: []byte("not JSON")}, {Key: HeaderDeliverBy, Value: []byte("soon")}}}
	if h := failureHistory(m, Verdict{}); len(h) != 0 {
		t.Errorf("history of an invalid header: got %v, want none", h)
	}
	if err := Precheck(m, time.Now()); err != nil {
		t.Errorf("Precheck with an invalid deadline: got %v, want nil", err)
	}
}
