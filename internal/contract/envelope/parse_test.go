package envelope_test

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// doc returns a valid envelope in which some fields are replaced, added, or with the value absent
// removed.
func doc(t testing.TB, changes ...bson.E) []byte {
	t.Helper()
	d := bson.D{
		{Key: "_id", Value: "1"},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "o-1"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: []byte("p")},
	}

	for _, c := range changes {
		at := -1
		for i := range d {
			if d[i].Key == c.Key {
				at = i
			}
		}

		switch {
		case at < 0:
			d = append(d, c)
		case c.Value == absent:
			d = append(d[:at], d[at+1:]...)
		default:
			d[at].Value = c.Value
		}
	}

	raw, err := bson.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}

	return raw
}

const absent = "\x00absent"

func pair(k, v any) bson.D { return bson.D{{Key: "k", Value: k}, {Key: "v", Value: v}} }

func legacyUUID() bson.Binary {
	return bson.Binary{Subtype: bson.TypeBinaryUUIDOld, Data: make([]byte, 16)}
}

// malformedFields are values of fields that make an envelope malformed, and a part of the reason.
func malformedFields() []malformedField {
	return []malformedField{
		{"_id", absent, "_id is missing"},
		{"_id", "", "_id is missing or empty"},
		{"_id", int32(7), "_id is of type 32-bit integer"},
		{"_id", legacyUUID(), "subtype 3"},
		{"_id", bson.Binary{Subtype: 4, Data: []byte{1}}, "1 bytes"},
		{"_id", bson.D{}, "_id is of type embedded document"},
		{"aggregatetype", absent, "aggregatetype is missing"},
		{"aggregatetype", "", "missing or empty"},
		{"aggregatetype", nil, "missing or empty"},
		{"aggregatetype", 5, "a string is wanted"},
		{"aggregateid", absent, "aggregateid is missing"},
		{"aggregateid", 1.5, "not a whole number"},
		{"aggregateid", float64(1<<53) + 2, "not a whole number"},
		{"key", math.NaN(), "not a whole number"},
		{"key", math.Inf(1), "not a whole number"},
		{"aggregateid", legacyUUID(), "not a UUID of subtype 4"},
		{"aggregateid", bson.D{}, "aggregateid is of type"},
		{"type", absent, "type is missing"},
		{"type", true, "type is of type boolean"},
		{"payload", absent, "payload is missing"},
		{"payload", int64(5), "payload is of type 64-bit integer"},
		{"payload", bson.Undefined{}, "payload is of type undefined"},
		{"key", bson.A{}, "key is of type array"},
		{"topic", 1, "topic is of type"},
		{"partition", "1", "an integer is wanted"},
		{"partition", 1.5, "an integer is wanted"},
		{"headers", "x", "headers is of type string"},
		{"headers", bson.A{1}, "not a document {k, v}"},
		{"headers", bson.A{bson.D{}}, "no k"},
		{"headers", bson.A{pair(1, "v")}, "not one string"},
		{"headers", bson.A{pair("k", 1)}, "not one binary, string or null"},
		{"headers", bson.A{append(pair("k", "v"), bson.E{Key: "x", Value: 1})}, "other than k and v"},
		{"headers", bson.D{{Key: "h", Value: 1}}, "not a binary, a string or null"},
		{"headers", bson.D{{Key: "", Value: "x"}}, "without a name"},
		{"contenttype", 1, "contenttype is"},
		{"schemaversion", 1.5, "schemaversion is"},
		{"schemaversion", -float64(1<<53) - 2, "schemaversion is"},
		{"source", 1, "source is"},
		{"subject", 1, "subject is"},
		{"time", "2026-01-01", "time is of type string; a date is wanted"},
		{"dueAt", int64(5), "dueAt is"},
		{"expiresAt", bson.Timestamp{}, "expiresAt is"},
	}
}

type malformedField struct {
	field string
	value any
	want  string
}

func TestMalformed(t *testing.T) {
	t.Parallel()
	for _, c := range malformedFields() {
		rejection(t, doc(t, bson.E{Key: c.field, Value: c.value}), record.Malformed, c.want)
	}

	for _, p := range []any{int32(-2), int64(math.MaxInt32) + 1, float64(1 << 40)} {
		rejection(t, doc(t, bson.E{Key: "partition", Value: p}), record.PartitionOutOfRange, "partition ")
	}
}

