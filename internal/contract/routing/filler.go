package routing

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Meta holds the data of a record that is not in its envelope.
type Meta struct {
	DB, Coll    []byte         // where the envelope is stored
	ClusterTime bson.Timestamp // of its commit
	CommitMS    int64          // commit time in Unix milliseconds; 0 means the second of ClusterTime (N12)
	Redelivered bool           // a delivery may have happened that no read-back can find
	Position    string         // of an event that is sent out of the store instead of the stream, or ""
}

// Names of the headers that all presets add.
var (
	hID          = []byte(record.HeaderID)
	hDocumentID  = []byte(record.HeaderDocumentID)
	hIDType      = []byte(record.HeaderIDType)
	hNS          = []byte(record.HeaderNamespace)
	hDelivery    = []byte(record.HeaderDelivery)
	hPosition    = []byte(record.HeaderPosition)
	hRedelivered = []byte(record.HeaderRedelivered)
	hDeliverBy   = []byte(record.HeaderDeliverBy)
)

// Constant values.
var (
	valueString = []byte("string")
	valueTrue   = []byte("true")
	noBytes     = []byte{}
)

// Filler fills records for one goroutine. Its buffers hold all bytes of a record that are not in the
// envelope. Each Fill reuses them, so a record is valid until the next Fill, and while the envelope's
// bytes are.
type Filler struct {
	preset   *Preset
	buf      []byte
	headers  []record.Header
	nsBuf    []byte
	nsHashes map[string][]byte // namespace to its hash
}

// Filler returns a new Filler.
func (p *Preset) Filler() *Filler {
	return &Filler{
		preset:   p,
		buf:      make([]byte, 0, 512),
		headers:  make([]record.Header, 0, 16),
		nsHashes: make(map[string][]byte),
	}
}

// keptBuffer is the largest buffer that a filler keeps for its next record, in bytes.
const keptBuffer = 1 << 20

// Release gives back the memory of a large record. The records that were filled are not valid afterwards. The next Fill
// does the same.
func (f *Filler) Release() {
	if cap(f.buf) > keptBuffer {
		f.buf = make([]byte, 0, 512)
	}
	if cap(f.headers) > record.MaxHeaders/4 {
		f.headers = make([]record.Header, 0, 16)
	}
	f.buf, f.headers = f.buf[:0], f.headers[:0]
}

// Fill makes rec the record of view for target. For another target of the same envelope, the caller only
// changes Topic and Partition of rec. The error is a [*record.Rejection]: of class Malformed if the payload cannot be
// written as JSON, and of class MessageTooLarge if the record would exceed the limit of the preset. The limit applies to
// each part before it takes memory, and to all of them together.
func (f *Filler) Fill(view *envelope.View, meta *Meta, target Target, rec *record.Record) error {
	f.Release()
	rec.Topic, rec.Partition = target.Topic, target.Partition
	rec.Key = view.OrderingKey()
	rec.TimeMS, rec.Sent = commitMS(meta), record.Sent{}
	if view.HasRecordTime {
		rec.TimeMS = view.RecordTime
	}
	if err := f.setValue(view, rec); err != nil {
		return err
	}

	f.headers = append(f.headers[:0], f.preset.leading...)
	f.addIdentityHeaders(view, meta)
	if view.HasExpiresAt {
		start := len(f.buf)
		f.buf = strconv.AppendInt(f.buf, view.ExpiresAt, 10)
		f.addHeader(hDeliverBy, f.buf[start:])
	}
	if err := f.preset.format(f, view, meta, rec); err != nil {
		return err
	}
	if err := f.addConfiguredHeaders(view, meta); err != nil {
		return err
	}
	for it := view.Headers.Iter(); it.Next(); {
		f.addHeader(it.Key, it.Value)
	}
	rec.Headers = f.headers
	return f.checkSize(rec)
}

// checkSize returns a rejection if the record is larger than the limit of the preset, or has too many headers.
func (f *Filler) checkSize(rec *record.Record) error {
	if n := len(rec.Headers); n > record.MaxHeaders {
		return &record.Rejection{
			Class:  record.MessageTooLarge,
			Reason: fmt.Sprintf("the record has %d headers, including the headers of the relay; at most %d are allowed", n, record.MaxHeaders),
		}
	}

	headers := 0
	for i := range rec.Headers {
		headers += len(rec.Headers[i].Key) + len(rec.Headers[i].Value)
	}
	size := len(rec.Topic) + len(rec.Key) + len(rec.Value) + headers
	if size <= f.preset.maxRecord {
		return nil
	}
	return &record.Rejection{
		Class: record.MessageTooLarge,
		Reason: fmt.Sprintf("the record has %d bytes, of which %d are its value and %d its headers; at most %d are allowed (limits.record)",
			size, len(rec.Value), headers, f.preset.maxRecord),
	}
}

