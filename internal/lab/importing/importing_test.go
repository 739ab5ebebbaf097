package importing

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// uuid1 is a GUID. legacy1 has its bytes in the order of the driver for .NET before version 3.
const uuid1 = "00112233-4455-6677-8899-aabbccddeeff"

var (
	bytes1  = []byte{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}
	legacy1 = []byte{0x33, 0x22, 0x11, 0x00, 0x55, 0x44, 0x77, 0x66, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}
	past    = time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	future  = time.Now().Add(time.Hour).Truncate(time.Millisecond).UTC()
)

type fixture struct {
	t      *testing.T
	cfg    config.Config
	state  state.Database
	outbox *mongo.Collection
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	client := stacktest.Client(t)
	f := &fixture{t: t, state: statetest.New(t, client), outbox: stacktest.Database(t, client).Collection("outbox")}
	f.cfg = config.Default()
	f.cfg.Watcher, f.cfg.Node = "orders", "n1"
	f.cfg.MongoDB.URI = config.NewURI(stacktest.MongoURI(t))
	f.cfg.State.Database = f.state.Name()
	f.cfg.Watch = []string{f.outbox.Database().Name() + ".outbox"}
	return f
}

func (f *fixture) insert(coll *mongo.Collection, docs ...any) {
	f.t.Helper()
	if _, err := coll.InsertMany(f.t.Context(), docs); err != nil {
		f.t.Fatal(err)
	}
}

// insertRows inserts rows of a source.
func (f *fixture) insertRows(name string, docs ...any) {
	f.insert(f.outbox.Database().Collection(name), docs...)
}

func (f *fixture) newImporter(o Options) *Importer {
	f.t.Helper()
	im, disconnect, err := Connect(f.cfg, o)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(disconnect)
	return im
}

func (f *fixture) expectRejection(o Options, want ...string) {
	f.t.Helper()
	_, err := f.newImporter(o).Plan(f.t.Context())
	if !errors.Is(err, ErrRejected) {
		f.t.Errorf("%+v is not rejected: %v", o, err)
		return
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			f.t.Errorf("no %q in %v", w, err)
		}
	}
}

// importRows plans, checks that the plan wrote nothing, imports, and imports again. It returns the report of the import.
func (f *fixture) importRows(o Options) Report {
	f.t.Helper()
	im := f.newImporter(o)
	plan, err := im.Plan(f.t.Context())
	if err != nil || !plan.DryRun || plan.Done {
		f.t.Fatalf("%+v, %v", plan, err)
	}
	if n := f.countDocuments(f.outbox) + f.countDocuments(f.deadLetters()) + f.countDocuments(f.state.Collection("imports")); n != 0 {
		f.t.Errorf("the plan wrote %d documents", n)
	}

	r, err := im.Run(f.t.Context())
	if err != nil || !r.Done || r.Total() != plan.Total() || r.Rejected != plan.Rejected {
		f.t.Fatalf("planned %+v, imported %+v, %v", plan, r, err)
	}
	again, err := im.Run(f.t.Context())
	if err != nil || again.Total() != 0 || again.Known != r.Total() {
		f.t.Errorf("a second run: %+v, %v", again, err)
	}
	return r
}

func (f *fixture) deadLetters() *mongo.Collection {
	return f.state.Collection("letters")
}

func (f *fixture) countDocuments(coll *mongo.Collection) int64 {
	f.t.Helper()
	n, err := coll.CountDocuments(f.t.Context(), bson.D{})
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

// readEnvelope returns the envelope with an id. If it waits, it is not in the outbox, and the document of the collection
// waiting is returned instead of the envelope itself.
func (f *fixture) readEnvelope(id any) (envelope.View, bson.Raw) {
	f.t.Helper()
	raw, err := f.outbox.FindOne(f.t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		stored, err := f.state.Collection("waiting").FindOne(f.t.Context(), bson.D{{Key: "id", Value: id}}).Raw()
		if err != nil {
			f.t.Fatalf("envelope %v neither is in the outbox nor waits: %v", id, err)
		}
		var v envelope.View
		if err := envelope.Parse(stored.Lookup("envelope").Document(), &v); err != nil {
			f.t.Fatal(err)
		}
		return v, stored
	}

	if err != nil {
		f.t.Fatalf("envelope %v: %v", id, err)
	}
	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		f.t.Fatal(err)
	}
	return v, raw
}

