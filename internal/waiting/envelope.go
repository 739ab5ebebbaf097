package waiting

import (
	"context"
	"fmt"
	"math"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// stored has the fields of an exception, or of a claimed envelope, that decide about its delivery.
type stored struct {
	state, pos, origin string
	claim              string   // token of the claim of a scheduled envelope
	pending            []string // nil if the envelope does not list its targets
	delivery           int32
}

// readStored reads the fields of raw. A field of another type counts as missing.
func readStored(raw bson.Raw) (s stored) {
	s.state, _ = raw.Lookup("state").StringValueOK()
	s.pos, _ = raw.Lookup("pos").StringValueOK()
	s.origin, _ = raw.Lookup("origin").StringValueOK()
	s.claim, _ = raw.Lookup("claim", "token").StringValueOK()
	n, _ := raw.Lookup("delivery").AsInt64OK()
	s.delivery = int32(min(max(n, 0), math.MaxInt32))

	// An empty list means the same as no list.
	list, _ := raw.Lookup("pending").ArrayOK()
	topics, _ := list.Values()
	for _, v := range topics {
		if topic, ok := v.StringValueOK(); ok {
			s.pending = append(s.pending, topic)
		}
	}
	return s
}

// isOfStream reports whether the envelope is an exception of the stream, whose order includes the events of the stream.
func (s *stored) isOfStream() bool {
	switch s.origin {
	case outboxes.OriginScheduled, outboxes.OriginRequeue, outboxes.OriginReplay:
		return false
	}
	return true
}

// eachStored calls take for each envelope of the dirty collections that read finds. e and its bytes are valid only
// during the call.
func (x *Exceptions) eachStored(
	ctx context.Context,
	read func(ctx context.Context, coll *mongo.Collection, p slot.Range, take func(bson.Raw) error) error,
	take func(c outboxes.Outbox, e *outboxes.Envelope, s stored) error,
) error {
	for _, c := range x.config.Collections() {
		e := outboxes.Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		err := read(ctx, mongodb.Database(x.config.Client, c.DB).Collection(c.Coll), c.Slot, func(raw bson.Raw) error {
			e.Raw = raw
			return take(c, &e, readStored(raw))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// isSameDelivery reports whether an envelope is still the one that was published: it has that delivery, and
// it is an exception or, if claim is not empty, has that claim.
func isSameDelivery(raw bson.Raw, claim string, delivery int32) bool {
	s := readStored(raw)
	if claim != "" {
		return s.claim == claim && s.state == "" && s.delivery == delivery
	}
	return (s.state == "retry" || s.state == "blocked" || s.state == "parked") && s.delivery == delivery
}

// exceptionFields are the fields of an exception or of a claim. A finished envelope has none of them.
var exceptionFields = []string{
	"state", "pos", "pending", "attempts", "nextAt", "lastError", "history", "claim", "origin", "dueAt", "redelivered",
}

// removeException returns the envelope without the fields of an exception and of a claim. It renames
// `dueAt` to `scheduledFor`.
func removeException(raw bson.Raw) (bson.Raw, error) {
	elems, err := raw.Elements()
	if err != nil {
		return nil, fmt.Errorf("reading an envelope: %w", err)
	}

	kept := make(bson.D, 0, len(elems))
	for _, e := range elems {
		name := e.Key()
		if name == "dueAt" {
			name = "scheduledFor"
		}
		if slices.Contains(exceptionFields, name) {
			continue
		}
		kept = append(kept, bson.E{Key: name, Value: e.Value()})
	}
	return bson.Marshal(kept)
}

// storedKey returns the canonical text of the ordering key of a document. An exception has it in the field key. A
// scheduled envelope has it in the mapped field.
func storedKey(m *envelope.Mapping, raw bson.Raw) string {
	var v envelope.View
	if m != nil && m.Parse(raw, &v) == nil {
		return string(v.OrderingKey())
	}
	return keyText(raw.Lookup("key"), raw.Lookup("aggregateid"))
}

// keyText returns the canonical text of the ordering key: of key, or of aggregateID if key is missing
// or empty.
func keyText(key, aggregateID bson.RawValue) string {
	for _, v := range []bson.RawValue{key, aggregateID} {
		text := envelope.CanonicalText(v)
		if text == "" && v.Type != bson.TypeString && v.Type != bson.TypeNull {
			// No key may have this type. The envelope becomes a dead letter.
			text = string(v.Value)
		}
		if text != "" {
			return text
		}
	}
	return ""
}
