package deadletter

import (
	"fmt"
	"math"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// maxEnvelopeBytes is what a document may hold, less what a requeue adds to an envelope.
const maxEnvelopeBytes = 16<<20 - 4<<10

// droppedFields are the fields of an envelope that tell of an earlier delivery, or are given anew.
var droppedFields = map[string]bool{
	"state": true, "pos": true, "pending": true, "attempts": true, "nextAt": true, "lastError": true, "history": true, "claim": true,
	"origin": true, "redelivered": true, "delivery": true, "sentAt": true, "sent": true, "replayOf": true, "only": true, "ts": true, "dueAt": true,
	"seal": true,
}

// envelopeBuilder makes envelopes that are delivered again out of letters.
type envelopeBuilder struct {
	now  time.Time // of the server
	ignoreExpiry bool      // also those that have expired: they lose their expiry
	seal []byte    // of the state database, see [store.Registry.Seal]
}

// buildEnvelope is the envelope of a letter as it goes back to its outbox: exactly one that waits for a retry (N18), its times
// the server's. ts is zero for the server to stamp. A *RefusedError says why the letter cannot be delivered as it is.
func (a envelopeBuilder) buildEnvelope(d *Dead, delivery int32) (bson.D, error) {
	if problem := describeDefect(d.Envelope); problem != "" {
		return nil, &RefusedError{d.ID, problem + "; edit it"}
	}
	var v event.View
	if err := event.Parse(d.Envelope, &v); err != nil {
		return nil, &RefusedError{d.ID, err.Error() + "; edit it"}
	}
	expired := v.HasExpiresAt && v.ExpiresAt <= a.now.UnixMilli()
	if expired && !a.ignoreExpiry {
		return nil, &RefusedError{d.ID, "it has expired; say that expiry is to be ignored, or edit it"}
	}
	elems, err := d.Envelope.Elements()
	if err != nil {
		return nil, fmt.Errorf("reading the envelope of %s: %w", d.ID, err)
	}
	doc := make(bson.D, 0, len(elems)+10)
	for _, e := range elems {
		name, value := e.Key(), e.Value()
		switch {
		case name == "dueAt" && v.HasDueAt: // it has been due: a document with dueAt would be scheduled again
			name = "scheduledFor"
			doc = slices.DeleteFunc(doc, func(e bson.E) bool { return e.Key == name })
		case droppedFields[name], name == "expiresAt" && expired, name == "key" && v.Key == nil, name == "scheduledFor" && v.HasDueAt:
			continue
		}
		doc = append(doc, bson.E{Key: name, Value: value})
	}
	if v.Key == nil {
		doc = append(doc, bson.E{Key: "key", Value: string(v.OrderingKey())})
	}
	doc = append(doc,
		bson.E{Key: "ts", Value: bson.Timestamp{}},
		bson.E{Key: "state", Value: event.StateRetry},
		bson.E{Key: "attempts", Value: int32(0)},
		bson.E{Key: "nextAt", Value: bson.NewDateTimeFromTime(a.now)},
		bson.E{Key: "pos", Value: d.exceptionPosition(v.TS)},
		bson.E{Key: "origin", Value: store.OriginRequeue},
		bson.E{Key: "delivery", Value: delivery},
		bson.E{Key: "replayOf", Value: d.ID.String()},
		bson.E{Key: "seal", Value: a.seal},
	)
	if d.Source.Kind == FromHandler { // N18: other groups have dealt with it
		doc = append(doc, bson.E{Key: "only", Value: d.Source.Group + "/" + d.Source.Handler})
	}
	return doc, nil
}

// describeDefect says what keeps the bytes of a letter from being an envelope at all, or "".
func describeDefect(raw bson.Raw) string {
	elems, err := raw.Elements()
	switch {
	case err != nil:
		return "its envelope is broken"
	case len(elems) <= 1:
		return "only its id is left"
	case len(raw) > maxEnvelopeBytes:
		return fmt.Sprintf("its envelope has %d bytes, more than fit a document with what a requeue adds", len(raw))
	}
	return ""
}

// exceptionPosition is where the letter stands among the exceptions of its key: at its event of the stream, else at the server's
// stamp of its insert, else at the moment it died.
func (d *Dead) exceptionPosition(ts bson.Timestamp) string {
	switch {
	case d.Pos != "":
		return d.Pos
	case ts.T > 0:
		return store.PosAt(ts)
	}
	return store.PosAt(bson.Timestamp{T: uint32(min(max(d.MovedAt.Unix(), 0), math.MaxUint32))})
}

// outboxEntry is what the outbox holds under the id of a letter.
type outboxEntry struct {
	active   bool // an exception, or scheduled
	markedSent     bool // and marked as such
	delivery int32
}

func newOutboxEntry(raw bson.Raw) *outboxEntry {
	present := func(field string) bool {
		v, err := raw.LookupErr(field)
		return err == nil && v.Type != bson.TypeNull
	}
	return &outboxEntry{active: present("state") || present("dueAt") || present("claim"), markedSent: present("sentAt"), delivery: readDelivery(raw)}
}

// nextDelivery is the delivery that the letter is requeued as, given what the outbox holds under its id (nil: nothing). Only what is
// known to be over may be overwritten:
//   - an exception or a scheduled envelope is a delivery that goes on;
//   - one that is marked as sent is over;
//   - one without a mark is over if a handler gave the letter up, for it was consumed; but where the relay gave it up the
//     envelope had left the outbox with that, so this is another one of the same id, which the stream may still bring.
func (h *outboxEntry) nextDelivery(d *Dead) (int32, error) {
	delivery := d.ID.Delivery
	if h != nil {
		switch {
		case h.active:
			return 0, &RefusedError{d.ID, "the outbox holds a delivery of it that goes on; wait until it is sent or dead"}
		case !h.markedSent && d.Source.Kind != FromHandler:
			return 0, &RefusedError{d.ID, "the outbox holds another envelope of the same id; discard the letter if that one stands for it"}
		}
		delivery = max(delivery, h.delivery)
	}
	if delivery == math.MaxInt32 {
		return 0, &RefusedError{d.ID, "its count of deliveries is spent"}
	}
	return delivery + 1, nil
}