// headers returns the headers as text.
func headersOf(v envelope.View) string {
	var out []string
	for it := v.Headers.Iter(); it.Next(); {
		out = append(out, fmt.Sprintf("%s=%s", it.Key, it.Value))
	}
	return strings.Join(out, " ")
}

// expectEnvelope compares the fields of an envelope with their text.
func (f *fixture) expectEnvelope(id any, aggregateType, key, typ, payload, headers string) (envelope.View, bson.Raw) {
	f.t.Helper()
	v, raw := f.readEnvelope(id)
	got := []string{string(v.AggregateType), string(v.OrderingKey()), string(v.Type), string(v.Payload), headersOf(v)}
	want := []string{aggregateType, key, typ, payload, headers}
	if strings.Join(got, "|") != strings.Join(want, "|") {
		f.t.Errorf("envelope %v: got %q, want %q", id, got, want)
	}
	if v.TS.IsZero() || v.Slot < 0 {
		f.t.Errorf("envelope %v has no stamp or no slot", id)
	}
	return v, raw
}

func (f *fixture) expectRetry(v envelope.View, stored bson.Raw, attempts int32) {
	f.t.Helper()
	text := func(name string) string { s, _ := stored.Lookup(name).StringValueOK(); return s }
	n, _ := stored.Lookup("attempts").Int32OK()
	if text("reason") != "retry" || n != attempts || stored.Lookup("nextAt").Type != bson.TypeDateTime || text("key") != string(v.OrderingKey()) ||
		text("watcher") != "orders" || text("ns") != f.cfg.Watch[0] || v.TS.T == 0 {
		f.t.Errorf("no retry after %d attempts: %s", attempts, stored)
	}
}

func uuidOf(data []byte) bson.Binary { return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: data} }

func TestImportOfSlimMessageBus(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	message := func(id string, change ...bson.E) bson.D {
		doc := bson.D{
			{Key: "_id", Value: id},
			{Key: "timestamp", Value: past},
			{Key: "bus_name", Value: "kafka"},
			{Key: "message_type", Value: "Shop.OrderPlaced, Shop, Version=1.0.0.0"},
			{Key: "message_payload", Value: []byte(`{"a":1}`)},
			{Key: "headers", Value: `{"tenant":"t1","n":5,"none":null}`},
			{Key: "path", Value: "orders"},
			{Key: "lock_instance_id", Value: nil},
			{Key: "lock_expires_on", Value: time.Time{}},
			{Key: "delivery_attempt", Value: int32(0)},
			{Key: "delivery_complete", Value: false},
			{Key: "delivery_aborted", Value: false},
		}
		for _, c := range change {
			for i := range doc {
				if doc[i].Key == c.Key {
					doc[i] = c
				}
			}
		}
		return doc
	}
	f.insertRows("smb_outbox",
		message(uuid1),
		message("11112233-4455-6677-8899-aabbccddeeff", bson.E{Key: "delivery_attempt", Value: int32(2)}, bson.E{Key: "path", Value: nil}),
		message("22112233-4455-6677-8899-aabbccddeeff", bson.E{Key: "delivery_attempt", Value: int32(3)}, bson.E{Key: "delivery_aborted", Value: true}),
		message("33112233-4455-6677-8899-aabbccddeeff", bson.E{Key: "delivery_complete", Value: true}),
		message("44112233-4455-6677-8899-aabbccddeeff", bson.E{Key: "headers", Value: `{"id":"x"}`}))

	r := f.importRows(Options{From: "slimmessagebus", KeyHeader: "tenant"})
	if r.Pending != 1 || r.Retried != 1 || r.Dead != 1 || r.Rejected != 1 || len(r.Problems) != 1 || r.Tables[0].Rows != 4 {
		t.Errorf("%+v", r)
	}
	if p := r.Problems[0]; !strings.Contains(p.ID, "44112233") || !strings.Contains(p.Reason, "id") {
		t.Errorf("%+v", p)
	}
	f.expectEnvelope(uuidOf(bytes1), "orders", "t1", "Shop.OrderPlaced", `{"a":1}`, "tenant=t1 n=5 none=")
	second := append([]byte{0x11, 0x11}, bytes1[2:]...)
	v, raw := f.expectEnvelope(uuidOf(second), "OrderPlaced", "t1", "Shop.OrderPlaced", `{"a":1}`, "tenant=t1 n=5 none=")
	f.expectRetry(v, raw, 2)

	letter, err := f.deadLetters().FindOne(t.Context(), bson.D{}).Raw()
	if err != nil || letter.Lookup("class").StringValue() != "attempts_exhausted" || letter.Lookup("envelope", "imported", "attempts").Int32() != 3 {
		t.Errorf("%s, %v", letter, err)
	}
	if reason := letter.Lookup("reason").StringValue(); !strings.Contains(reason, "attempts of slimmessagebus: 3") {
		t.Errorf("reason %q", reason)
	}
	if n := f.countDocuments(f.outbox.Database().Collection("smb_outbox")); n != 5 {
		t.Errorf("%d rows are left", n)
	}
}