// Drivers of JavaScript store whole numbers above 2³¹ as doubles.
func TestWholeDoublesAreIntegers(t *testing.T) {
	t.Parallel()
	for value, want := range map[float64]string{
		5: "5", 0: "0", math.Copysign(0, -1): "0", -7: "-7", 1_732_000_000_123: "1732000000123",
		1 << 53: "9007199254740992", -(1 << 53): "-9007199254740992",
	} {
		var v envelope.View
		raw := doc(t, bson.E{Key: "aggregateid", Value: value}, bson.E{Key: "key", Value: value}, bson.E{Key: "schemaversion", Value: value})
		if err := envelope.Parse(raw, &v); err != nil {
			t.Errorf("%v: %v", value, err)
			continue
		}
		if string(v.AggregateID) != want || string(v.Key) != want || string(v.SchemaVersion) != want {
			t.Errorf("%v became %s, %s and %s; want %s", value, v.AggregateID, v.Key, v.SchemaVersion, want)
		}
		if text, found := v.AppendField(nil, "key"); found != envelope.Found || string(text) != want {
			t.Errorf("the field %v became %s; want %s", value, text, want)
		}
	}

	m, err := envelope.NewMapping(envelope.Names{ID: "number", Timestamp: "at"}, false)
	if err != nil {
		t.Fatal(err)
	}
	var v envelope.View
	if err := m.Parse(doc(t, bson.E{Key: "number", Value: 7.0}, bson.E{Key: "at", Value: 1_732_000_000_123.0}, bson.E{Key: "partition", Value: 3.0}), &v); err != nil {
		t.Fatal(err)
	}
	if string(v.EventID) != "7" || v.RecordTime != 1_732_000_000_123 || v.Partition != 3 {
		t.Errorf("id %s, time %d, partition %d", v.EventID, v.RecordTime, v.Partition)
	}
}

// Texts, ids and headers of a service are limited before anything is made of them.
func TestLongTextsAreTooLarge(t *testing.T) {
	t.Parallel()
	rejection(t, doc(t, bson.E{Key: "_id", Value: strings.Repeat("x", 1025)}), record.MessageTooLarge, "_id has 1025 bytes; at most 1024")
	for _, name := range []string{"aggregatetype", "aggregateid", "type", "key", "topic", "contenttype", "schemaversion", "source", "subject"} {
		want := name + " has 32769 bytes; at most 32768"
		rejection(t, doc(t, bson.E{Key: name, Value: strings.Repeat("x", 32<<10+1)}), record.MessageTooLarge, want)
		var v envelope.View
		if err := envelope.Parse(doc(t, bson.E{Key: name, Value: strings.Repeat("x", 32<<10)}), &v); err != nil {
			t.Errorf("%s of 32 KiB: %v", name, err)
		}
	}

	many := bson.D{}
	for range 4097 {
		many = append(many, bson.E{Key: "h", Value: "v"})
	}
	rejection(t, doc(t, bson.E{Key: "headers", Value: many}), record.MessageTooLarge, "4097 headers; at most 4096")
	rejection(t, doc(t, bson.E{Key: "headers", Value: bson.D{{Key: strings.Repeat("x", 33<<10), Value: ""}}}), record.MessageTooLarge, "the name of a header has 33792 bytes")
}

func rejection(t *testing.T, raw []byte, class record.Class, want string) {
	t.Helper()
	var v envelope.View
	err := envelope.Parse(raw, &v)
	var r *record.Rejection
	if !errors.As(err, &r) || r.Class != class || !strings.Contains(r.Reason, want) {
		t.Errorf("%s: got %v, want %s: …%s…", bson.Raw(raw), err, class, want)
	}
}

func TestN07_UserHeaderIDIsMalformed(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"id": "header id", "outrelay-ns": "outrelay-*", "outrelay-delivery": "outrelay-*", "outrelay-": "outrelay-*"} {
		rejection(t, doc(t, bson.E{Key: "headers", Value: bson.A{pair("ok", "v"), pair(name, "v")}}), record.Malformed, want)
		rejection(t, doc(t, bson.E{Key: "headers", Value: bson.D{{Key: name, Value: "v"}}}), record.Malformed, want)
		if err := event.New(event.Aggregate{Type: "a", ID: "1"}, "t", event.Payload{}, event.WithHeader(name, nil)).Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Validate: %v", err)
		}
	}

	var v envelope.View
	for _, name := range []string{"ID", "ids", "outrelay", "x-outrelay-ns"} {
		if err := envelope.Parse(doc(t, bson.E{Key: "headers", Value: bson.A{pair(name, "v")}}), &v); err != nil {
			t.Errorf("header %s: %v", name, err)
		}
	}
}

