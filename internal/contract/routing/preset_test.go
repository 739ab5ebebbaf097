package routing

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/pkg/event"
)

var (
	id     = uuid.MustParse("018f3f5c-0000-7000-8000-000000000001")
	commit = int64(1_760_000_000_123)
	meta   = Meta{DB: []byte("shop"), Coll: []byte("outbox"), ClusterTime: bson.Timestamp{T: 1_760_000_000, I: 5}, CommitMS: commit}
	target = Target{Topic: "orders", Partition: record.AnyPartition}
)

func newFiller(t testing.TB, c PresetConfig) *Filler {
	t.Helper()
	p, err := NewPreset(c)
	if err != nil {
		t.Fatal(err)
	}
	return p.Filler()
}

// isVariable reports whether the texts of the tests leave a header out: the namespace, which every record has, and a header of
// Debezium with another value each time.
func isVariable(h record.Header) bool {
	return bytes.Equal(h.Key, hNS) || string(h.Key) == "__debezium.context.runId"
}

// formatGolden prints a record: everything of it but the topic and variable headers.
func formatGolden(rec *record.Record) string {
	var b strings.Builder
	fmt.Fprintf(&b, "partition %d time %d key %s\n", rec.Partition, rec.TimeMS, quoted(rec.Key))
	for _, h := range rec.Headers {
		if !isVariable(h) {
			fmt.Fprintf(&b, "%s: %s\n", h.Key, quoted(h.Value))
		}
	}
	fmt.Fprintf(&b, "value %s\n", quoted(rec.Value))
	return b.String()
}

func quoted(b []byte) string {
	if b == nil {
		return "null"
	}
	return fmt.Sprintf("%q", b)
}

func fullEvent() event.Event {
	return event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Document(bson.D{{Key: "a", Value: int32(1)}, {Key: "b", Value: "x"}}),
		event.WithID(id), event.WithSchemaVersion("3"), event.WithSource("/shop"), event.WithSubject("o-1/item"),
		event.WithTime(time.UnixMilli(1_750_000_000_456)), event.WithHeader("traceparent", []byte("00-ab")), event.WithHeader("dup", []byte{0, 255}), event.WithHeader("dup", nil))
}

func smallEvent() event.Event {
	return event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("", []byte{1, 2}), event.WithID(id))
}