func TestImportOfKoan(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	record := func(id string, status string, attempt int32, visible any) bson.D {
		return bson.D{
			{Key: "_id", Value: id},
			{Key: "OccurredAt", Value: past},
			{Key: "EntityType", Value: "Order"},
			{Key: "Operation", Value: "Upsert"},
			{Key: "EntityId", Value: "o-1"},
			{Key: "PayloadJson", Value: `{"Id":"o-1"}`},
			{Key: "Headers", Value: bson.D{{Key: "h", Value: "v"}}},
			{Key: "Attempt", Value: attempt},
			{Key: "VisibleAt", Value: visible},
			{Key: "Status", Value: status},
			{Key: "DeadReason", Value: "no handler"},
		}
	}
	ticks := future.UnixNano()/100 + ticksOf1970
	f.insertRows("Outbox",
		record(uuid1, "Pending", 0, past),
		record("a", "Pending", 0, bson.A{ticks + 60*600_000_000, int32(60)}), // an hour east
		record("b", "Pending", 4, bson.D{{Key: "DateTime", Value: future}, {Key: "Ticks", Value: ticks}}),
		record("c", "Dead", 10, past.Format(time.RFC3339)),
		record("d", "Done", 1, past),
		append(record("e", "Pending", 0, past), bson.E{Key: "PartitionKey", Value: "Order"}),
		append(record("f", "Pending", 0, past), bson.E{Key: "PartitionKey", Value: "tenant-1"}))

	r := f.importRows(Options{From: "koan"})
	if r.Pending != 3 || r.Scheduled != 1 || r.Retried != 1 || r.Dead != 1 {
		t.Errorf("%+v", r)
	}
	f.expectEnvelope(uuidOf(bytes1), "Order", "o-1", "Upsert", `{"Id":"o-1"}`, "h=v")
	// Koan's own partition key is the type of the entity. Another one was chosen by the service.
	f.expectEnvelope("e", "Order", "o-1", "Upsert", `{"Id":"o-1"}`, "h=v")
	f.expectEnvelope("f", "Order", "tenant-1", "Upsert", `{"Id":"o-1"}`, "h=v")
	if v, _ := f.readEnvelope("a"); !v.HasDueAt || v.DueAt != future.UnixMilli() {
		t.Errorf("due at %d, want %d", v.DueAt, future.UnixMilli())
	}
	v, raw := f.readEnvelope("b")
	f.expectRetry(v, raw, 4)
	if at := raw.Lookup("nextAt").DateTime(); at != future.UnixMilli() {
		t.Errorf("next at %d, want %d", at, future.UnixMilli())
	}
	letter, err := f.deadLetters().FindOne(t.Context(), bson.D{}).Raw()
	if err != nil || letter.Lookup("reason").StringValue() != "no handler (attempts of koan: 10)" {
		t.Errorf("%s, %v", letter, err)
	}
}