// asTooLarge returns the rejection of an envelope whose value, made of a payload of the given size, would exceed the limit of
// the preset.
func (f *Filler) asTooLarge(payload int) error {
	return &record.Rejection{
		Class: record.MessageTooLarge,
		Reason: fmt.Sprintf("the payload has %d bytes, and the value of the record, made of it, would have more; at most %d are allowed (limits.record)",
			payload, f.preset.maxRecord),
	}
}

// commitMS returns the timestamp of the record: the time of the envelope's commit, by the clock of the
// server (N12). The time in the envelope, or of a client, could be older than the retention of the topic.
func commitMS(meta *Meta) int64 {
	if meta.CommitMS != 0 {
		return meta.CommitMS
	}
	return int64(meta.ClusterTime.T) * 1000
}

// setValue sets the payload: bytes and strings unchanged, null as a tombstone, and others in the style of the preset.
func (f *Filler) setValue(view *envelope.View, rec *record.Record) error {
	switch {
	case view.Tombstone():
		rec.Value = nil

	case !view.HasRawPayload():
		start := len(f.buf)
		buf, err := envelope.AppendPayloadAs(f.buf, view, f.preset.style, f.preset.maxRecord)
		if err != nil {
			return asRejection(err)
		}
		f.buf = buf
		// The capacity ends with the value, so an append to it cannot overwrite the bytes that follow in f.buf.
		rec.Value = buf[start:len(buf):len(buf)]

	case len(view.Payload) > f.preset.maxRecord:
		return f.asTooLarge(len(view.Payload))
	default:
		// For Kafka a nil value is a tombstone, so an empty payload must not be nil.
		rec.Value = view.Payload
		if rec.Value == nil {
			rec.Value = noBytes
		}
	}
	if len(f.preset.fields) > 0 && rec.Value != nil {
		return f.addFieldsToValue(view, rec)
	}
	return nil
}

// addFieldsToValue replaces the value, which is the payload, by a JSON object of the payload and of further fields.
func (f *Filler) addFieldsToValue(view *envelope.View, rec *record.Record) error {
	start := len(f.buf)
	body, err := f.appendPayloadMember(append(f.buf, `{"payload":`...), view, rec.Value)
	if err != nil {
		return err
	}
	for i := range f.preset.fields {
		field := &f.preset.fields[i]
		bsonType, val := view.Field(field.path)
		if bsonType == 0 {
			continue
		}

		// Debezium writes further fields as values of Kafka Connect, which have no types of BSON.
		style := f.preset.style
		if f.preset.wrap {
			style = envelope.Connect
		}
		// The fields share the limit with the payload.
		most := f.preset.maxRecord - (len(body) - start)
		body, err = envelope.AppendValue(append(body, field.name...), bsonType, val, style, most)
		switch {
		case errors.Is(err, envelope.ErrTooLong):
			return &record.Rejection{
				Class: record.MessageTooLarge,
				Reason: fmt.Sprintf("the value of the record, with field %s of %d bytes, exceeds its limit; at most %d are allowed (limits.record)",
					field.path, len(val), f.preset.maxRecord),
			}
		case err != nil:
			return &record.Rejection{Class: record.Malformed, Reason: "field " + field.path + " is broken or nested too deep"}
		}
	}

	f.buf = append(body, '}')
	rec.Value = f.buf[start:len(f.buf):len(f.buf)]
	return nil
}

// appendPayloadMember appends the payload as a member of a JSON object: JSON unchanged, text as a string, everything else
// as base64. With the preset debezium, a document is a string that contains JSON, as in Debezium's records.
func (f *Filler) appendPayloadMember(dst []byte, view *envelope.View, payload []byte) ([]byte, error) {
	kind := bson.Type(view.PayloadType)
	isDocument := kind == bson.TypeEmbeddedDocument && !f.preset.wrap || kind == bson.TypeArray
	switch {
	// Inside of JSON, Debezium's router writes everything but documents as Kafka Connect's JSON.
	case f.preset.wrap && kind != bson.TypeEmbeddedDocument && !view.HasRawPayload():
		// setValue has found the payload valid.
		dst, err := envelope.AppendValue(dst, kind, view.Payload, envelope.Connect, f.preset.maxRecord)
		if err != nil {
			return dst, f.asTooLarge(len(view.Payload))
		}
		return dst, nil
	case isDocument, !f.preset.wrap && isJSON(view.ContentType) && json.Valid(payload):
		return append(dst, payload...), nil
	case kind == bson.TypeString || kind == bson.TypeEmbeddedDocument:
		return f.appendQuoted(dst, payload)
	}
	return f.appendBase64(dst, payload)
}

// appendQuoted appends text as a JSON string. The error is a rejection of a text that is too large.
func (f *Filler) appendQuoted(dst, text []byte) ([]byte, error) {
	dst, err := envelope.AppendQuoted(dst, text, f.preset.maxRecord)
	if err != nil {
		return dst, f.asTooLarge(len(text))
	}
	return dst, nil
}

