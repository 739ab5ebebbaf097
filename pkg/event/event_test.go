package event_test

import (
	"encoding/base64"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var about = event.Aggregate{Type: "a", ID: "1"}

// encodeAndParse encodes an event and parses the result.
func encodeAndParse(t *testing.T, e event.Event) (*envelope.View, bson.Raw) {
	t.Helper()
	raw, err := e.MarshalBSON()
	if err != nil {
		t.Fatal(err)
	}
	if err := bson.Raw(raw).Validate(); err != nil {
		t.Fatalf("the envelope is not BSON: %v", err)
	}

	if e.Size() != len(raw) {
		t.Errorf("Size is %d, the envelope has %d bytes", e.Size(), len(raw))
	}

	v := new(envelope.View)
	if err := envelope.Parse(raw, v); err != nil {
		t.Fatal(err)
	}

	return v, raw
}

func listHeaders(h envelope.Headers) []event.Header {
	var hs []event.Header
	for it := h.Iter(); it.Next(); {
		hs = append(hs, event.Header{Key: string(it.Key), Value: it.Value})
	}
	return hs
}

func TestEveryFieldIsStoredAndRead(t *testing.T) {
	t.Parallel()
	id := uuid.Must(uuid.NewV7())
	now := time.UnixMilli(1_790_000_000_123)
	e := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("application/x", []byte{0, 1, 255}), event.WithID(id), event.WithKey("k"), event.WithTopic("t.x"),
		event.WithPartition(3), event.WithHeader("h", []byte{1}), event.WithHeader("h", nil), event.WithHeader("h", []byte{}), event.WithSchemaVersion("2"), event.WithSource("/shop"), event.WithSubject("s"),
		event.WithTime(now), event.WithDueAt(now.Add(time.Second)), event.WithExpiry(now.Add(time.Minute)))
	v, raw := encodeAndParse(t, e)
	for name, c := range map[string][2]string{
		"aggregatetype": {string(v.AggregateType), "order"}, "aggregateid": {string(v.AggregateID), "o-1"},
		"type": {string(v.Type), "OrderPlaced"}, "payload": {string(v.Payload), "\x00\x01\xff"}, "key": {string(v.Key), "k"},
		"topic": {string(v.Topic), "t.x"}, "contenttype": {string(v.ContentType), "application/x"},
		"schemaversion": {string(v.SchemaVersion), "2"}, "source": {string(v.Source), "/shop"}, "subject": {string(v.Subject), "s"},
		"id": {string(v.AppendID(nil)), id.String()}, "event's id": {e.ID().String(), id.String()}, "ordering key": {string(v.OrderingKey()), e.Key()},
	} {
		if c[0] != c[1] {
			t.Errorf("%s is %q, want %q", name, c[0], c[1])
		}
	}

	if v.Partition != 3 || v.Slot != keyhash.Slot([]byte("k")) || v.Tombstone() {
		t.Errorf("partition %d, slot %d", v.Partition, v.Slot)
	}

	if !v.HasTime || v.Time != now.UnixMilli() || !v.HasDueAt || v.DueAt != now.UnixMilli()+1000 || !v.HasExpiresAt || v.ExpiresAt != now.UnixMilli()+60000 {
		t.Errorf("time %d, due %d, expires %d", v.Time, v.DueAt, v.ExpiresAt)
	}

	want := []event.Header{{"h", []byte{1}}, {"h", nil}, {"h", []byte{}}}
	if diff := cmp.Diff(want, listHeaders(v.Headers)); diff != "" {
		t.Error(diff)
	}

	if ts := raw.Lookup("ts"); ts.Type != bson.TypeTimestamp || !v.TS.IsZero() {
		t.Errorf("ts is %s %v, and the server stamps only a zero timestamp", ts.Type, v.TS)
	}
}