// TestImportOfKoanInCamelCase: with another naming convention of the driver, no row is left out.
func TestImportOfKoanInCamelCase(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	row := func(id, status string, visible any) bson.D {
		return bson.D{
			{Key: "_id", Value: id},
			{Key: "occurredAt", Value: past},
			{Key: "entityType", Value: "Order"},
			{Key: "operation", Value: "Upsert"},
			{Key: "entityId", Value: "o-1"},
			{Key: "payloadJson", Value: "{}"},
			{Key: "attempt", Value: int32(0)},
			{Key: "visibleAt", Value: visible},
			{Key: "status", Value: status},
		}
	}
	f.insertRows("Outbox", row("a", "Pending", past), row("b", "Dead", past), row("c", "Done", past), row("d", "Pending", "soon"))

	r := f.importRows(Options{From: "koan"})
	if r.Pending != 1 || r.Dead != 1 || r.Rejected != 1 || r.Tables[0].Rows != 3 {
		t.Errorf("%+v", r)
	}
	if p := r.Problems; len(p) != 1 || !strings.Contains(p[0].Reason, `VisibleAt: expected a time; found "soon"`) {
		t.Errorf("a due time that is none: %+v", p)
	}
	f.expectEnvelope("a", "Order", "o-1", "Upsert", "{}", "")

	f.insertRows("Outbox", row("e", "Postponed", past))
	f.expectRejection(Options{From: "koan"}, "expected the Status Pending, Dead, Done", `found "Postponed"`)
}

func TestImportOfOutboxEventBus(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	event := func(id, status string, retries int32, next any) bson.D {
		return bson.D{
			{Key: "_id", Value: bson.NewObjectID()},
			{Key: "eventId", Value: id},
			{Key: "type", Value: "order.created"},
			{Key: "payload", Value: bson.D{{Key: "n", Value: 1.5}, {Key: "s", Value: "<é\"\n>"}, {Key: "2", Value: int64(2)}, {Key: "at", Value: past}, {Key: "l", Value: bson.A{nil, true}}}},
			{Key: "status", Value: status},
			{Key: "occurredAt", Value: past},
			{Key: "nextRetryAt", Value: next},
			{Key: "retryCount", Value: retries},
			{Key: "lastError", Value: "broker down"},
			{Key: "expireInSeconds", Value: int32(60)},
			{Key: "keepAlive", Value: past},
		}
	}
	unusual := event("x", "created", 0, past)
	unusual[3].Value = bson.D{{Key: "r", Value: bson.Regex{Pattern: "a"}}}
	f.insertRows("outbox_events", event("e1", "created", 0, past), event("e2", "active", 0, past), event("e3", "failed", 2, future),
		event("e4", "failed", 5, past), event("e5", "completed", 0, past), unusual)

	r := f.importRows(Options{From: "outbox-event-bus"})
	if r.Pending != 2 || r.Retried != 1 || r.Dead != 1 || r.Rejected != 1 || !strings.Contains(r.Problems[0].Reason, "has no JSON") {
		t.Errorf("%+v", r)
	}
	const value = `{"id":"%s","type":"order.created","payload":{"2":2,"n":1.5,"s":"<é\"\n>","at":"2026-01-02T03:04:05.678Z","l":[null,true]},"occurredAt":"2026-01-02T03:04:05.678Z"}`
	for _, id := range []string{"e1", "e2", "e3"} {
		f.expectEnvelope(id, "order", id, "order.created", fmt.Sprintf(value, id), "eventType=order.created")
	}
	v, raw := f.readEnvelope("e3")
	f.expectRetry(v, raw, 2)
	if at := raw.Lookup("nextAt").DateTime(); at != future.UnixMilli() {
		t.Errorf("next at %d, want %d", at, future.UnixMilli())
	}
	letter, err := f.deadLetters().FindOne(t.Context(), bson.D{{Key: "envelope._id", Value: "e4"}}).Raw()
	if err != nil || letter.Lookup("reason").StringValue() != "broker down (attempts of outbox-event-bus: 5)" {
		t.Errorf("%s, %v", letter, err)
	}
}

