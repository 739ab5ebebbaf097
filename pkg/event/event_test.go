package event_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/keyhash"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stored encodes an event and parses the result.
func stored(t *testing.T, e event.Event) (*envelope.View, bson.Raw) {
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

func headers(h envelope.Headers) []event.Header {
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
	e := event.New("order", "o-1", "OrderPlaced", []byte{0, 1, 255}, event.WithID(id), event.WithKey("k"), event.WithTopic("t.x"),
		event.WithPartition(3), event.WithHeader("h", []byte{1}), event.WithHeader("h", nil), event.WithHeader("h", []byte{}),
		event.WithContentType("application/x"), event.WithSchemaVersion("2"), event.WithSource("/shop"), event.WithSubject("s"),
		event.WithTime(now), event.WithDueAt(now.Add(time.Second)), event.WithExpiresAt(now.Add(time.Minute)))
	v, raw := stored(t, e)
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

	if v.Partition != 3 || v.Slot != keyhash.Slot([]byte("k")) || v.Tombstone() || v.State != nil {
		t.Errorf("partition %d, slot %d, state %q", v.Partition, v.Slot, v.State)
	}

	if !v.HasTime || v.Time != now.UnixMilli() || !v.HasDueAt || v.DueAt != now.UnixMilli()+1000 || !v.HasExpiresAt || v.ExpiresAt != now.UnixMilli()+60000 {
		t.Errorf("time %d, due %d, expires %d", v.Time, v.DueAt, v.ExpiresAt)
	}

	want := []event.Header{{"h", []byte{1}}, {"h", nil}, {"h", []byte{}}}
	if diff := cmp.Diff(want, headers(v.Headers)); diff != "" {
		t.Error(diff)
	}

	if ts := raw.Lookup("ts"); ts.Type != bson.TypeTimestamp || !v.TS.IsZero() {
		t.Errorf("ts is %s %v, and the server stamps only a zero timestamp", ts.Type, v.TS)
	}
}

func TestPlainEventHasNoOptionalFields(t *testing.T) {
	t.Parallel()
	v, raw := stored(t, event.New("order", "o-1", "OrderPlaced", "hello"))
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

	if v.Partition != envelope.AnyPartition || v.Key != nil || v.Topic != nil || v.HasDueAt || headers(v.Headers) != nil {
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
		{event.New("a", "id-1", "t", nil), "id-1"},
		{event.New("a", "id-1", "t", nil, event.WithKey("other")), "other"},
	} {
		v, raw := stored(t, c.e)
		want := int32(keyhash.Murmur2([]byte(c.key)) % 1024)
		if v.Slot != want || raw.Lookup("slot").Int32() != want {
			t.Errorf("slot of %q is %d, want %d", c.key, v.Slot, want)
		}
	}
}

func TestPayloadKinds(t *testing.T) {
	t.Parallel()
	type order struct {
		Total int32   `bson:"total"`
		Note  *string `bson:"note,omitempty"`
	}
	type name string
	for _, c := range []struct {
		label   string
		payload any
		typ     bson.Type
		want    string
	}{
		{"bytes", []byte("\x00\xffx"), bson.TypeBinary, "\x00\xffx"},
		{"empty bytes", []byte{}, bson.TypeBinary, ""},
		{"nil bytes", []byte(nil), bson.TypeBinary, ""},
		{"string", "héllo\n", bson.TypeString, "héllo\n"},
		{"named string", name("x"), bson.TypeString, "x"},
		{"raw JSON", json.RawMessage(`{"a": 1 }`), bson.TypeString, `{"a": 1 }`},
		{"nothing", nil, bson.TypeNull, ""},
		{"struct", order{Total: 5}, bson.TypeEmbeddedDocument, `{"total":5}`},
		{"pointer", &order{Total: 5}, bson.TypeEmbeddedDocument, `{"total":5}`},
		{"D", bson.D{{Key: "b", Value: int64(1)}, {Key: "a", Value: "<&>"}}, bson.TypeEmbeddedDocument, `{"b":1,"a":"<&>"}`},
		{"map", map[string]any{"x": true}, bson.TypeEmbeddedDocument, `{"x":true}`},
		{"array", bson.A{1, "a", bson.D{}}, bson.TypeArray, `[1,"a",{}]`},
		{"slice", []string{}, bson.TypeArray, `[]`},
	} {
		v, _ := stored(t, event.New("a", "1", "t", c.payload))
		got, err := envelope.AppendPayload([]byte("before:"), v)
		if err != nil || string(got) != "before:"+c.want || v.PayloadType != byte(c.typ) {
			t.Errorf("%s: %q of type %s, %v; want %q", c.label, got, bson.Type(v.PayloadType), err, c.want)
		}

		if v.Tombstone() != (c.payload == nil) {
			t.Errorf("%s: tombstone is %v", c.label, v.Tombstone())
		}
	}

	for label, payload := range map[string]any{
		"number": 5, "time": time.Now(), "nil pointer": (*order)(nil), "nil map": map[string]any(nil), "channel": make(chan int),
		"broken document": bson.Raw{5, 0, 0}, "string that is not UTF-8": "\xff",
	} {
		if err := event.New("a", "1", "t", payload).Validate(); !errors.Is(err, event.ErrInvalid) {
			t.Errorf("%s: %v", label, err)
		}
	}
}

func TestPayloadIsCopied(t *testing.T) {
	t.Parallel()
	payload, header := []byte("before"), []byte("before")
	e := event.New("a", "1", "t", payload, event.WithHeader("h", header))
	copy(payload, "after!")
	copy(header, "after!")
	v, _ := stored(t, e)
	if string(v.Payload) != "before" || string(headers(v.Headers)[0].Value) != "before" {
		t.Errorf("payload %q, header %q", v.Payload, headers(v.Headers)[0].Value)
	}
}

func TestValidateListsEveryProblem(t *testing.T) {
	t.Parallel()
	now := time.Now()
	e := event.New("", "", "\xff", 5, event.WithID(""), event.WithKey(""), event.WithTopic("a/b"), event.WithPartition(-2),
		event.WithHeader("id", nil), event.WithHeader("", nil), event.WithHeader("outrelay-ns", nil),
		event.WithSource(strings.Repeat("x", 5000)), event.WithTime(time.Time{}), event.WithDueAt(now.Add(time.Hour)), event.WithExpiresAt(now))
	err := e.Validate()
	var inv *event.InvalidError
	if !errors.As(err, &inv) {
		t.Fatalf("got %v", err)
	}

	for _, want := range []string{
		"aggregate type is empty", "aggregate id is empty", "type is not UTF-8", "payload of type int", "id is empty",
		"key is empty", `"a/b"`, "partition -2", "header id", "without a name", "outrelay-*", "source has 5000 bytes", "zero time", "not after dueAt",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not mentioned in: %v", want, err)
		}
	}

	if len(inv.Problems) != 14 {
		t.Errorf("%d problems: %q", len(inv.Problems), inv.Problems)
	}

	if raw, err := e.AppendBSON([]byte("x")); string(raw) != "x" || !errors.Is(err, event.ErrInvalid) {
		t.Errorf("AppendBSON: %q, %v", raw, err)
	}

	for label, bad := range map[string]event.Event{
		"zero value": {}, "nil UUID": event.New("a", "1", "t", nil, event.WithID(uuid.Nil)),
		"zero ObjectId": event.New("a", "1", "t", nil, event.WithID(bson.ObjectID{})), "topic ..": event.New("a", "1", "t", nil, event.WithTopic("..")),
		"year": event.New("a", "1", "t", nil, event.WithDueAt(time.Unix(1<<40, 0))),
	} {
		if err := bad.Validate(); !errors.Is(err, event.ErrInvalid) {
			t.Errorf("%s: %v", label, err)
		}
	}
}

func TestWithLeavesTheOriginal(t *testing.T) {
	t.Parallel()
	base := event.New("a", "1", "t", nil, event.WithHeader("h0", nil))
	one, two := base.With(event.WithHeader("h1", nil), event.WithTopic("")), base.With(event.WithHeader("h2", nil))
	if len(base.Headers()) != 1 || !one.HasHeader("h1") || one.HasHeader("h2") || !two.HasHeader("h2") || two.HasHeader("h1") {
		t.Errorf("%v %v %v", base.Headers(), one.Headers(), two.Headers())
	}
	if base.Validate() != nil || one.Validate() == nil || two.Validate() != nil || one.ID() != base.ID() {
		t.Error("a problem or an id went from one to the other")
	}
}

func TestIDs(t *testing.T) {
	t.Parallel()
	u, o := uuid.Must(uuid.NewV7()), bson.NewObjectID()
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