func TestPlainEventHasNoOptionalFields(t *testing.T) {
	t.Parallel()
	v, raw := encodeAndParse(t, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("", []byte("hello"))))
	elems, err := raw.Elements()
	if err != nil {
		t.Fatal(err)
	}

	var names []string
	for _, e := range elems {
		names = append(names, e.Key())
	}

	if got := strings.Join(names, " "); got != "_id aggregatetype aggregateid type payload ts slot" {
		t.Errorf("fields: %s", got)
	}

	if v.Partition != envelope.AnyPartition || v.Key != nil || v.Topic != nil || v.HasDueAt || listHeaders(v.Headers) != nil {
		t.Error("an optional field is set")
	}

	id, err := uuid.FromBytes(v.ID)
	if err != nil || id.Version() != 7 {
		t.Errorf("id %s has version %d (%v)", id, id.Version(), err)
	}

	if sub, _ := raw.Lookup("_id").Binary(); sub != bson.TypeBinaryUUID {
		t.Errorf("_id has subtype %d", sub)
	}
}

func TestN28_EventStoresSlotOfItsKey(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		e   event.Event
		key string
	}{
		{event.New(event.Aggregate{Type: "a", ID: "id-1"}, "t", event.Payload{}), "id-1"},
		{event.New(event.Aggregate{Type: "a", ID: "id-1"}, "t", event.Payload{}, event.WithKey("other")), "other"},
	} {
		v, raw := encodeAndParse(t, c.e)

		want := int32(keyhash.Murmur2([]byte(c.key)) % 1024)
		if v.Slot != want || raw.Lookup("slot").Int32() != want {
			t.Errorf("slot of %q is %d, want %d", c.key, v.Slot, want)
		}
	}
}