// appendBase64 appends data as a JSON string of base64. The error is a rejection of data that is too large.
func (f *Filler) appendBase64(dst, data []byte) ([]byte, error) {
	n := base64.StdEncoding.EncodedLen(len(data))
	if n > f.preset.maxRecord {
		return dst, f.asTooLarge(len(data))
	}
	dst = slices.Grow(dst, n+2)
	return append(base64.StdEncoding.AppendEncode(append(dst, '"'), data), '"'), nil
}

// addIdentityHeaders adds the headers by which a read-back recognizes a delivery. The id comes first (N7), after the
// constant headers of the preset.
func (f *Filler) addIdentityHeaders(view *envelope.View, meta *Meta) {
	start := len(f.buf)
	f.buf = view.AppendRecordID(f.buf, f.preset.base64IDs)
	f.addHeader(hID, f.buf[start:])
	// With a mapping, the id of the event may be another field. `_id` still identifies the delivery (N7).
	if view.EventID != nil {
		start = len(f.buf)
		f.buf = view.AppendID(f.buf)
		f.addHeader(hDocumentID, f.buf[start:])
	}
	if view.AmbiguousID() {
		f.addHeader(hIDType, valueString)
	}
	// An id is unique only in its collection, and a consumer may read the topics of several relays (N7).
	f.addHeader(hNS, f.namespaceHash(meta))

	if view.Delivery > 0 {
		start = len(f.buf)
		f.buf = strconv.AppendInt(f.buf, int64(view.Delivery), 10)
		f.addHeader(hDelivery, f.buf[start:])
	}
	// An id may be used again once its envelope has left the outbox, while a record of the first event can still be read back (N7).
	if meta.Position != "" {
		start = len(f.buf)
		f.buf = record.AppendPositionDigest(f.buf, []byte(meta.Position))
		f.addHeader(hPosition, f.buf[start:])
	}
	if meta.Redelivered {
		f.addHeader(hRedelivered, valueTrue)
	}
}

// namespaceHash returns the hash of the envelope's collection, from a cache of at most maxCached entries.
func (f *Filler) namespaceHash(meta *Meta) []byte {
	f.nsBuf = append(f.nsBuf[:0], meta.DB...)
	f.nsBuf = append(f.nsBuf, '.')
	f.nsBuf = append(f.nsBuf, meta.Coll...)
	// The compiler does not allocate a string for the lookup in a map.
	if known, ok := f.nsHashes[string(f.nsBuf)]; ok {
		return known
	}

	// Collections are few. Dropping them all is simpler than remembering which were used last.
	if len(f.nsHashes) >= maxCached {
		clear(f.nsHashes)
	}
	hash := NamespaceHash(string(f.nsBuf))
	f.nsHashes[string(f.nsBuf)] = hash[:]
	return hash[:]
}

// NamespaceHash returns the value of the header outrelay-ns: the first 8 bytes of the SHA-256 of
// "database.collection".
func NamespaceHash(ns string) [8]byte {
	sum := sha256.Sum256([]byte(ns))
	return [8]byte(sum[:8])
}

// addConfiguredHeaders adds the headers of the configuration. It leaves out empty ones. The error is a *record.Rejection for a
// value that has no text or is too long.
func (f *Filler) addConfiguredHeaders(view *envelope.View, meta *Meta) error {
	for i := range f.preset.headers {
		header := &f.preset.headers[i]
		value := header.text
		if value == nil {
			start := len(f.buf)
			// A missing value leaves out the header. A value that has no text is an error.
			var worst envelope.Finding
			if f.buf, worst = header.value.appendTo(f.buf, view, meta); worst > envelope.Missing {
				reason := "header " + string(header.name) + ": " + header.value.findProblem(view, meta, envelope.Unfit)
				return &record.Rejection{Class: worst.Class(), Reason: reason}
			}
			value = f.buf[start:len(f.buf):len(f.buf)]
		}

		if len(value) > 0 {
			f.addHeader(header.name, value)
		}
	}
	return nil
}

func (f *Filler) formatTime(ms int64) []byte {
	start := len(f.buf)
	f.buf = appendTime(f.buf, ms)
	return f.buf[start:]
}

func (f *Filler) addOptionalHeader(key, value []byte) {
	if value != nil {
		f.addHeader(key, value)
	}
}

func (f *Filler) addHeader(key, value []byte) {
	f.headers = append(f.headers, record.Header{Key: key, Value: value})
}

// asRejection returns an error of envelope.AppendPayload as a rejection. All known errors are rejections already.
func asRejection(err error) error {
	var rejection *record.Rejection
	if errors.As(err, &rejection) {
		return rejection
	}
	return &record.Rejection{Class: record.Malformed, Reason: "payload: " + err.Error()}
}