func TestN28_MissingSlotIsNone(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		slot any
		want int32
	}{{absent, -1}, {nil, -1}, {"7", -1}, {int32(-1), -1}, {int32(1024), -1}, {int32(0), 0}, {int64(1023), 1023}, {7.0, 7}} {
		var v envelope.View
		change := []bson.E{{Key: "slot", Value: c.slot}}
		if c.slot == absent {
			change = nil
		}

		if err := envelope.Parse(doc(t, change...), &v); err != nil || v.Slot != c.want {
			t.Errorf("slot %v: %d, %v; want %d", c.slot, v.Slot, err, c.want)
		}
	}
}

func TestBrokenBytes(t *testing.T) {
	t.Parallel()
	good := doc(t)
	for n := range good {
		rejection(t, good[:n], record.Malformed, "")
	}

	rejection(t, append(bytes.Clone(good), 0), record.Malformed, "not a BSON document")
	twice := bson.D{{Key: "_id", Value: "1"}, {Key: "type", Value: "a"}, {Key: "type", Value: "b"}}
	raw, err := bson.Marshal(twice)
	if err != nil {
		t.Fatal(err)
	}

	rejection(t, raw, record.Malformed, "field type appears twice")
}

// Envelopes as users of MongoEventRouter write them: an ObjectId as _id, a document as payload,
// additional fields, and no fields of outrelay.
func TestDebeziumDocuments(t *testing.T) {
	t.Parallel()
	oid := bson.ObjectID{0x5f, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}
	uuid := bson.Binary{Subtype: 4, Data: []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}
	for _, c := range []struct {
		id   any
		text string
	}{
		{oid, "5f0102030405060708090a0b"},
		{uuid, "00010203-0405-0607-0809-0a0b0c0d0e0f"},
		{"o-7", "o-7"},
		{int32(-7), "-7"},
		{int64(math.MinInt64), "-9223372036854775808"},
	} {
		raw := doc(t, bson.E{Key: "_id", Value: oid}, bson.E{Key: "aggregateid", Value: c.id}, bson.E{Key: "key", Value: c.id},
			bson.E{Key: "payload", Value: bson.D{{Key: "total", Value: 12.5}, {Key: "at", Value: bson.DateTime(0)}, {Key: "lines", Value: bson.A{int64(1), oid}}}},
			bson.E{Key: "createdAt", Value: bson.DateTime(5)}, bson.E{Key: "tenant", Value: bson.D{{Key: "id", Value: 5}}}, bson.E{Key: "eventVersion", Value: int32(3)})
		var v envelope.View
		if err := envelope.Parse(raw, &v); err != nil {
			t.Fatal(err)
		}

		if string(v.AggregateID) != c.text || string(v.OrderingKey()) != c.text {
			t.Errorf("aggregateid %v reads %q, key %q", c.id, v.AggregateID, v.Key)
		}

		if got := string(v.AppendID(nil)); got != oid.Hex() || v.AmbiguousID() {
			t.Errorf("id is %s", got)
		}

		js, err := envelope.AppendPayload(nil, &v)
		if want := `{"total":12.5,"at":{"$date":"1970-01-01T00:00:00Z"},"lines":[1,{"$oid":"5f0102030405060708090a0b"}]}`; err != nil || string(js) != want {
			t.Errorf("payload %s, %v", js, err)
		}

		if v.Slot != -1 || !v.TS.IsZero() || v.HasDueAt || v.Headers.Iter().Key != nil {
			t.Error("a field is there that the writer did not write")
		}
	}
}

// Writers with nullable fields store null or "" where they mean nothing.
func TestNullAndEmptyOptionalFieldsAreAbsent(t *testing.T) {
	t.Parallel()
	var changes []bson.E
	for _, name := range []string{"key", "topic", "partition", "headers", "contenttype", "schemaversion", "source", "subject", "time", "ts", "slot", "dueAt", "expiresAt"} {
		changes = append(changes, bson.E{Key: name, Value: nil})
	}

	var v, plain envelope.View
	if err := envelope.Parse(doc(t, changes...), &v); err != nil {
		t.Fatal(err)
	}
	if err := envelope.Parse(doc(t), &plain); err != nil {
		t.Fatal(err)
	}

	if diff := cmp.Diff(summary(&plain), summary(&v)); diff != "" {
		t.Error(diff)
	}

	if err := envelope.Parse(doc(t, bson.E{Key: "key", Value: ""}, bson.E{Key: "topic", Value: ""}), &v); err != nil || v.Key != nil || v.Topic != nil {
		t.Errorf("key %q, topic %q, %v", v.Key, v.Topic, err)
	}
}

