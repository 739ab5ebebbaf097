package record

import "crypto/sha256"

// ReservedPrefix begins the names of the headers that only the relay and the consumer library set.
const ReservedPrefix = "outrelay-"

// The headers by which the relay and consumers recognize a delivery. They are part of every preset.
const (
	HeaderID          = "id"                           // of the envelope
	HeaderDocumentID  = ReservedPrefix + "id"          // the `_id` of the document, if a mapping takes the id from another field
	HeaderIDType      = ReservedPrefix + "id-type"     // "string" for an id that is a string and looks like another type
	HeaderNamespace   = ReservedPrefix + "ns"          // a digest of the envelope's collection
	HeaderDelivery    = ReservedPrefix + "delivery"    // the number of a replay, from the second delivery on
	HeaderPosition    = ReservedPrefix + "position"    // a digest of the position of an event that was sent out of the store instead of the stream
	HeaderRedelivered = ReservedPrefix + "redelivered" // "true": it may have been delivered before
	HeaderOnly        = ReservedPrefix + "only"        // group/handler that a message in a retry topic is for
)

// AppendPositionDigest appends the value of HeaderPosition for the position of an event. It distinguishes events that have used one id,
// one after the other.
func AppendPositionDigest(dst, pos []byte) []byte {
	sum := sha256.Sum256(pos)
	return append(dst, sum[:PositionSize]...)
}

// PositionSize is the length of the digest of a position.
const PositionSize = 8

// HeaderDedupKey is the header whose value replaces the event's id for deduplication.
const HeaderDedupKey = "dedup-key"

// The headers that connect an event with the events before it. The outbox sets them on the events that a handler appends. A
// service may set them too, so their names do not begin with ReservedPrefix. A CloudEvent of another producer has them as the
// attributes of the extension "correlation".
const (
	HeaderCorrelationID   = "correlation-id" // of the conversation
	HeaderCausationID     = "causation-id"   // of the message whose handler appended the event
	HeaderCECorrelationID = "ce_correlationid"
)

// HeaderDeliverBy is the time at which a message expires: Unix milliseconds, or RFC 3339. The relay makes it of an
// envelope's expiry. Other producers may set it, so its name does not begin with ReservedPrefix.
const HeaderDeliverBy = "x-outrelay-deliver-by"

// The headers of messages that a consumer moved to a retry topic.
const (
	HeaderAttempt      = ReservedPrefix + "attempt"       // how often the message was tried before
	HeaderRetryDue     = ReservedPrefix + "retry-due"     // Unix milliseconds
	HeaderRetryOrigin  = ReservedPrefix + "retry-origin"  // topic/partition/offset of its first record
	HeaderRetryHistory = ReservedPrefix + "retry-history" // the failures so far, as a JSON array
)

// The headers that the relay makes of an envelope's fields. The preset selects which of them a record has.
const (
	HeaderType          = "type"
	HeaderAggregateType = "aggregatetype"
	HeaderAggregateID   = "aggregateid"
	HeaderContentType   = "contenttype"
	HeaderSchemaVersion = "schemaversion"
	HeaderSource        = "source"
	HeaderSubject       = "subject"
	HeaderTime          = "time"

	HeaderCESpecVersion   = "ce_specversion"
	HeaderCEID            = "ce_id"
	HeaderCESource        = "ce_source"
	HeaderCEType          = "ce_type"
	HeaderCESubject       = "ce_subject"
	HeaderCETime          = "ce_time"
	HeaderCESchemaVersion = "ce_schemaversion"
	HeaderCEExpiryTime    = "ce_expirytime"
	HeaderHTTPContentType = "content-type" // of CloudEvents
)

// TypeCloudEvents begins the content type of a CloudEvent in the structured mode.
const TypeCloudEvents = "application/cloudevents+json"

// DocumentID returns the id of the document of which the record was made.
func (r *Record) DocumentID() []byte {
	if id := r.Header(HeaderDocumentID); id != nil {
		return id
	}
	return r.Header(HeaderID)
}

// Header returns the value of the first header with the given name; nil if there is none.
func (r *Record) Header(name string) []byte {
	for i := range r.Headers {
		if string(r.Headers[i].Key) == name {
			return r.Headers[i].Value
		}
	}
	return nil
}