func TestPayloadKinds(t *testing.T) {
	t.Parallel()
	type order struct {
		Total int32   `bson:"total" json:"sum"`
		Note  *string `bson:"note,omitempty" json:"note,omitempty"`
	}
	for _, c := range []struct {
		label       string
		payload     event.Payload
		typ         bson.Type
		contentType string
		want        string
	}{
		{"bytes", event.Bytes("", []byte("\x00\xffx")), bson.TypeBinary, "", "\x00\xffx"},
		{"empty bytes", event.Bytes("", []byte{}), bson.TypeBinary, "", ""},
		{"nil bytes", event.Bytes("", nil), bson.TypeBinary, "", ""},
		{"text without a content type", event.Bytes("", []byte("hé")), bson.TypeBinary, "", "hé"},
		{"text", event.Bytes("text/plain; charset=utf-8", []byte("héllo\n")), bson.TypeString, "text/plain; charset=utf-8", "héllo\n"},
		{"raw JSON", event.Bytes("application/json", []byte(`{"a": 1 }`)), bson.TypeString, "application/json", `{"a": 1 }`},
		{"a kind of JSON", event.Bytes("Application/Order+JSON", []byte(`{}`)), bson.TypeString, "Application/Order+JSON", `{}`},
		{"JSON called, not text", event.Bytes("application/json", []byte("\xff")), bson.TypeBinary, "application/json", "\xff"},
		{"nothing", event.Payload{}, bson.TypeNull, "", ""},
		{"JSON", event.JSON(order{Total: 5}), bson.TypeString, "application/json", `{"sum":5}`},
		{"JSON with HTML", event.JSON([]string{"<&>"}), bson.TypeString, "application/json", `["<&>"]`},
		{"no codec", event.Encode(nil, &order{Total: 5}), bson.TypeString, "application/json", `{"sum":5}`},
		{"codec", event.Encode(codec.Raw(""), "\x01"), bson.TypeBinary, "application/octet-stream", "\x01"},
		{"codec of texts", event.Encode(codec.Raw("text/csv"), "a,b"), bson.TypeString, "text/csv", "a,b"},
		{"codec, no bytes", event.Encode(codec.Raw(""), []byte(nil)), bson.TypeBinary, "application/octet-stream", ""},
		{"Extended JSON", event.Encode(codec.ExtJSON(), order{Total: 5}), bson.TypeString, "application/json", `{"total":5}`},
		{"struct", event.Document(order{Total: 5}), bson.TypeEmbeddedDocument, "", `{"total":5}`},
		{"pointer", event.Document(&order{Total: 5}), bson.TypeEmbeddedDocument, "", `{"total":5}`},
		{"D", event.Document(bson.D{{Key: "b", Value: int64(1)}, {Key: "a", Value: "<&>"}}), bson.TypeEmbeddedDocument, "", `{"b":1,"a":"<&>"}`},
		{"map", event.Document(map[string]any{"x": true}), bson.TypeEmbeddedDocument, "", `{"x":true}`},
		{"array", event.Document(bson.A{1, "a", bson.D{}}), bson.TypeArray, "", `[1,"a",{}]`},
		{"slice", event.Document([]string{}), bson.TypeArray, "", `[]`},
	} {
		e := event.New(about, "t", c.payload)
		v, _ := encodeAndParse(t, e)
		got, err := envelope.AppendPayload([]byte("before:"), v)
		if err != nil || string(got) != "before:"+c.want || v.PayloadType != byte(c.typ) {
			t.Errorf("%s: %q of type %s, %v; want %q", c.label, got, bson.Type(v.PayloadType), err, c.want)
		}
		if string(v.ContentType) != c.contentType || e.ContentType() != c.contentType {
			t.Errorf("%s: content type %q is stored as %q", c.label, e.ContentType(), v.ContentType)
		}

		if v.Tombstone() != (c.typ == bson.TypeNull) {
			t.Errorf("%s: tombstone is %v", c.label, v.Tombstone())
		}
	}

	for label, payload := range map[string]event.Payload{
		"number": event.Document(5), "time": event.Document(time.Now()), "text": event.Document("x"), "bytes": event.Document([]byte("x")),
		"nil": event.Document(nil), "nil pointer": event.Document((*order)(nil)), "nil map": event.Document(map[string]any(nil)), "nil slice": event.Document([]int(nil)),
		"channel": event.Document(make(chan int)), "broken document": event.Document(bson.Raw{5, 0, 0}),
		"JSON of nil": event.JSON(nil), "JSON of a nil pointer": event.JSON((*order)(nil)), "JSON of a nil map": event.JSON(map[string]any(nil)),
		"JSON of a nil slice": event.JSON([]int(nil)), "JSON of a channel": event.JSON(make(chan int)), "a number as bytes": event.Encode(codec.Raw(""), 5),
	} {
		e := event.New(about, "t", payload)
		if err := e.Validate(); !errors.Is(err, event.ErrInvalid) {
			t.Errorf("%s: %v", label, err)
		}
		// A middleware must not take it for a tombstone.
		if body, err := e.Payload(); !errors.Is(err, event.ErrInvalid) {
			t.Errorf("%s: payload %q, %v", label, body, err)
		}
		if err := e.With(event.WithPayload(event.JSON(1))).Validate(); err != nil {
			t.Errorf("%s, replaced: %v", label, err)
		}
	}
}

func TestPayloadIsCopied(t *testing.T) {
	t.Parallel()
	payload, header := []byte("before"), []byte("before")
	e := event.New(about, "t", event.Bytes("", payload), event.WithHeader("h", header))
	copy(payload, "after!")
	copy(header, "after!")
	v, _ := encodeAndParse(t, e)
	if string(v.Payload) != "before" || string(listHeaders(v.Headers)[0].Value) != "before" {
		t.Errorf("payload %q, header %q", v.Payload, listHeaders(v.Headers)[0].Value)
	}
}

