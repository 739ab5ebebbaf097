package importing

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// source describes the collections of an outbox library.
type source struct {
	name   string
	tables []table
}

// table is a collection with rows of one kind. The first table of a source has the messages, and can have another name.
type table struct {
	name     string
	required []string                              // fields of every row
	status   *status                               // field that selects the rows; nil: all are imported, or a boolean selects them
	pending  func(o Options) bson.D                // rows to import
	lock     *lock                                 // nil if the library has no locks
	times    []string                              // fields that decide when a row is sent
	sort     bson.D                                // the order in which the library sends
	convert  func(r row, o Options) (*item, error) // of a row that matches pending
}

// lock describes the rows that a running publisher works on.
type lock struct {
	fields []string // of the lock
	rows   bson.D   // rows that can be locked
	until  func(r row) (time.Time, error)
}

// lockField returns a lock that ends at the time in a field. The server cannot compare such a time, because drivers store
// it in several forms.
func lockField(name string, rows bson.D) *lock {
	return &lock{[]string{name}, rows, func(row row) (time.Time, error) { return row.checkedTime(name) }}
}

// status is a field whose values decide which rows are imported. A row with another value is one of another version or
// another library: it would silently not be imported.
type status struct {
	field   string
	imports []string // values of rows to import
	ignores []string
}

func (s status) matchImports() bson.D { return s.match(s.imports...) }

// match returns the condition for rows with one of these values.
func (s status) match(values ...string) bson.D {
	var or bson.A
	for _, name := range listSpellings(s.field) {
		or = append(or, bson.D{{Key: name, Value: bson.D{{Key: "$in", Value: values}}}})
	}
	return bson.D{{Key: "$or", Value: or}}
}

// listKnown returns all values of the library.
func (s status) listKnown() []string { return slices.Concat(s.imports, s.ignores) }

var (
	koanStatus          = status{field: "Status", imports: []string{"Pending", "Dead"}, ignores: []string{"Done"}}
	outboxEventStatus   = status{field: "status", imports: []string{"created", "active", "failed"}, ignores: []string{"completed"}}
	wolverineScheduling = status{field: "status", imports: []string{"Scheduled"}, ignores: []string{"Incoming", "Handled", "Outgoing"}}
)

// item is a converted row.
type item struct {
	id            any
	aggregateType string
	aggregateID   string
	key           string // of the record; "" is aggregateID
	typ           string
	payload       any
	contentType   string
	headers       []header
	at            time.Time // when the event happened
	due           time.Time // not before
	expires       time.Time
	attempts      int32 // that failed
	dead          bool
	reason        string // of the last failure
}

// Sources returns the names of the libraries whose rows can be imported.
func Sources() []string {
	names := make([]string, len(sources))
	for i, s := range sources {
		names[i] = s.name
	}
	return names
}

var sources = []source{
	{name: "slimmessagebus", tables: []table{{
		name:     "smb_outbox",
		required: []string{"timestamp", "bus_name", "message_type", "message_payload", "delivery_attempt", "delivery_complete", "delivery_aborted"},
		pending:  func(Options) bson.D { return bson.D{{Key: "delivery_complete", Value: false}} },
		lock:     lockField("lock_expires_on", bson.D{{Key: "delivery_complete", Value: false}}),
		sort:     bson.D{{Key: "timestamp", Value: 1}, {Key: "_id", Value: 1}},
		convert:  convertSlimMessageBus,
	}}},
	{name: "koan", tables: []table{{
		name:     "Outbox",
		required: []string{"OccurredAt", "EntityType", "Operation", "EntityId", "PayloadJson", "Attempt", "VisibleAt", "Status"},
		status:   &koanStatus,
		pending:  func(Options) bson.D { return koanStatus.matchImports() },
		lock:     lockField("LeaseUntil", koanStatus.match("Pending")),
		times:    []string{"VisibleAt"},
		sort:     bson.D{{Key: "_id", Value: 1}},
		convert:  convertKoan,
	}}},
	{name: "outbox-event-bus", tables: []table{{
		name:     "outbox_events",
		required: []string{"eventId", "type", "payload", "status", "occurredAt", "retryCount", "expireInSeconds", "keepAlive"},
		status:   &outboxEventStatus,
		pending:  func(Options) bson.D { return outboxEventStatus.matchImports() },
		lock: &lock{
			fields: []string{"keepAlive", "expireInSeconds"}, rows: outboxEventStatus.match("active"),
			until: func(r row) (time.Time, error) {
				at, err := r.checkedTime("keepAlive")
				return at.Add(time.Duration(r.int("expireInSeconds")) * time.Second), err
			},
		},
		times:   []string{"nextRetryAt"},
		sort:    bson.D{{Key: "occurredAt", Value: 1}, {Key: "_id", Value: 1}},
		convert: convertOutboxEventBus,
	}}},
	{name: "wolverine", tables: []table{
		{
			name:     "wolverine_outgoing_envelopes",
			required: []string{"ownerId", "destination", "body", "attempts", "messageType"},
			pending:  func(Options) bson.D { return bson.D{} },
			times:    []string{"deliverBy"},
			sort:     bson.D{{Key: "_id", Value: 1}},
			convert:  convertWolverine,
		},
		{
			name:     "wolverine_incoming_envelopes",
			required: []string{"status", "ownerId", "body", "attempts", "messageType"},
			status:   &wolverineScheduling,
			pending:  func(Options) bson.D { return wolverineScheduling.matchImports() },
			times:    []string{"executionTime"},
			sort:     bson.D{{Key: "executionTime", Value: 1}, {Key: "_id", Value: 1}},
			convert:  convertWolverineScheduled,
		},
		{
			name:     "wolverine_dead_letters",
			required: []string{"messageType", "body"},
			pending:  func(Options) bson.D { return bson.D{} },
			sort:     bson.D{{Key: "_id", Value: 1}},
			convert:  convertWolverineDead,
		},
	}},
	{name: "masstransit", tables: []table{{
		name:     "outbox.messages",
		required: []string{"MessageId", "ContentType", "MessageType", "Body", "SentTime", "SequenceNumber"},
		pending:  func(Options) bson.D { return bson.D{} },
		times:    []string{"EnqueueTime", "ExpirationTime"},
		sort:     bson.D{{Key: "_id", Value: 1}},
		convert:  convertMassTransit,
	}}},
}

