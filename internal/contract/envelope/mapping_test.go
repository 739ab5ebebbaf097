package envelope

import (
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// mapped returns the mapping of the names.
func mapped(t *testing.T, n Names) *Mapping {
	t.Helper()
	m, problems := NewMapping(n, false)
	if problems != nil {
		t.Fatalf("the mapping is rejected: %v", problems)
	}
	return m
}

// shopEvent is a document whose field names differ from the contract.
func shopEvent(id any) bson.D {
	return bson.D{
		{Key: "_id", Value: id},
		{Key: "eventId", Value: int64(77)},
		{Key: "kind", Value: "order"},
		{Key: "orderId", Value: int32(12)},
		{Key: "customer", Value: "c-1"},
		{Key: "name", Value: "OrderPlaced"},
		{Key: "body", Value: bson.D{{Key: "n", Value: int32(1)}}},
		{Key: "created", Value: time.UnixMilli(1700000000123)},
		{Key: "shard", Value: 3.0},
		{Key: "meta", Value: bson.D{{Key: "traceparent", Value: "00-ab"}}},
		{Key: "type", Value: bson.D{{Key: "own", Value: true}}}, // has no part
	}
}

var shopNames = Names{
	ID: "eventId", AggregateType: "kind", AggregateID: "orderId", Key: "customer", Type: "name", Payload: "body",
	Timestamp: "created", Time: "created", Partition: "shard", Headers: "meta",
}

func TestMappedDocument(t *testing.T) {
	t.Parallel()
	var v View
	if err := mapped(t, shopNames).Parse(marshal(t, shopEvent("d-1")), &v); err != nil {
		t.Fatal(err)
	}
	for what, pair := range map[string][2]string{
		"id":            {string(v.ID), "d-1"},
		"event id":      {string(v.EventID), "77"},
		"aggregatetype": {string(v.AggregateType), "order"},
		"aggregateid":   {string(v.AggregateID), "12"},
		"key":           {string(v.OrderingKey()), "c-1"},
		"type":          {string(v.Type), "OrderPlaced"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("the %s is %q, want %q", what, pair[0], pair[1])
		}
	}

	if v.RecordTime != 1700000000123 || !v.HasRecordTime || v.Time != v.RecordTime || v.Partition != 3 {
		t.Errorf("time %d, timestamp %d, partition %d", v.Time, v.RecordTime, v.Partition)
	}
	it := v.Headers.Iter()
	if !it.Next() || string(it.Key) != "traceparent" {
		t.Error("the headers differ from the headers of meta")
	}
	if value, err := AppendPayload(nil, &v); err != nil || string(value) != `{"n":1}` {
		t.Errorf("the payload is %s, %v", value, err)
	}
}

// A document that does not fit its mapping is malformed, and the reason names the field of the document.
func TestMappedDocumentNamesItsField(t *testing.T) {
	t.Parallel()
	m := mapped(t, shopNames)
	for field, value := range map[string]any{
		"eventId": bson.D{}, "kind": 5, "orderId": true, "customer": 1.5, "name": bson.A{}, "body": 7, "created": "today",
		"shard": "three", "meta": "x",
	} {
		doc := shopEvent("d-1")
		for i := range doc {
			if doc[i].Key == field {
				doc[i].Value = value
			}
		}
		checkRejectedField(t, m, doc, field)
	}

	for _, field := range []string{"eventId", "kind", "orderId", "name", "body"} {
		var without bson.D
		for _, e := range shopEvent("d-1") {
			if e.Key != field {
				without = append(without, e)
			}
		}
		checkRejectedField(t, m, without, field)
	}

	// The relay writes no field of this name, so an outbox may use it.
	var v View
	if err := m.Parse(marshal(t, append(shopEvent("d-1"), bson.E{Key: "state", Value: "NEW"})), &v); err != nil {
		t.Errorf("a document with a field state: %v", err)
	}
}

func checkRejectedField(t *testing.T, m *Mapping, doc bson.D, field string) {
	t.Helper()
	var v View
	err := m.Parse(marshal(t, doc), &v)
	rejection := (*record.Rejection)(nil)
	if !errors.As(err, &rejection) || rejection.Class != record.Malformed || !strings.Contains(rejection.Reason, field) {
		t.Errorf("%s: got %v, want a rejection that names it", field, err)
	}
}

func TestMappingWithoutParts(t *testing.T) {
	t.Parallel()
	id := bson.NewObjectID()
	m := mapped(t, Names{AggregateType: NoField, AggregateID: NoField, Type: NoField, ExpiresAt: NoField, Payload: "text"})
	var v View
	doc := bson.D{{Key: "_id", Value: id}, {Key: "text", Value: "hi"}, {Key: "expiresAt", Value: "never"}}
	if err := m.Parse(marshal(t, doc), &v); err != nil {
		t.Fatal(err)
	}
	if string(v.OrderingKey()) != id.Hex() {
		t.Errorf("the key of a document without one is %q, want its _id", v.OrderingKey())
	}
}

func TestWholeDocument(t *testing.T) {
	t.Parallel()
	m := mapped(t, Names{AggregateType: NoField, AggregateID: NoField, Type: NoField, Payload: WholeDocument, Key: WholeDocument})
	doc := bson.D{{Key: "_id", Value: "a\"b"}, {Key: "total", Value: int64(5)}, {Key: "ts", Value: bson.Timestamp{T: 1}}}
	want := `{"_id": "a\"b", "total": {"$numberLong": "5"}}`
	marked := append(slices.Clone(doc), bson.E{Key: "sentAt", Value: bson.DateTime(1)}, bson.E{Key: "sent", Value: bson.A{}}, bson.E{Key: "scheduledFor", Value: bson.DateTime(1)},
		bson.E{Key: "slot", Value: int32(5)})
	for _, d := range []bson.D{doc, marked} {
		var v View
		if err := m.Parse(marshal(t, d), &v); err != nil {
			t.Fatal(err)
		}
		if key := string(v.OrderingKey()); key != `{"_id": "a\"b"}` {
			t.Errorf("the key is %s", key)
		}
		got, err := AppendPayloadAs(nil, &v, Connector, NoLimit)
		if err != nil || string(got) != want {
			t.Errorf("the payload is %s, %v; want %s", got, err, want)
		}
	}

	for _, field := range []string{"key", "state", "history", "pending"} {
		var v View
		if err := m.Parse(marshal(t, append(slices.Clone(doc), bson.E{Key: field, Value: "x"})), &v); err != nil {
			t.Errorf("a document with a field %s: %v", field, err)
			continue
		}
		if got, err := AppendPayloadAs(nil, &v, Connector, NoLimit); err != nil || !strings.Contains(string(got), `"`+field+`": "x"`) {
			t.Errorf("the payload lacks the field %s: %s, %v", field, got, err)
		}
	}
	// The relay would overwrite these, or leave them out of the payload.
	checkRejectedField(t, m, append(slices.Clone(doc), bson.E{Key: "slot", Value: "x"}), "slot")
	checkRejectedField(t, m, append(bson.D{{Key: "ts", Value: "x"}}, doc[:2]...), "ts")
	checkRejectedField(t, m, append(slices.Clone(doc), bson.E{Key: "sentAt", Value: bson.DateTime(1)}), "sentAt")
	checkRejectedField(t, m, append(slices.Clone(doc), bson.E{Key: "sent", Value: true}), "sent")
	for _, list := range []bson.A{{"a@example.org"}, {bson.D{{Key: "topic", Value: "a"}}}, {bson.D{{Key: "offset", Value: 1}}}} {
		checkRejectedField(t, m, append(slices.Clone(doc), bson.E{Key: "sentAt", Value: bson.DateTime(1)}, bson.E{Key: "sent", Value: list}), "sent")
	}
}

// A field scheduledFor belongs to the service, unless the document has the mark of a delivery.
func TestAWholeDocumentKeepsItsOwnSchedule(t *testing.T) {
	t.Parallel()
	m := mapped(t, Names{AggregateType: NoField, AggregateID: NoField, Type: NoField, Payload: WholeDocument, Key: WholeDocument})
	place := bson.D{{Key: "topic", Value: "a"}, {Key: "partition", Value: int32(0)}, {Key: "offset", Value: int64(7)}}
	mark := bson.D{{Key: "sentAt", Value: bson.DateTime(1)}, {Key: "sent", Value: bson.A{place}}}
	own := bson.D{{Key: "_id", Value: "a"}, {Key: "scheduledFor", Value: "Monday"}}

	for want, doc := range map[string]bson.D{
		`{"_id": "a", "scheduledFor": "Monday"}`: own,
		`{"_id": "a"}`:                           append(slices.Clone(own), mark...),
	} {
		var v View
		if err := m.Parse(marshal(t, doc), &v); err != nil {
			t.Fatal(err)
		}
		if got, err := AppendPayloadAs(nil, &v, Connector, NoLimit); err != nil || string(got) != want {
			t.Errorf("the payload is %s, %v; want %s", got, err, want)
		}
	}
}

// Kafka rejects a batch with a negative timestamp in a way that looks like a fault of the broker.
func TestATimestampIsNotBefore1970(t *testing.T) {
	t.Parallel()
	m := mapped(t, shopNames)
	for _, created := range []any{bson.DateTime(-1), bson.DateTime(-1000), -1, int64(-1000), -1.0} {
		doc := shopEvent("d-1")
		for i := range doc {
			if doc[i].Key == "created" {
				doc[i].Value = created
			}
		}
		checkRejectedField(t, m, doc, "created")
	}
}

func TestMappingProblems(t *testing.T) {
	t.Parallel()
	for want, n := range map[string]Names{
		"payload":       {Payload: NoField},
		"id":            {ID: NoField},
		"type":          {Type: WholeDocument},
		"aggregatetype": {AggregateType: "a.b"},
		"subject":       {Subject: "$x"},
		"timestamp":     {Timestamp: "ts"},
		"key":           {Key: "slot"},
		"source":        {Source: "sentAt"},
	} {
		_, problems := NewMapping(n, false)
		if len(problems) != 1 || problems[0].Key != want {
			t.Errorf("%+v: problems %v, want one of %s", n, problems, want)
		}
	}

	for _, n := range []Names{{}, {ID: "_id", Payload: "payload", Key: "key", ExpiresAt: "expiresAt"}} {
		if m, problems := NewMapping(n, false); m != nil || problems != nil {
			t.Errorf("%+v compiles to %v, %v; the names of the contract need no mapping", n, m, problems)
		}
	}
}

func TestMappedParseDoesNotAllocate(t *testing.T) {
	raw := marshal(t, shopEvent("d-1"))
	whole := marshal(t, bson.D{{Key: "_id", Value: "0123456789"}, {Key: "a", Value: 1}})
	var v View

	for raw, m := range map[string]*Mapping{
		string(raw):   mapped(t, shopNames),
		string(whole): mapped(t, Names{AggregateType: "-", AggregateID: "-", Type: "-", Payload: "*", Key: "*"}),
	} {
		doc := []byte(raw)
		if n := testing.AllocsPerRun(100, func() {
			if err := m.Parse(doc, &v); err != nil {
				t.Fatal(err)
			}
		}); n > 0 {
			t.Errorf("%s: %v allocations", m, n)
		}
	}
}

func TestKeyFilter(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]*Mapping{
		"key|key,aggregateid": nil,
		"user|user,orderId":   mapped(t, Names{Key: "user", AggregateID: "orderId"}),
		"_id":                 mapped(t, Names{Key: NoField, AggregateID: NoField}),
		"key|key,owner":       mapped(t, Names{AggregateID: "owner"}),
	} {
		var got []string
		for _, or := range m.KeyFilter(bson.A{"x"}).Value.(bson.A) {
			var names []string
			for _, e := range or.(bson.D) {
				names = append(names, e.Key)
			}
			got = append(got, strings.Join(names, ","))
		}

		if strings.Join(got, "|") != want {
			t.Errorf("the filter reads %v, want %s", got, want)
		}
	}
}

func marshal(t *testing.T, doc bson.D) []byte {
	t.Helper()
	raw, err := bson.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestFieldsOfTheRelayAreDocumented: docs/mapping.md lists the fields that no part may use.
func TestFieldsOfTheRelayAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/mapping.md")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile("(?m)^- (.*) have a meaning for the relay, so you.*$").FindSubmatch(text)
	if line == nil {
		t.Fatal("docs/mapping.md has no list of the fields")
	}

	var documented []string
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllSubmatch(line[1], -1) {
		documented = append(documented, string(m[1]))
	}
	want := slices.Clone(relayWritten)
	slices.Sort(documented)
	slices.Sort(want)
	if !slices.Equal(documented, want) {
		t.Errorf("documented are %v, the relay uses %v", documented, want)
	}
}