func TestValidateListsEveryProblem(t *testing.T) {
	t.Parallel()
	now := time.Now()
	e := event.New(event.Aggregate{Type: "", ID: ""}, "\xff", event.Document(5), event.WithID(""), event.WithTopic("a/b"),
		event.WithHeader("id", nil), event.WithHeader("", nil), event.WithHeader("outrelay-ns", nil),
		event.WithSource(strings.Repeat("x", 5000)), event.WithTime(time.Unix(-1, 0)), event.WithDueAt(now.Add(time.Hour)), event.WithExpiry(now))
	err := e.Validate()
	var inv *event.InvalidError
	if !errors.As(err, &inv) {
		t.Fatalf("got %v", err)
	}

	for _, want := range []string{
		"aggregate type is empty", "aggregate id is empty", "name is not UTF-8", "payload of type int", "id is empty",
		`"a/b"`, "header id", "without a name", "outrelay-*", "source has 5000 bytes", "year 1969", "not after dueAt",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not mentioned in: %v", want, err)
		}
	}

	if len(inv.Problems) != 12 {
		t.Errorf("%d problems: %q", len(inv.Problems), inv.Problems)
	}

	if raw, err := e.MarshalBSON(); raw != nil || !errors.Is(err, event.ErrInvalid) {
		t.Errorf("MarshalBSON: %q, %v", raw, err)
	}

	for label, bad := range map[string]event.Event{
		"zero value": {}, "nil UUID": event.New(about, "t", event.Payload{}, event.WithID(uuid.Nil)),
		"zero ObjectId": event.New(about, "t", event.Payload{}, event.WithID(bson.ObjectID{})), "topic ..": event.New(about, "t", event.Payload{}, event.WithTopic("..")),
		"year": event.New(about, "t", event.Payload{}, event.WithDueAt(time.Unix(1<<40, 0))), "due at no time": event.New(about, "t", event.Payload{}, event.WithDueAt(time.Time{})),
	} {
		if err := bad.Validate(); !errors.Is(err, event.ErrInvalid) {
			t.Errorf("%s: %v", label, err)
		}
	}
}

func hasHeader(e event.Event, header string) bool {
	_, ok := e.Header(header)
	return ok
}

func TestZeroIsTheDefaultOfEachOption(t *testing.T) {
	t.Parallel()
	e := event.New(about, "t", event.Payload{}, event.WithKey("k"), event.WithTopic("x"), event.WithPartition(3), event.WithDedupKey("d"),
		event.WithTime(time.Unix(1, 0)), event.WithExpiry(time.Unix(2, 0)), event.WithSource("s"), event.WithSubject("u"), event.WithSchemaVersion("v"))
	plain := event.New(about, "t", event.Payload{}, event.WithID(e.ID()))
	got := e.With(event.WithKey(""), event.WithTopic(""), event.WithPartition(-1), event.WithDedupKey(""), event.WithTime(time.Time{}),
		event.WithExpiry(time.Time{}), event.WithSource(""), event.WithSubject(""), event.WithSchemaVersion(""))

	_, a := encodeAndParse(t, got)
	_, b := encodeAndParse(t, plain)
	if a.String() != b.String() {
		t.Errorf("stored %s\nwant %s", a, b)
	}
	if e := event.New(about, "t", event.Payload{}, event.WithID(event.ID{})); e.ID().IsZero() || e.Validate() != nil {
		t.Errorf("id %s, %v", e.ID(), e.Validate())
	}
}

func TestADedupKeyIsOneHeader(t *testing.T) {
	t.Parallel()
	e := event.New(about, "t", event.Payload{}, event.WithDedupKey("one"), event.WithHeader("h", nil), event.WithDedupKey("two"))
	want := []event.Header{{"h", nil}, {"dedup-key", []byte("two")}}
	if diff := cmp.Diff(want, e.Headers()); diff != "" {
		t.Error(diff)
	}
}