func convertSlimMessageBus(row row, _ Options) (*item, error) {
	id, err := row.id("_id")
	if err != nil {
		return nil, err
	}
	headers, err := parseHeaders(row.text("headers"))
	if err != nil {
		return nil, err
	}
	_, payload, ok := row.field("message_payload").BinaryOK()
	if !ok {
		return nil, errors.New("message_payload: expected bytes")
	}

	// The type is an assembly-qualified name: Namespace.Type, Assembly, Version=….
	typ, _, _ := strings.Cut(row.text("message_type"), ",")
	it := &item{
		id: id, aggregateType: row.text("path"), typ: typ, payload: bson.Binary{Data: payload}, headers: headers,
		at: row.time("timestamp"), attempts: row.int("delivery_attempt"), dead: row.isTrue("delivery_aborted"),
	}
	// Without a topic, the type's own name is its best description.
	if it.aggregateType == "" {
		it.aggregateType = typ[strings.LastIndexByte(typ, '.')+1:]
	}
	if it.dead {
		it.reason = "SlimMessageBus aborted the delivery"
	}
	return it, nil
}

func convertKoan(row row, _ Options) (*item, error) {
	id, err := row.id("_id")
	if err != nil {
		return nil, err
	}

	it := &item{
		id: id, aggregateType: row.text("EntityType"), aggregateID: row.text("EntityId"), typ: row.text("Operation"),
		payload: row.text("PayloadJson"), contentType: "application/json", at: row.time("OccurredAt"),
		due: row.time("VisibleAt"), attempts: row.int("Attempt"), dead: row.text("Status") == "Dead", reason: row.text("DeadReason"),
	}

	// Koan itself sets the partition key to the type of the entity. As a key it would put all entities of a type into one partition.
	if key := row.text("PartitionKey"); key != "" && key != it.aggregateType {
		it.key = key
	}

	if doc, ok := row.field("Headers").DocumentOK(); ok {
		elems, err := doc.Elements()
		if err != nil {
			return nil, err
		}
		for _, e := range elems {
			value, ok := e.Value().StringValueOK()
			if !ok {
				return nil, fmt.Errorf("header %s: expected a text; found %s", e.Key(), e.Value().Type)
			}
			it.headers = append(it.headers, header{e.Key(), &value})
		}
	}

	return it, nil
}

// convertOutboxEventBus makes the record of the Kafka publisher: the whole event as JSON, with its id as key.
func convertOutboxEventBus(row row, options Options) (*item, error) {
	id, err := row.id("eventId")
	if err != nil {
		return nil, err
	}
	typ := row.text("type")
	value := appendText([]byte(`{"id":`), row.text("eventId"))
	value = appendText(append(value, `,"type":`...), typ)
	value = append(value, `,"payload":`...)
	if value, err = appendJSON(value, row.field("payload"), 0); err != nil {
		return nil, err
	}
	value = appendText(append(value, `,"occurredAt":`...), isoTime(row.time("occurredAt")))

	it := &item{
		id: id, aggregateID: row.text("eventId"), typ: typ, payload: string(append(value, '}')), contentType: "application/json",
		headers: []header{{"eventType", &typ}}, at: row.time("occurredAt"), attempts: row.int("retryCount"), reason: row.text("lastError"),
	}
	it.aggregateType, _, _ = strings.Cut(typ, ".")
	if row.text("status") == "failed" {
		it.due = row.time("nextRetryAt")
		// The library gives up an event after so many attempts, and stores no status for that.
		it.dead = it.attempts >= options.MaxRetries
	}
	return it, nil
}

