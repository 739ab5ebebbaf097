package routing

import (
	"crypto/sha256"
	"errors"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// Meta is what a record needs to know beside its envelope.
type Meta struct {
	DB, Coll        []byte         // where the envelope is stored
	ClusterTime     bson.Timestamp // of its commit
	CommitMS        int64          // commit time in Unix milliseconds where the server tells it; 0: ClusterTime's second (N12)
	MultiCollection bool           // the watcher has more than one collection, so an id alone does not tell (N7)
	Redelivered     bool           // it may have been delivered before, beyond what a read-back can tell
	Only            []byte         // group/handler that a requeued letter is for; nil is everybody (N18)
}

// The names of headers, and values that never change.
var (
	hID          = []byte("id")
	hIDType      = []byte("outrelay-id-type")
	hNS          = []byte("outrelay-ns")
	hDelivery    = []byte("outrelay-delivery")
	hRedelivered = []byte("outrelay-redelivered")
	hOnly        = []byte("outrelay-only")

	hType          = []byte("type")
	hAggregateType = []byte("aggregatetype")
	hAggregateID   = []byte("aggregateid")
	hContentType   = []byte("contenttype")
	hSchemaVersion = []byte("schemaversion")
	hSource        = []byte("source")
	hSubject       = []byte("subject")
	hTime          = []byte("time")

	hCESpec          = []byte("ce_specversion")
	hCEID            = []byte("ce_id")
	hCESource        = []byte("ce_source")
	hCEType          = []byte("ce_type")
	hCESubject       = []byte("ce_subject")
	hCETime          = []byte("ce_time")
	hCESchemaVersion = []byte("ce_schemaversion")
	hHTTPContentType = []byte("content-type")

	valueString    = []byte("string")
	valueTrue      = []byte("true")
	specVersion    = []byte("1.0")
	jsonType       = []byte("application/json")
	structuredType = []byte("application/cloudevents+json; charset=UTF-8")
	noBytes        = []byte{}
)

// Filler fills records for one goroutine. Its buffers hold what a record needs beyond the envelope's own bytes; each Fill
// takes them over, so a filled record is valid until the next Fill and as long as the envelope's bytes.
type Filler struct {
	preset   *Preset
	buf      []byte
	headers  []record.Header
	nsBuf    []byte
	nsHashes map[string][]byte // namespace to its hash
}

// Filler makes a Filler.
func (p *Preset) Filler() *Filler {
	return &Filler{preset: p, nsHashes: make(map[string][]byte), headers: make([]record.Header, 0, 16), buf: make([]byte, 0, 512)}
}

// Fill makes rec the record of v for target. For a further target of the same envelope it is enough to change rec's Topic
// and Partition. The error is a [*record.Refusal] (Malformed) for a payload that cannot be written as JSON.
func (f *Filler) Fill(v *event.View, m *Meta, target Target, rec *record.Record) error {
	f.buf, f.headers = f.buf[:0], f.headers[:0]
	rec.Topic, rec.Partition = target.Topic, target.Partition
	rec.Key = v.OrderingKey()
	rec.TimeMS = commitMS(m)
	if err := f.setValue(v, rec); err != nil {
		return err
	}
	f.addIdentityHeaders(v, m)
	switch {
	case f.preset.name == Typed:
		f.addHeader(hType, v.Type)
	case f.preset.name == Plain:
		f.addPlainHeaders(v)
	case f.preset.name == CloudEvents && f.preset.structured && rec.Value != nil:
		if err := f.setStructuredValue(v, m, rec); err != nil {
			return err
		}
	case f.preset.name == CloudEvents:
		f.addCloudEventsHeaders(v, m)
	}
	f.addConfiguredHeaders(v)
	for it := v.Headers.Iter(); it.Next(); {
		f.addHeader(it.Key, it.Value)
	}
	rec.Headers = f.headers
	return nil
}

// commitMS is N12: the record's timestamp is when the envelope was committed, by the server's clock, never the event's own
// time or a client's, which could be born past the topic's retention.
func commitMS(m *Meta) int64 {
	if m.CommitMS != 0 {
		return m.CommitMS
	}
	return int64(m.ClusterTime.T) * 1000
}

// setValue sets the payload: bytes and strings as they are, a document as relaxed Extended JSON, null as a tombstone.
func (f *Filler) setValue(v *event.View, rec *record.Record) error {
	switch bson.Type(v.PayloadType) {
	case bson.TypeNull:
		rec.Value = nil
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		start := len(f.buf)
		buf, err := event.AppendPayload(f.buf, v)
		if err != nil {
			return asRefusal(err)
		}
		f.buf = buf
		rec.Value = buf[start:len(buf):len(buf)]
	default:
		if rec.Value = v.Payload; rec.Value == nil {
			rec.Value = noBytes
		}
	}
	return nil
}

// addIdentityHeaders adds the headers by which a read-back knows a delivery again, id first (N7).
func (f *Filler) addIdentityHeaders(v *event.View, m *Meta) {
	start := len(f.buf)
	f.buf = v.AppendID(f.buf)
	f.addHeader(hID, f.buf[start:])
	if v.AmbiguousID() {
		f.addHeader(hIDType, valueString)
	}
	if m.MultiCollection {
		f.addHeader(hNS, f.namespaceHash(m))
	}
	if v.Delivery > 0 {
		start = len(f.buf)
		f.buf = strconv.AppendInt(f.buf, int64(v.Delivery), 10)
		f.addHeader(hDelivery, f.buf[start:])
	}
	if m.Redelivered {
		f.addHeader(hRedelivered, valueTrue)
	}
	if m.Only != nil {
		f.addHeader(hOnly, m.Only)
	}
}

func (f *Filler) namespaceHash(m *Meta) []byte {
	f.nsBuf = append(append(append(f.nsBuf[:0], m.DB...), '.'), m.Coll...)
	if h, ok := f.nsHashes[string(f.nsBuf)]; ok {
		return h
	}
	if len(f.nsHashes) >= MaxCached {
		clear(f.nsHashes)
	}
	h := NamespaceHash(string(f.nsBuf))
	f.nsHashes[string(f.nsBuf)] = h[:]
	return h[:]
}

// NamespaceHash is the value of the header outrelay-ns: the first 8 bytes of the SHA-256 of "database.collection".
func NamespaceHash(ns string) [8]byte {
	sum := sha256.Sum256([]byte(ns))
	return [8]byte(sum[:8])
}

func (f *Filler) addPlainHeaders(v *event.View) {
	f.addHeader(hType, v.Type)
	f.addHeader(hAggregateType, v.AggregateType)
	f.addHeader(hAggregateID, v.AggregateID)
	f.addOptionalHeader(hContentType, v.ContentType)
	f.addOptionalHeader(hSchemaVersion, v.SchemaVersion)
	f.addOptionalHeader(hSource, v.Source)
	f.addOptionalHeader(hSubject, v.Subject)
	if v.HasTime {
		f.addHeader(hTime, f.formatTime(v.Time))
	}
}

// addConfiguredHeaders adds the headers of the configuration.
func (f *Filler) addConfiguredHeaders(v *event.View) {
	for i := range f.preset.headers {
		h := &f.preset.headers[i]
		value := h.text
		if value == nil {
			start := len(f.buf)
			f.buf = h.value.appendTo(f.buf, v)
			value = f.buf[start:]
		}
		if len(value) > 0 {
			f.addHeader(h.name, value)
		}
	}
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

// asRefusal is the error of event.AppendPayload as a refusal, which it is already for all that is known to go wrong.
func asRefusal(err error) error {
	var refusal *record.Refusal
	if errors.As(err, &refusal) {
		return refusal
	}
	return &record.Refusal{Class: record.Malformed, Reason: "payload: " + err.Error()}
}
