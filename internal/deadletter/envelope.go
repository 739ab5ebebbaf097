package deadletter

import (
	"fmt"
	"math"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// maxEnvelopeBytes is the size limit of a document, less the bytes that a requeue adds to an
// envelope.
const maxEnvelopeBytes = 16<<20 - 4<<10

// droppedFields are the fields of an envelope that describe an earlier delivery, or that a requeue
// sets to new values.
var droppedFields = map[string]bool{
	"attempts": true, "claim": true, "delivery": true, "dueAt": true, "history": true, "lastError": true, "nextAt": true,
	"origin": true, "pending": true, "pos": true, "redelivered": true, "replayOf": true, "seal": true, "sent": true,
	"sentAt": true, "state": true, "ts": true,
}

// envelopeBuilder builds the envelopes of a requeue from letters.
type envelopeBuilder struct {
	mapping      *envelope.Mapping
	now          time.Time // server time
	ignoreExpiry bool      // requeue expired envelopes without their expiry
	seal         []byte    // seal of the state database, see [outboxes.Registry.Seal]
}

// buildEnvelope returns the envelope of d as it is written back to its outbox. It looks like an
// envelope that waits for a retry (N18), with the server time. Its ts is zero, so that the server
// sets it. If d cannot be delivered as it is, buildEnvelope returns a *RefusedError.
func (b envelopeBuilder) buildEnvelope(d *Dead, delivery int32) (bson.D, error) {
	if defect := describeDefect(d.Envelope); defect != "" {
		return nil, &RefusedError{d.ID, defect + "; edit it"}
	}
	var v envelope.View
	if err := b.mapping.Parse(d.Envelope, &v); err != nil {
		fix := "; edit it"
		if _, err := envelope.ParseID(d.ID.ID.Type, d.ID.ID.Value); err != nil || v.IDType == 0 {
			fix = "; an id cannot be edited: append the event again with another id, and discard this letter"
		}
		return nil, &RefusedError{d.ID, err.Error() + fix}
	}

	expired := v.HasExpiresAt && v.ExpiresAt <= b.now.UnixMilli()
	if expired && !b.ignoreExpiry {
		return nil, &RefusedError{d.ID, "it has expired; ignore the expiry, or edit it"}
	}

	doc, err := b.copyFields(d, &v, expired)
	if err != nil {
		return nil, err
	}
	// Exceptions are ordered by the field key, so it is stored even if the key is the aggregate id.
	if textField(d.Envelope, "key") != string(v.OrderingKey()) {
		doc = append(doc, bson.E{Key: "key", Value: string(v.OrderingKey())})
	}
	// N18: the server replaces the zero timestamp, so retention counts from this delivery.
	return append(doc,
		bson.E{Key: "ts", Value: bson.Timestamp{}},
		bson.E{Key: "state", Value: envelope.StateRetry},
		bson.E{Key: "attempts", Value: int32(0)},
		bson.E{Key: "nextAt", Value: bson.NewDateTimeFromTime(b.now)},
		bson.E{Key: "pos", Value: d.exceptionPosition(v.TS)},
		bson.E{Key: "origin", Value: outboxes.OriginRequeue},
		bson.E{Key: "delivery", Value: delivery},
		bson.E{Key: "replayOf", Value: d.ID.String()},
		bson.E{Key: "seal", Value: b.seal},
	), nil
}

// copyFields returns the fields of the envelope that a requeue keeps.
func (b envelopeBuilder) copyFields(d *Dead, v *envelope.View, expired bool) (bson.D, error) {
	elems, err := d.Envelope.Elements()
	if err != nil {
		return nil, fmt.Errorf("reading the envelope of %s: %w", d.ID, err)
	}

	doc := make(bson.D, 0, len(elems)+10)
	// The envelope gets a new ts. Its first one stays known.
	if _, kept := d.Envelope.LookupErr("firstTs"); kept != nil && v.TS.T > 0 {
		doc = append(doc, bson.E{Key: "firstTs", Value: v.TS})
	}
	for _, e := range elems {
		name, value := e.Key(), e.Value()

		// The envelope was due before it died. With dueAt it would be scheduled again.
		if name == "dueAt" && v.HasDueAt {
			doc = slices.DeleteFunc(doc, func(e bson.E) bool { return e.Key == "scheduledFor" })
			doc = append(doc, bson.E{Key: "scheduledFor", Value: value})
			continue
		}

		expiryEnds := name == b.mapping.Name("expiresAt") && expired
		emptyKey := name == "key" && textField(d.Envelope, "key") != string(v.OrderingKey())
		oldSchedule := name == "scheduledFor" && v.HasDueAt
		if droppedFields[name] || expiryEnds || emptyKey || oldSchedule {
			continue
		}
		doc = append(doc, bson.E{Key: name, Value: value})
	}
	return doc, nil
}

// describeDefect returns why the bytes of a letter are not an envelope that fits the outbox, or ""
// if they are.
func describeDefect(raw bson.Raw) string {
	elems, err := raw.Elements()
	switch {
	case err != nil:
		return "its envelope is not valid BSON"
	case len(elems) <= 1:
		return "only its id is left"
	case len(raw) > maxEnvelopeBytes:
		return fmt.Sprintf("its envelope has %d bytes, and a requeue allows at most %d", len(raw), maxEnvelopeBytes)
	}
	return ""
}

// exceptionPosition returns the position of the letter among the exceptions of its key: that of its
// event in the stream. If d has none, it is made from ts, the timestamp of the insert, or else from
// the time at which the letter died.
func (d *Dead) exceptionPosition(ts bson.Timestamp) string {
	if d.Pos != "" {
		return d.Pos
	}
	if ts.T > 0 {
		return outboxes.PosAt(ts)
	}

	died := min(max(d.MovedAt.Unix(), 0), math.MaxUint32)
	return outboxes.PosAt(bson.Timestamp{T: uint32(died)})
}

// outboxEntry is the state of the envelope that the outbox contains under the id of a letter.
type outboxEntry struct {
	active     bool // an exception, or scheduled
	markedSent bool
	delivery   int32
}

func newOutboxEntry(raw bson.Raw) *outboxEntry {
	present := func(field string) bool {
		v, err := raw.LookupErr(field)
		return err == nil && v.Type != bson.TypeNull
	}
	return &outboxEntry{
		active:     present("state") || present("dueAt") || present("claim"),
		markedSent: present("sentAt"),
		delivery:   readDelivery(raw),
	}
}

// nextDelivery returns the delivery number with which d is requeued. h is the envelope in the
// outbox with the id of d, or nil if there is none. The requeue overwrites that envelope only if
// its delivery has ended. Otherwise nextDelivery returns a *RefusedError:
//   - An exception or a scheduled envelope is still to be delivered.
//   - An envelope that is marked as sent has ended.
//   - The relay removed the envelope of the letter. So an envelope without the mark is another one
//     with the same id, and the stream may still deliver it.
func (h *outboxEntry) nextDelivery(d *Dead) (int32, error) {
	delivery := d.ID.Delivery
	if h != nil {
		if h.active {
			return 0, &RefusedError{d.ID, "the outbox holds a delivery of it that goes on; wait until it is sent or dead"}
		}
		if !h.markedSent {
			return 0, &RefusedError{d.ID, "the outbox holds another envelope of the same id; " +
				"discard the dead letter if that envelope replaces it"}
		}
		delivery = max(delivery, h.delivery)
	}

	if delivery == math.MaxInt32 {
		return 0, &RefusedError{d.ID, "it has reached the highest delivery number"}
	}
	return delivery + 1, nil
}