// wolverineBody serializes a message as Wolverine does.
func wolverineBody(data []byte, headers ...string) []byte {
	var b bytes.Buffer
	number := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	number(int64(1))
	number(int32(len(headers) / 2))
	for _, h := range headers {
		b.Write(binary.AppendUvarint(nil, uint64(len(h))))
		b.WriteString(h)
	}
	number(int32(len(data)))
	b.Write(data)
	return b.Bytes()
}

func TestImportOfWolverine(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	body := wolverineBody([]byte(`{"a":1}`), "message-type", "OrderPlaced", "content-type", "application/json", "id", uuid1,
		"tenant", strings.Repeat("t", 200), "destination", "kafka://topic/orders", "attempts", "0")
	outgoing := func(id byte, body []byte, attempts int32) bson.D {
		return bson.D{
			{Key: "_id", Value: uuidOf(append([]byte{id}, bytes1[1:]...))},
			{Key: "ownerId", Value: int32(1)},
			{Key: "destination", Value: "kafka://topic/orders"},
			{Key: "deliverBy", Value: future},
			{Key: "body", Value: body},
			{Key: "attempts", Value: attempts},
			{Key: "messageType", Value: "OrderPlaced"},
		}
	}
	f.insertRows("wolverine_outgoing_envelopes", outgoing(0, body, 0), outgoing(1, body, 1), outgoing(2, body[:20], 0))

	incoming := func(id byte, status, typ string, body []byte) bson.D {
		return bson.D{
			{Key: "_id", Value: fmt.Sprint(id)},
			{Key: "envelopeId", Value: uuidOf(append([]byte{id}, bytes1[1:]...))},
			{Key: "status", Value: status},
			{Key: "ownerId", Value: int32(0)},
			{Key: "executionTime", Value: future},
			{Key: "attempts", Value: int32(0)},
			{Key: "body", Value: body},
			{Key: "messageType", Value: typ},
		}
	}
	f.insertRows("wolverine_incoming_envelopes",
		incoming(5, "Scheduled", scheduledEnvelope, wolverineBody(body)),
		incoming(6, "Scheduled", "Reminder", wolverineBody(nil)),
		incoming(7, "Handled", "OrderPlaced", nil))
	f.insertRows("wolverine_dead_letters", bson.D{
		{Key: "_id", Value: uuidOf(append([]byte{9}, bytes1[1:]...))},
		{Key: "messageType", Value: "OrderPlaced"},
		{Key: "receivedAt", Value: "kafka://topic/orders"},
		{Key: "exceptionType", Value: "TimeoutException"},
		{Key: "exceptionMessage", Value: "late"},
		{Key: "body", Value: body},
	})

	r := f.importRows(Options{From: "wolverine"})
	if r.Pending != 1 || r.Scheduled != 1 || r.Retried != 1 || r.Dead != 1 || r.Rejected != 2 || len(r.Tables) != 3 {
		t.Errorf("%+v", r)
	}
	headers := "message-type=OrderPlaced tenant=" + strings.Repeat("t", 200)
	v, _ := f.expectEnvelope(uuidOf(bytes1), "orders", uuid1, "OrderPlaced", `{"a":1}`, headers)
	if v.ExpiresAt != future.UnixMilli() || string(v.ContentType) != "application/json" {
		t.Errorf("%+v", v)
	}
	five := append([]byte{5}, bytes1[1:]...)
	if v, _ := f.expectEnvelope(uuidOf(five), "orders", "05112233"+uuid1[8:], "OrderPlaced", `{"a":1}`, headers); v.DueAt != future.UnixMilli() {
		t.Errorf("due at %d", v.DueAt)
	}
	letter, err := f.deadLetters().FindOne(t.Context(), bson.D{}).Raw()
	if err != nil || letter.Lookup("reason").StringValue() != "TimeoutException: late" {
		t.Errorf("%s, %v", letter, err)
	}
}