func convertWolverine(row row, _ Options) (*item, error) {
	_, body, _ := row.field("body").BinaryOK()
	message, err := parseWolverine(body)
	if err != nil {
		return nil, err
	}
	it, err := wolverineItem(row, "_id", message)
	if err != nil {
		return nil, err
	}
	it.aggregateType, it.attempts, it.expires = lastSegment(row.text("destination")), row.int("attempts"), row.time("deliverBy")
	return it, nil
}

// wolverineItem returns the parts of a message that all tables have.
func wolverineItem(row row, id string, message wolverineMessage) (*item, error) {
	key, err := row.id(id)
	if err != nil {
		return nil, err
	}

	it := &item{id: key, typ: message.get("message-type"), payload: bson.Binary{Data: message.data}, contentType: message.get("content-type")}
	// The row has the type as well.
	if it.typ == "" {
		it.typ = row.text("messageType")
	}

	// The key for partitioning is more specific than the group.
	for _, name := range []string{"partition-key", "group-id"} {
		if it.aggregateID == "" {
			it.aggregateID = message.get(name)
		}
	}

	// The id of the envelope is a header of the record. Attempts and destination are of the delivery that ends here.
	it.headers = slices.DeleteFunc(slices.Clone(message.headers), func(header header) bool {
		return slices.Contains([]string{"id", "attempts", "destination", "content-type", "time-to-send"}, header.name)
	})

	return it, nil
}

// scheduledEnvelope is the message type that wraps a message to a broker until it is due.
const scheduledEnvelope = "scheduled-envelope"

// convertWolverineScheduled converts a scheduled message to a broker. Wolverine stores it as a message to itself that contains the message.
func convertWolverineScheduled(row row, _ Options) (*item, error) {
	_, body, _ := row.field("body").BinaryOK()
	outer, err := parseWolverine(body)
	if err != nil {
		return nil, err
	}
	// Wolverine also schedules messages for its own handlers, which never reach a broker.
	if row.text("messageType") != scheduledEnvelope {
		return nil, errors.New("it is scheduled for a handler of the service, not for a topic")
	}
	message, err := parseWolverine(outer.data)
	if err != nil {
		return nil, err
	}

	it, err := wolverineItem(row, "envelopeId", message)
	if err != nil {
		return nil, err
	}
	it.aggregateType, it.due, it.attempts = lastSegment(message.get("destination")), row.time("executionTime"), row.int("attempts")
	if it.due.IsZero() {
		return nil, errors.New("executionTime: the message is scheduled without a time")
	}
	return it, nil
}

func convertWolverineDead(row row, _ Options) (*item, error) {
	_, body, _ := row.field("body").BinaryOK()
	if len(body) == 0 {
		return nil, errors.New("the dead letter has no body")
	}

	message, err := parseWolverine(body)
	if err != nil {
		return nil, err
	}
	it, err := wolverineItem(row, "_id", message)
	if err != nil {
		return nil, err
	}

	it.aggregateType, it.dead = lastSegment(row.text("receivedAt")), true
	it.reason = strings.TrimSuffix(row.text("exceptionType")+": "+row.text("exceptionMessage"), ": ")
	it.at = row.time("sentAt")
	return it, nil
}

func convertMassTransit(row row, _ Options) (*item, error) {
	id, err := row.id("MessageId")
	if err != nil {
		return nil, err
	}
	headers, err := parseHeaders(row.text("Headers"))
	if err != nil {
		return nil, err
	}

	// MessageType lists the type and its base types: urn:message:Namespace:Type;….
	typ, _, _ := strings.Cut(row.text("MessageType"), ";")
	it := &item{
		id: id, aggregateType: lastSegment(row.text("DestinationAddress")), typ: strings.TrimPrefix(typ, "urn:message:"),
		payload: row.text("Body"), contentType: row.text("ContentType"), headers: headers,
		at: row.time("SentTime"), due: row.time("EnqueueTime"), expires: row.time("ExpirationTime"),
	}
	if it.aggregateType == "" {
		it.aggregateType = lastSegment(it.typ)
	}
	// A message without a correlation is ordered with its conversation.
	for _, name := range []string{"CorrelationId", "ConversationId"} {
		if key, err := row.id(name); err == nil && it.aggregateID == "" {
			it.aggregateID = idText(key)
		}
	}
	return it, nil
}