func TestHeaderForms(t *testing.T) {
	t.Parallel()
	var v envelope.View
	for _, c := range []struct {
		headers any
		want    []header
	}{
		{bson.A{}, nil},
		{bson.D{}, nil},
		{
			bson.A{pair("a", []byte{0, 255}), pair("a", "text"), pair("b", nil), bson.D{{Key: "v", Value: []byte{}}, {Key: "k", Value: "order"}}, bson.D{{Key: "k", Value: "only"}}},
			[]header{{"a", []byte{0, 255}}, {"a", []byte("text")}, {"b", nil}, {"order", []byte{}}, {"only", nil}},
		},
		{bson.D{{Key: "z", Value: "1"}, {Key: "a", Value: []byte{2}}, {Key: "n", Value: nil}}, []header{{"z", []byte("1")}, {"a", []byte{2}}, {"n", nil}}},
	} {
		if err := envelope.Parse(doc(t, bson.E{Key: "headers", Value: c.headers}), &v); err != nil {
			t.Errorf("%v: %v", c.headers, err)
		}

		if diff := cmp.Diff(c.want, headers(v.Headers)); diff != "" {
			t.Errorf("%v: %s", c.headers, diff)
		}
	}
}

// The relay stores nothing about a delivery on the envelope, so a service may use these names.
func TestFieldsOfAServiceHaveNoMeaning(t *testing.T) {
	t.Parallel()
	names := []string{"state", "pos", "pending", "delivery", "attempts", "nextAt", "history", "lastError", "origin", "claim", "seal", "replayOf", "firstTs"}
	var plain, v envelope.View
	if err := envelope.Parse(doc(t), &plain); err != nil {
		t.Fatal(err)
	}
	for _, value := range []any{"parked", "done", -1, int64(2), bson.DateTime(9), bson.D{{Key: "a", Value: 1}}} {
		var fields []bson.E
		for _, name := range names {
			fields = append(fields, bson.E{Key: name, Value: value})
		}
		if err := envelope.Parse(doc(t, fields...), &v); err != nil {
			t.Errorf("%v: %v", value, err)
		}
		if diff := cmp.Diff(summary(&plain), summary(&v)); diff != "" || v.Delivery != 0 {
			t.Errorf("%v: %s", value, diff)
		}
	}
}

func TestAViewIsUsedAgain(t *testing.T) {
	t.Parallel()
	var v envelope.View
	raw := doc(t, bson.E{Key: "ts", Value: bson.Timestamp{T: 7, I: 8}}, bson.E{Key: "partition", Value: 4.0}, bson.E{Key: "schemaversion", Value: int32(12)})
	if err := envelope.Parse(raw, &v); err != nil {
		t.Fatal(err)
	}
	if v.TS != (bson.Timestamp{T: 7, I: 8}) || v.Partition != 4 || string(v.SchemaVersion) != "12" {
		t.Errorf("%v", summary(&v))
	}

	// A View is used again for the next document.
	if err := envelope.Parse(doc(t), &v); err != nil || v.Partition != envelope.AnyPartition || v.SchemaVersion != nil || !v.TS.IsZero() {
		t.Errorf("left over: %v, %v", summary(&v), err)
	}
}

func TestOldBinaryIsUnwrapped(t *testing.T) {
	t.Parallel()
	raw := doc(t, bson.E{Key: "payload", Value: bson.Binary{Subtype: bson.TypeBinaryBinaryOld, Data: []byte("old")}})
	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil || string(v.Payload) != "old" {
		t.Errorf("%q, %v", v.Payload, err)
	}
	i := bytes.LastIndex(raw, []byte{3, 0, 0, 0, 'o', 'l', 'd'})
	raw[i] = 200
	rejection(t, raw, record.Malformed, "broken binary")
}

func TestBrokenPayloadDocument(t *testing.T) {
	t.Parallel()
	raw := doc(t, bson.E{Key: "payload", Value: bson.D{{Key: "a", Value: int32(1)}}})
	i := bytes.Index(raw, []byte{0x10, 'a', 0})
	raw[i] = 0x7e // no such type
	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		t.Fatal(err)
	}

	out, err := envelope.AppendPayload([]byte("x"), &v)
	var r *record.Rejection
	if !errors.As(err, &r) || r.Class != record.Malformed || string(out) != "x" {
		t.Errorf("%q, %v", out, err)
	}
}