// TestImportOfWolverineWithoutOutgoingMessages: Wolverine deletes its messages once they are sent.
func TestImportOfWolverineWithoutOutgoingMessages(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.expectRejection(Options{From: "wolverine"}, "wolverine_outgoing_envelopes", "wolverine_dead_letters has no rows")

	f.insertRows("wolverine_dead_letters", bson.D{
		{Key: "_id", Value: uuidOf(bytes1)},
		{Key: "messageType", Value: "OrderPlaced"},
		{Key: "receivedAt", Value: "kafka://topic/orders"},
		{Key: "body", Value: wolverineBody([]byte("{}"), "message-type", "OrderPlaced")},
	})

	f.expectRejection(Options{From: "wolverine", Collection: "outgoing"}, ".outgoing has no rows")
	if r := f.importRows(Options{From: "wolverine"}); r.Dead != 1 || r.Total() != 1 || r.Tables[0].Rows != 0 {
		t.Errorf("%+v", r)
	}
}

func TestImportOfMassTransit(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	message := func(id bson.Binary, enqueue any) bson.D {
		return bson.D{
			{Key: "_id", Value: bson.NewObjectID()},
			{Key: "SentTime", Value: past},
			{Key: "EnqueueTime", Value: enqueue},
			{Key: "Headers", Value: `{"tenant":"t1"}`},
			{Key: "SequenceNumber", Value: int64(1)},
			{Key: "MessageId", Value: id},
			{Key: "ContentType", Value: "application/vnd.masstransit+json"},
			{Key: "MessageType", Value: "urn:message:Shop:OrderPlaced;urn:message:Shop:IEvent"},
			{Key: "Body", Value: `{"message":{}}`},
			{Key: "CorrelationId", Value: bson.Binary{Subtype: bson.TypeBinaryUUIDOld, Data: legacy1}},
			{Key: "ExpirationTime", Value: future},
			{Key: "DestinationAddress", Value: "rabbitmq://host/vhost/Shop:orders?durable=true"},
		}
	}
	camel := bson.D{
		{Key: "_id", Value: bson.NewObjectID()},
		{Key: "messageId", Value: uuidOf(append([]byte{3}, bytes1[1:]...))},
		{Key: "contentType", Value: "application/json"},
		{Key: "messageType", Value: "urn:message:Shop:Paid"},
		{Key: "body", Value: "{}"},
		{Key: "sentTime", Value: past},
		{Key: "sequenceNumber", Value: int64(1)},
	}
	f.insertRows("outbox.messages", message(bson.Binary{Subtype: bson.TypeBinaryUUIDOld, Data: legacy1}, nil), message(uuidOf(append([]byte{2}, bytes1[1:]...)), future), camel)

	// Without failed attempts, the watcher may be new.
	r := f.importRows(Options{From: "masstransit"})
	if r.Pending != 2 || r.Scheduled != 1 {
		t.Errorf("%+v", r)
	}
	f.expectEnvelope(uuidOf(bytes1), "orders", uuid1, "Shop:OrderPlaced", `{"message":{}}`, "tenant=t1")
	f.expectEnvelope(uuidOf(append([]byte{3}, bytes1[1:]...)), "Paid", "03112233"+uuid1[8:], "Shop:Paid", "{}", "")
}

// TestImportReportsAnIDOfTwoRows: MassTransit keeps the id of a message that it forwards to a further destination. Only one envelope can have
// the id, so the other row is listed, in the same batch and after a later run. An event that the service has appended is no conflict.
func TestImportReportsAnIDOfTwoRows(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	message := func(row int, id, destination string) bson.D {
		return bson.D{
			{Key: "_id", Value: row},
			{Key: "messageId", Value: id},
			{Key: "contentType", Value: "application/json"},
			{Key: "messageType", Value: "urn:message:Shop:Paid"},
			{Key: "body", Value: "{}"},
			{Key: "sentTime", Value: past},
			{Key: "sequenceNumber", Value: int64(row)},
			{Key: "destinationAddress", Value: "queue:" + destination},
		}
	}
	f.insertRows("outbox.messages", message(1, "m", "orders"), message(2, "m", "audit"), message(3, "other", "orders"), message(4, "appended", "orders"))
	f.insert(f.outbox, bson.D{{Key: "_id", Value: "appended"}, {Key: "type", Value: "Paid"}})

	for i, pending := range []int64{2, 0} {
		r, err := f.newImporter(Options{From: "masstransit"}).Run(t.Context())
		if err != nil || r.Pending != pending || r.Rejected != 1 || r.Known != 3-pending || len(r.Problems) != 1 {
			t.Fatalf("run %d: %+v, %v", i+1, r, err)
		}
		if p := r.Problems[0]; !strings.Contains(p.ID, "2") || !strings.Contains(p.Reason, `"1"`) || !strings.Contains(p.Reason, `"m"`) {
			t.Errorf("run %d: %+v", i+1, p)
		}
	}
	if n := f.countDocuments(f.outbox); n != 3 {
		t.Errorf("%d envelopes", n)
	}
}