func TestGolden(t *testing.T) {
	t.Parallel()
	const (
		head = "partition -1 time 1760000000123 key \"o-1\"\nid: \"018f3f5c-0000-7000-8000-000000000001\"\n"
		dbz  = "partition -1 time 1760000000123 key \"o-1\"\n__debezium.context.taskId: \"0\"\n__debezium.context.connectorName: \"mongodb\"\n" +
			"id: \"AY8/XAAAcACAAAAAAAAAAQ==\"\n"
		own   = "traceparent: \"00-ab\"\ndup: \"\\x00\\xff\"\ndup: %s\n"
		value = "value \"{\\\"a\\\":1,\\\"b\\\":\\\"x\\\"}\"\n"
	)

	nothing := `""`
	if v := newView(t, fullEvent()); headerIsNull(v, 2) {
		nothing = "null"
	}
	mine := fmt.Sprintf(own, nothing)
	for name, test := range map[string]struct {
		preset PresetConfig
		event  event.Event
		want   string
	}{
		"default":             {PresetConfig{}, fullEvent(), head + "type: \"OrderPlaced\"\n" + mine + value},
		"typed":               {PresetConfig{Name: Typed}, fullEvent(), head + "type: \"OrderPlaced\"\n" + mine + value},
		"debezium":            {PresetConfig{Name: Debezium}, fullEvent(), dbz + mine + "value " + strconv.Quote("{\n  \"a\": {\n    \"$numberInt\": \"1\"\n  },\n  \"b\": \"x\"\n}") + "\n"},
		"debezium, small":     {PresetConfig{Name: Debezium}, smallEvent(), dbz + "value \"\\x01\\x02\"\n"},
		"debezium, extra":     {PresetConfig{Name: Debezium, Headers: map[string]string{"type": "{type}", "b": "x", "none": "{source}", "at": "{time}"}}, smallEvent(), dbz + "b: \"x\"\ntype: \"OrderPlaced\"\nvalue \"\\x01\\x02\"\n"},
		"debezium, tombstone": {PresetConfig{Name: Debezium}, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Gone", event.Payload{}, event.WithID(id)), dbz + "value null\n"},
		"debezium, empty":     {PresetConfig{Name: Debezium}, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Gone", event.Bytes("", []byte("")), event.WithID(id)), dbz + "value \"\"\n"},
		"plain": {PresetConfig{Name: Plain}, fullEvent(), head + `type: "OrderPlaced"
aggregatetype: "order"
aggregateid: "o-1"
schemaversion: "3"
source: "/shop"
subject: "o-1/item"
time: "2025-06-15T15:06:40.456Z"
` + mine + value},
		"plain, small": {PresetConfig{Name: Plain}, smallEvent(), head + "type: \"OrderPlaced\"\naggregatetype: \"order\"\naggregateid: \"o-1\"\nvalue \"\\x01\\x02\"\n"},
		"cloudevents": {PresetConfig{Name: CloudEvents}, fullEvent(), head + `ce_specversion: "1.0"
ce_id: "018f3f5c-0000-7000-8000-000000000001"
ce_source: "/shop"
ce_type: "OrderPlaced"
ce_subject: "o-1/item"
ce_time: "2025-06-15T15:06:40.456Z"
ce_schemaversion: "3"
content-type: "application/json"
` + mine + value},
		"cloudevents, small": {PresetConfig{Name: CloudEvents}, smallEvent(), head + `ce_specversion: "1.0"
ce_id: "018f3f5c-0000-7000-8000-000000000001"
ce_source: "/shop/outbox"
ce_type: "OrderPlaced"
ce_time: "2025-10-09T08:53:20.123Z"
value "\x01\x02"
`},
		"cloudevents, source": {PresetConfig{Name: CloudEvents, Source: "https://s"}, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "T", event.Bytes("text/plain", []byte("x")), event.WithID(id)), head + `ce_specversion: "1.0"
ce_id: "018f3f5c-0000-7000-8000-000000000001"
ce_source: "https://s"
ce_type: "T"
ce_time: "2025-10-09T08:53:20.123Z"
content-type: "text/plain"
value "x"
`},
		"structured": {PresetConfig{Name: CloudEvents, Structured: true}, fullEvent(), head + `content-type: "application/cloudevents+json; charset=UTF-8"
` + mine + "value " + fmt.Sprintf("%q", `{"specversion":"1.0","id":"018f3f5c-0000-7000-8000-000000000001","source":"/shop","type":"OrderPlaced","subject":"o-1/item","time":"2025-06-15T15:06:40.456Z","datacontenttype":"application/json","schemaversion":"3","partitionkey":"o-1","data":{"a":1,"b":"x"}}`) + "\n"},
		"structured, bytes": {PresetConfig{Name: CloudEvents, Structured: true}, smallEvent(), head + `content-type: "application/cloudevents+json; charset=UTF-8"
value ` + fmt.Sprintf("%q", `{"specversion":"1.0","id":"018f3f5c-0000-7000-8000-000000000001","source":"/shop/outbox","type":"OrderPlaced","time":"2025-10-09T08:53:20.123Z","partitionkey":"o-1","data_base64":"AQI="}`) + "\n"},
		"structured, tombstone": {PresetConfig{Name: CloudEvents, Structured: true}, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Gone", event.Payload{}, event.WithID(id)), head + `ce_specversion: "1.0"
ce_id: "018f3f5c-0000-7000-8000-000000000001"
ce_source: "/shop/outbox"
ce_type: "Gone"
ce_time: "2025-10-09T08:53:20.123Z"
value null
`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var rec record.Record
			f := newFiller(t, test.preset)
			// The first run uses new buffers, and the second one used buffers.
			for range 2 {
				if err := f.Fill(newView(t, test.event), &meta, target, &rec); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(test.want, formatGolden(&rec)); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
}

func headerIsNull(v *envelope.View, n int) bool {
	it := v.Headers.Iter()
	for range n + 1 {
		it.Next()
	}
	return it.Value == nil
}

func TestStructuredData(t *testing.T) {
	t.Parallel()
	f := newFiller(t, PresetConfig{Name: CloudEvents, Structured: true})
	for name, test := range map[string]struct {
		payload     string
		contentType string
		want        string
	}{
		"JSON in a string":        {`{"a": 1}`, "application/json; charset=utf-8", `{"a": 1}`},
		"JSON of another kind":    {`[1]`, "application/vnd.x+json", `[1]`},
		"text":                    {"a\"b\x01", "text/plain", `"a\"b\u0001"`},
		"JSON called, not JSON":   {"{", "application/json", `"{"`},
		"text that names no kind": {`{"a":1}`, "", `"{\"a\":1}"`},
	} {

		v := newView(t, event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Bytes(test.contentType, []byte(test.payload))))
		if test.contentType == "" {
			// A writer other than pkg/event may omit the content type.
			v.PayloadType = byte(bson.TypeString)
		}

		var rec record.Record
		if err := f.Fill(v, &meta, target, &rec); err != nil {
			t.Fatal(err)
		}

		var doc struct{ Data json.RawMessage }
		if err := json.Unmarshal(rec.Value, &doc); err != nil || string(doc.Data) != test.want {
			t.Errorf("%s: %v, %s in %s", name, err, doc.Data, rec.Value)
		}
	}
}

func TestN07_IDHeaderFirst(t *testing.T) {
	t.Parallel()
	hash := NamespaceHash("shop.outbox")
	if got := fmt.Sprintf("%x", hash); got != "a1f6866c675183d1" {
		t.Errorf("hash = %s", got)
	}
	ns := "outrelay-ns=" + string(hash[:])

	oid := bson.NewObjectID()
	for name, test := range map[string]struct {
		event    event.Event
		delivery int32
		meta     Meta
		want     []string
	}{
		"uuid":         {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID(id)), 0, meta, []string{"id=" + id.String(), ns}},
		"objectid":     {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID(oid)), 0, meta, []string{"id=" + oid.Hex(), ns}},
		"string":       {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID("abc")), 0, meta, []string{"id=abc", ns}},
		"ambiguous":    {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID(oid.Hex())), 0, meta, []string{"id=" + oid.Hex(), "outrelay-id-type=string", ns}},
		"delivery":     {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID("abc")), 12, meta, []string{"id=abc", ns, "outrelay-delivery=12"}},
		"redelivered":  {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID("abc")), 0, Meta{DB: meta.DB, Coll: meta.Coll, Redelivered: true}, []string{"id=abc", ns, "outrelay-redelivered=true"}},
		"expiry":       {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID("abc"), event.WithExpiry(time.UnixMilli(commit))), 0, meta, []string{"id=abc", ns, "x-outrelay-deliver-by=1760000000123"}},
		"with headers": {event.New(event.Aggregate{Type: "o", ID: "1"}, "T", event.Payload{}, event.WithID("abc"), event.WithHeader("a", []byte("b"))), 0, meta, []string{"id=abc", ns, "a=b"}},
	} {
		for _, preset := range []PresetConfig{{}, {Name: Plain}, {Name: CloudEvents}, {Name: CloudEvents, Structured: true}, {Headers: map[string]string{"A": "x"}}} {
			v := newView(t, test.event)
			v.Delivery = test.delivery
			var rec record.Record
			if err := newFiller(t, preset).Fill(v, &test.meta, target, &rec); err != nil {
				t.Fatal(err)
			}
			var got []string
			for i, h := range rec.Headers {
				line := string(h.Key) + "=" + string(h.Value)
				if i == 0 && string(h.Key) != "id" {
					t.Errorf("%s, %s: the first header is %s", name, preset.Name, line)
				}
				if string(h.Key) == "id" || strings.Contains(string(h.Key), "outrelay-") || string(h.Key) == "a" {
					got = append(got, line)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("%s, %s: %s", name, preset.Name, diff)
			}
		}
	}
}

func TestN07_NamespaceDistinguishesTenants(t *testing.T) {
	t.Parallel()
	f := newFiller(t, PresetConfig{})
	seen := map[string]bool{}
	for _, ns := range [][2]string{{"a", "outbox"}, {"b", "outbox"}, {"a", "b.outbox"}, {"a.b", "outbox"}} {
		var rec record.Record
		m := Meta{DB: []byte(ns[0]), Coll: []byte(ns[1])}
		if err := f.Fill(newView(t, smallEvent()), &m, target, &rec); err != nil {
			t.Fatal(err)
		}
		seen[string(rec.Headers[1].Value)] = true
	}

	// The name of a database contains no dot, so the last two names are the same text, and cannot both exist.
	if len(seen) != 3 {
		t.Errorf("%d hashes", len(seen))
	}
}

func TestN12_RecordTimestamp(t *testing.T) {
	t.Parallel()
	for _, preset := range []PresetConfig{{}, {Name: Plain}, {Name: CloudEvents}, {Name: CloudEvents, Structured: true}} {
		f := newFiller(t, preset)
		var rec record.Record
		if err := f.Fill(newView(t, fullEvent()), &meta, target, &rec); err != nil || rec.TimeMS != commit {
			t.Errorf("%s: time %d, %v; want the commit's %d, never the event's own", preset.Name, rec.TimeMS, err, commit)
		}
		only := Meta{ClusterTime: bson.Timestamp{T: 1_700_000_000}}
		if err := f.Fill(newView(t, fullEvent()), &only, target, &rec); err != nil || rec.TimeMS != 1_700_000_000_000 {
			t.Errorf("%s: time %d, %v; want the cluster time", preset.Name, rec.TimeMS, err)
		}
	}
}

func TestFanOutSharesOneFill(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{Rules: []Rule{{To: []string{"a", "b", "c"}}}})
	v := newView(t, fullEvent())
	targets, err := r.Route(v, nil, nil)
	if err != nil || len(targets) != 3 {
		t.Fatal(targets, err)
	}

	f, g := newFiller(t, PresetConfig{Name: Plain}), newFiller(t, PresetConfig{Name: Plain})
	var shared, own record.Record
	if err := f.Fill(v, &meta, targets[0], &shared); err != nil {
		t.Fatal(err)
	}

	for _, one := range targets[1:] {
		shared.Topic, shared.Partition = one.Topic, one.Partition
		if err := g.Fill(v, &meta, one, &own); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(own, shared); diff != "" {
			t.Error(diff)
		}
	}
}

// TestI8_BytesInAreBytesOut: payload and headers of any content come out as they went in, in their order, last.
func TestI8_BytesInAreBytesOut(t *testing.T) {
	t.Parallel()
	presets := []PresetConfig{{}, {Name: Plain}, {Name: CloudEvents}, {Name: Plain, Headers: map[string]string{"x": "{type}"}}, {Name: CloudEvents, Structured: true}}
	fillers := make([]*Filler, len(presets))
	for i, p := range presets {
		fillers[i] = newFiller(t, p)
	}

	rapid.Check(t, func(rt *rapid.T) {
		payload := rapid.SliceOf(rapid.Byte()).Draw(rt, "payload")
		var contentType string
		if rapid.Bool().Draw(rt, "text") {
			text := strings.ReplaceAll(strings.ToValidUTF8(string(payload), ""), "\x00", "")
			payload, contentType = []byte(text), "text/plain"
		}
		var headers []record.Header
		opts := []event.Option{event.WithID(id)}
		for range rapid.IntRange(0, 5).Draw(rt, "headers") {
			h := record.Header{
				Key:   []byte(rapid.StringMatching(`[a-zA-Z][a-zA-Z0-9-]{0,8}x`).Draw(rt, "k")),
				Value: rapid.SliceOfN(rapid.Byte(), 1, -1).Draw(rt, "v"),
			}
			headers = append(headers, h)
			opts = append(opts, event.WithHeader(string(h.Key), h.Value))
		}
		v := newView(t, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "T", event.Bytes(contentType, payload), opts...))
		i := rapid.IntRange(0, len(presets)-1).Draw(rt, "preset")
		var rec record.Record
		if err := fillers[i].Fill(v, &meta, target, &rec); err != nil {
			rt.Fatal(err)
		}
		value := rec.Value
		if presets[i].Structured {
			var doc struct {
				Data *string `json:"data"`
				B64  string  `json:"data_base64"`
			}
			if err := json.Unmarshal(rec.Value, &doc); err != nil {
				rt.Fatal(err)
			}
			if value, _ = base64.StdEncoding.DecodeString(doc.B64); doc.Data != nil {
				value = []byte(*doc.Data)
			}
		}
		if !bytes.Equal(value, payload) || value == nil && rec.Value == nil {
			rt.Fatalf("value %q, want %q", value, payload)
		}
		got := rec.Headers[len(rec.Headers)-len(headers):]
		for j := range headers {
			if !bytes.Equal(got[j].Key, headers[j].Key) || !bytes.Equal(got[j].Value, headers[j].Value) {
				rt.Fatalf("header %d is %q, want %q", j, got[j], headers[j])
			}
		}
	})
}

func TestNoBytesAreNoTombstone(t *testing.T) {
	t.Parallel()
	v := newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "T", event.Bytes("", []byte(""))))
	v.Payload = nil
	var rec record.Record
	if err := newFiller(t, PresetConfig{}).Fill(v, &meta, target, &rec); err != nil || rec.Value == nil || len(rec.Value) != 0 {
		t.Errorf("%v, %v", rec.Value, err)
	}
}

func TestInvalidPreset(t *testing.T) {
	t.Parallel()
	_, err := NewPreset(PresetConfig{Name: "avro", Structured: true, Headers: map[string]string{"id": "x", "outrelay-x": "y", "": "z", "a": "{payload}", "b": "{", "ok": "{type}"}})
	var bad *InvalidError
	if !errors.As(err, &bad) || len(bad.Problems) != 7 {
		t.Errorf("%v", err)
	}
}

func TestBrokenDocumentIsMalformed(t *testing.T) {
	t.Parallel()
	v := newView(t, fullEvent())
	v.Payload = bytes.Clone(v.Payload)
	v.Payload[4] = 0x77 // no type of BSON
	var rec record.Record
	if err := newFiller(t, PresetConfig{}).Fill(v, &meta, target, &rec); classOf(err) != record.Malformed {
		t.Errorf("error = %v", err)
	}
}

func TestHotPathAllocatesNothing(t *testing.T) {
	r := mustNew(t, Config{Rules: []Rule{{AggregateType: "order", Type: "Order*", To: []string{"orders", "audit"}}}, Allow: []string{"orders", "audit", "outbox.*"}})
	body := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("", bytes.Repeat([]byte("x"), 1000)), event.WithID(id), event.WithSource("/shop"),
		event.WithTime(time.UnixMilli(commit)), event.WithHeader("traceparent", []byte("00-ab")))
	for _, preset := range []PresetConfig{{}, {Name: Plain}, {Name: CloudEvents}, {Headers: map[string]string{"type": "{type}"}}} {
		f, v := newFiller(t, preset), newView(t, body)
		var targets []Target
		var rec record.Record

		if n := testing.AllocsPerRun(100, func() {
			var err error
			if targets, err = r.Route(v, nil, targets[:0]); err != nil {
				t.Fatal(err)
			}
			for _, one := range targets {
				if err := f.Fill(v, &meta, one, &rec); err != nil {
					t.Fatal(err)
				}
			}
		}); n != 0 {
			t.Errorf("preset %q: %v allocations", preset.Name, n)
		}
	}
}

func BenchmarkRouteAndFill(b *testing.B) {
	r := mustNew(b, Config{})
	f, v := newFiller(b, PresetConfig{}), newView(b, smallEvent())
	var targets []Target
	var rec record.Record
	b.ReportAllocs()
	for b.Loop() {
		targets, _ = r.Route(v, nil, targets[:0])
		_ = f.Fill(v, &meta, targets[0], &rec)
	}
}