// The bytes of payload and headers never change, nor do the number and the order of headers.
func TestI8_PayloadAndHeadersAreByteIdentical(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		payload := rapid.SliceOf(rapid.Byte()).Draw(t, "payload")
		names := rapid.SliceOf(rapid.StringMatching(`[a-zA-Z][a-zA-Z0-9_.-]{0,8}`).Filter(func(s string) bool { return s != "id" && !strings.HasPrefix(s, "outrelay-") })).Draw(t, "names")
		var want []header
		var opts []event.Option
		for _, n := range names {
			h := header{Key: n, Value: rapid.SliceOf(rapid.Byte()).Draw(t, "value")}
			if rapid.IntRange(0, 9).Draw(t, "null") == 0 {
				h.Value = nil
			}

			want = append(want, h)
			opts = append(opts, event.WithHeader(h.Key, h.Value))
		}

		raw, err := event.New(event.Aggregate{Type: "a", ID: "1"}, "t", event.Bytes("", payload), opts...).MarshalBSON()
		if err != nil {
			t.Fatal(err)
		}

		var v envelope.View
		if err := envelope.Parse(raw, &v); err != nil {
			t.Fatal(err)
		}

		got, err := envelope.AppendPayload(nil, &v)
		if err != nil || !bytes.Equal(got, payload) {
			t.Fatalf("payload %x became %x, %v", payload, got, err)
		}
		if diff := cmp.Diff(want, headers(v.Headers)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestParseAllocatesNothing(t *testing.T) {
	raw, err := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("", bytes.Repeat([]byte("x"), 1024)), event.WithHeader("traceparent", []byte("00-1")),
		event.WithHeader("h", []byte("v")), event.WithKey("k")).MarshalBSON()
	if err != nil {
		t.Fatal(err)
	}

	foreign := doc(t, bson.E{Key: "_id", Value: bson.NewObjectID()}, bson.E{Key: "payload", Value: bson.D{{Key: "total", Value: 1.5}, {Key: "at", Value: bson.DateTime(5)}, {Key: "lines", Value: bson.A{"a"}}}}, bson.E{Key: "aggregateid", Value: int64(math.MaxInt64)},
		bson.E{Key: "key", Value: bson.Binary{Subtype: 4, Data: make([]byte, 16)}}, bson.E{Key: "headers", Value: bson.D{{Key: "h", Value: "v"}}})
	v := new(envelope.View)
	buf := make([]byte, 0, 4096)
	var sum int
	for name, d := range map[string][]byte{"own": raw, "foreign": foreign} {
		if n := testing.AllocsPerRun(100, func() {
			if err := envelope.Parse(d, v); err != nil {
				t.Fatal(err)
			}

			for it := v.Headers.Iter(); it.Next(); {
				sum += len(it.Key) + len(it.Value)
			}

			buf = v.AppendID(buf[:0])
			buf, err = envelope.AppendPayload(buf, v)
			sum += int(keyhash.Murmur2(v.OrderingKey()))
		}); n != 0 || err != nil {
			t.Errorf("%s: %v allocations, %v", name, n, err)
		}
	}

	if sum == 0 {
		t.Error("nothing was read")
	}
}

func BenchmarkParse(b *testing.B) {
	raw, err := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("", bytes.Repeat([]byte("x"), 1024)), event.WithHeader("traceparent", []byte("00-1"))).MarshalBSON()
	if err != nil {
		b.Fatal(err)
	}

	v := new(envelope.View)
	b.ReportAllocs()
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		if err := envelope.Parse(raw, v); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAppendDocument(b *testing.B) {
	lines := bson.A{}
	for i := range 12 {
		lines = append(lines, bson.D{{Key: "item", Value: "article number " + string(rune('a'+i))}, {Key: "quantity", Value: int32(i)}, {Key: "price", Value: 59.98}})
	}

	raw := doc(b, bson.E{Key: "payload", Value: bson.D{{Key: "total", Value: 12.5}, {Key: "at", Value: bson.DateTime(1_700_000_000_000)}, {Key: "lines", Value: lines}}})
	v := new(envelope.View)
	if err := envelope.Parse(raw, v); err != nil {
		b.Fatal(err)
	}

	b.SetBytes(int64(len(v.Payload)))
	b.ReportAllocs()
	var buf []byte
	for b.Loop() {
		var err error
		if buf, err = envelope.AppendPayload(buf[:0], v); err != nil {
			b.Fatal(err)
		}
	}
}

type header struct {
	Key   string
	Value []byte
}

func headers(h envelope.Headers) []header {
	var hs []header
	for it := h.Iter(); it.Next(); {
		hs = append(hs, header{Key: string(it.Key), Value: it.Value})
	}
	return hs
}