// TestImportRejectsOtherCollections: the rejection names the expected and the actual fields, and nothing is written.
func TestImportRejectsOtherCollections(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.expectRejection(Options{From: "koan"}, ".Outbox has no rows", "--collection")
	f.insertRows("smb_outbox", bson.D{{Key: "_id", Value: "x"}, {Key: "EntityType", Value: "Order"}})
	f.expectRejection(Options{From: "slimmessagebus"}, "does not belong to slimmessagebus", "expected the fields timestamp, bus_name", "found a row with _id, EntityType")

	if _, _, err := Connect(f.cfg, Options{From: "debezium"}); !errors.Is(err, ErrRejected) || !strings.Contains(err.Error(), "wolverine") {
		t.Errorf("an unknown library: %v", err)
	}
	if _, _, err := Connect(f.cfg, Options{From: "koan", To: "other.outbox"}); !errors.Is(err, ErrRejected) {
		t.Errorf("an outbox that is not watched: %v", err)
	}
	mapped := f.cfg
	mapped.Mapping.AggregateType = "kind"
	if _, _, err := Connect(mapped, Options{From: "koan"}); !errors.Is(err, ErrRejected) || !strings.Contains(err.Error(), "aggregatetype=kind") {
		t.Errorf("a watcher of other documents: %v", err)
	}
	f.cfg.Watch = []string{"*.outbox"}
	if _, _, err := Connect(f.cfg, Options{From: "koan"}); !errors.Is(err, ErrRejected) || !strings.Contains(err.Error(), "--to") {
		t.Errorf("several outboxes: %v", err)
	}
}

// TestImportRejectsAnUnknownStatus: the import rejects rows that it would otherwise skip silently, such as
// the rows of a driver that stores an enumeration as numbers.
func TestImportRejectsAnUnknownStatus(t *testing.T) {
	t.Parallel()
	for _, source := range sources {
		for _, table := range source.tables {
			if table.status == nil {
				continue
			}
			for _, value := range []any{int32(0), "Postponed", nil} {
				f := newFixture(t)
				name := table.status.field
				f.insertRows(table.name, rowWith(table, bson.E{Key: name, Value: table.status.ignores[0]}), rowWith(table, bson.E{Key: name, Value: value}))
				f.expectRejection(Options{From: source.name}, table.name+": expected the "+name, table.status.imports[0], "found "+f.text(value))
			}
		}
	}
}

// rowWith returns a row with all required fields of a table, and with the fields of set.
func rowWith(t table, set ...bson.E) bson.D {
	doc := append(bson.D{{Key: "_id", Value: bson.NewObjectID()}}, set...)
	for _, name := range t.required {
		if !slices.ContainsFunc(set, func(e bson.E) bool { return e.Key == name }) {
			doc = append(doc, bson.E{Key: name, Value: "x"})
		}
	}
	return doc
}

// text returns a value as rejections print it.
func (f *fixture) text(value any) string {
	f.t.Helper()
	raw, err := bson.Marshal(bson.D{{Key: "v", Value: value}})
	if err != nil {
		f.t.Fatal(err)
	}
	return bson.Raw(raw).Lookup("v").String()
}