func TestWithLeavesTheOriginal(t *testing.T) {
	t.Parallel()
	base := event.New(about, "t", event.Payload{}, event.WithHeader("h0", nil))
	one, two := base.With(event.WithHeader("h1", nil), event.WithTopic("/")), base.With(event.WithHeader("h2", nil))
	if len(base.Headers()) != 1 || !hasHeader(one, "h1") || hasHeader(one, "h2") || !hasHeader(two, "h2") || hasHeader(two, "h1") {
		t.Errorf("%v %v %v", base.Headers(), one.Headers(), two.Headers())
	}
	if base.Validate() != nil || one.Validate() == nil || two.Validate() != nil || one.ID() != base.ID() {
		t.Error("a problem or an id went from one to the other")
	}
}

func TestIDs(t *testing.T) {
	t.Parallel()
	u, o := uuid.Must(uuid.NewV7()), bson.NewObjectID()
	type orderID uuid.UUID
	type customerID bson.ObjectID
	type number string
	if event.NewID(orderID(u)) != event.NewID(u) || event.NewID(customerID(o)) != event.NewID(o) || event.NewID(number("5")) != event.NewID("5") ||
		event.NewID([16]byte(u)) != event.NewID(u) {
		t.Error("a named type changes the id")
	}
	if e := event.New(about, "t", event.Payload{}, event.WithID(orderID(u))); e.ID() != event.NewID(u) || e.With(event.WithID(event.NewID(o))).ID() != event.NewID(o) {
		t.Errorf("WithID sets %s", e.ID())
	}

	for _, c := range []struct {
		id        event.ID
		text      string
		typ       bson.Type
		ambiguous bool
	}{
		{event.NewID(u), u.String(), bson.TypeBinary, false},
		{event.NewID(o), o.Hex(), bson.TypeObjectID, false},
		{event.NewID("order-1"), "order-1", bson.TypeString, false},
		{event.NewID(u.String()), u.String(), bson.TypeString, true},
		{event.NewID(strings.ToUpper(o.Hex())), strings.ToUpper(o.Hex()), bson.TypeString, true},
		{event.NewID(base64.StdEncoding.EncodeToString(u[:])), base64.StdEncoding.EncodeToString(u[:]), bson.TypeString, true},
		{event.NewID(o.Hex() + "0"), o.Hex() + "0", bson.TypeString, false},
	} {
		if c.id.String() != c.text {
			t.Errorf("%s reads %s", c.text, c.id)
		}

		if back := event.ParseID(c.text); (back == c.id) == c.ambiguous {
			t.Errorf("ParseID(%s) is %v", c.text, back)
		}

		raw, err := bson.Marshal(bson.D{{Key: "_id", Value: c.id}, {Key: "aggregatetype", Value: "a"}, {Key: "aggregateid", Value: "1"}, {Key: "type", Value: "t"}, {Key: "payload", Value: nil}})
		if err != nil {
			t.Fatal(err)
		}

		var v envelope.View
		if err := envelope.Parse(raw, &v); err != nil || v.IDType != byte(c.typ) || string(v.AppendID(nil)) != c.text || v.AmbiguousID() != c.ambiguous {
			t.Errorf("%s: type %s, text %s, ambiguous %v, %v", c.text, bson.Type(v.IDType), v.AppendID(nil), v.AmbiguousID(), err)
		}

		var back struct {
			ID event.ID `bson:"_id"`
		}
		if err := bson.Unmarshal(raw, &back); err != nil || back.ID != c.id {
			t.Errorf("%s comes back as %v, %v", c.text, back.ID, err)
		}
	}

	var id event.ID
	if _, _, err := id.MarshalBSONValue(); err == nil || !id.IsZero() {
		t.Error("a zero id was stored")
	}

	if err := id.UnmarshalBSONValue(byte(bson.TypeInt32), []byte{1, 0, 0, 0}); err == nil {
		t.Error("an int was taken for an id")
	}

	if err := id.UnmarshalBSONValue(byte(bson.TypeObjectID), []byte{1}); err == nil {
		t.Error("a short ObjectId was taken")
	}
}

func bsonDocument(t *testing.T) bson.Raw {
	t.Helper()
	raw, err := bson.Marshal(bson.D{{Key: "a", Value: int32(1)}})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}