// TestImportRejectsARunningPublisher: it would send the rows as well. The driver for .NET stores a time in several forms.
func TestImportRejectsARunningPublisher(t *testing.T) {
	t.Parallel()
	ticks := func(at time.Time) int64 { return at.UnixNano()/100 + ticksOf1970 }
	for _, c := range []struct {
		source, status string
		// fields returns the fields of a lock that ends at this time.
		fields func(at time.Time) []bson.E
	}{
		{"slimmessagebus", "", func(at time.Time) []bson.E {
			return []bson.E{{Key: "delivery_complete", Value: false}, {Key: "lock_expires_on", Value: at}}
		}},
		{"koan", "Pending", func(at time.Time) []bson.E { return []bson.E{{Key: "LeaseUntil", Value: at}} }},
		{"koan", "Pending", func(at time.Time) []bson.E { return []bson.E{{Key: "leaseUntil", Value: at.Format(time.RFC3339Nano)}} }},
		{"koan", "Pending", func(at time.Time) []bson.E {
			return []bson.E{{Key: "LeaseUntil", Value: bson.A{ticks(at) - 90*600_000_000, int32(-90)}}}
		}},
		{"koan", "Pending", func(at time.Time) []bson.E {
			return []bson.E{{Key: "LeaseUntil", Value: bson.D{{Key: "DateTime", Value: at}, {Key: "Ticks", Value: ticks(at)}}}}
		}},
		{"outbox-event-bus", "active", func(at time.Time) []bson.E {
			return []bson.E{{Key: "keepAlive", Value: at.Add(-time.Minute)}, {Key: "expireInSeconds", Value: int32(60)}}
		}},
	} {
		f := newFixture(t)
		i := slices.IndexFunc(sources, func(s source) bool { return s.name == c.source })
		table := sources[i].tables[0]
		insert := func(until time.Time) {
			set := c.fields(until)
			if table.status != nil {
				set = append(set, bson.E{Key: table.status.field, Value: c.status})
			}
			f.insertRows(table.name, rowWith(table, set...))
		}
		insert(time.Now().Add(-time.Second))
		if _, err := f.newImporter(Options{From: c.source}).Plan(t.Context()); err != nil {
			t.Errorf("%s, a lock that has ended: %v", c.source, err)
		}
		insert(time.Now().Add(time.Minute))
		f.expectRejection(Options{From: c.source}, "a publisher works on 1 rows", "stop it")
	}

	f := newFixture(t)
	koan := sources[slices.IndexFunc(sources, func(s source) bool { return s.name == "koan" })].tables[0]
	f.insertRows(koan.name, rowWith(koan, bson.E{Key: "Status", Value: "Pending"}, bson.E{Key: "LeaseUntil", Value: "later"}))
	f.expectRejection(Options{From: "koan"}, `LeaseUntil: expected a time; found "later"`)
}

// TestInterruptedImport: envelopes of a run that ended early count as imported, also if they are delivered and purged by now.
func TestInterruptedImport(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const rows = 1200
	docs := make([]any, rows)
	for i := range docs {
		docs[i] = bson.D{
			{Key: "_id", Value: i},
			{Key: "messageId", Value: fmt.Sprint("m", i)},
			{Key: "contentType", Value: "application/json"},
			{Key: "messageType", Value: "urn:message:Shop:Paid"},
			{Key: "body", Value: "{}"},
			{Key: "sentTime", Value: past},
			{Key: "sequenceNumber", Value: int64(1)},
		}
	}
	f.insertRows("outbox.messages", docs...)

	stop := errors.New("stopped")
	im := f.newImporter(Options{From: "masstransit"})
	r := im.newReport()
	run, err := im.newRun(t.Context(), &r, writeRows)
	if err != nil {
		t.Fatal(err)
	}
	batches := 0
	run.options.OnProgress = func(int64) {
		if batches++; batches == 1 {
			if _, err := f.outbox.DeleteMany(t.Context(), bson.D{}); err != nil {
				t.Error(err)
			}
			panic(stop)
		}
	}
	func() {
		defer func() { _ = recover() }()
		_ = run.importTables(t.Context())
	}()

	again, err := f.newImporter(Options{From: "masstransit"}).Run(t.Context())
	if err != nil || again.Known != batchRows || again.Pending != rows-batchRows {
		t.Errorf("%+v, %v", again, err)
	}
	if n := f.countDocuments(f.outbox); n != rows-batchRows {
		t.Errorf("%d envelopes", n)
	}
}

func FuzzWolverineBody(f *testing.F) {
	f.Add(wolverineBody([]byte("x"), "a", "b"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = parseWolverine(b) })
}
