package waiting

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/pkg/event"
)

// Hit is a record of ours that a takeover found at the end of a partition (N7).
type Hit struct {
	NSHash   *[8]byte // of the namespace; nil if the watcher has one collection
	ID       string   // canonical text
	StringID bool     // the id is a string although its text reads like another type
	Delivery int32
	Topic    string
	Targets  []string // all topics of an envelope that does not list its targets; nil if unknown
	TP       record.TopicPartition
	Offset   int64

	// FindHits sets these. pos is empty if the envelope has no place in the order of its key.
	order orderScope
	pos   string
}

// orderScope is the scope within which envelopes keep their order in a topic.
type orderScope struct{ ns, topic, key string }

// WidenIncomplete adds topics to exceptions that may be incomplete after a crash: an exception of the stream
// with a position above after for which unsure holds then waits for all topics that it routes to. Call
// it at a takeover before FindHits. It returns the number of exceptions it changed.
//
// The previous owner wrote such an exception as soon as one of its topics could not be written. The
// records for its other topics may still have been queued when that owner died, and neither the stream
// nor a sweep sends an envelope that has a state. FindHits then finds the topics that have the record.
func (x *Exceptions) WidenIncomplete(ctx context.Context, after string, unsure func(pos string) bool) (widened int, err error) {
	var list []Wider
	write := func() error {
		if err := WidenExceptions(ctx, x.config.Finisher.config.Fencer, list); err != nil {
			return err
		}
		widened += len(list)
		list = list[:0]
		return nil
	}

	for _, c := range x.config.Collections() {
		e := outboxes.Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
		err := EachBehind(ctx, coll, c.Part, after, func(raw bson.Raw) error {
			e.Raw = raw
			pos, _ := raw.Lookup("pos").StringValueOK()
			origin, _ := raw.Lookup("origin").StringValueOK()
			pending := stringArray(raw.Lookup("pending"))
			if origin != outboxes.OriginStream || len(pending) == 0 || !unsure(pos) {
				return nil
			}

			// An envelope that cannot be routed is rejected when its turn comes.
			all, err := x.config.Route(&e)
			if err != nil {
				return nil //nolint:nilerr // see above
			}

			more := slices.DeleteFunc(slices.Clone(all), func(t string) bool { return slices.Contains(pending, t) })
			if len(more) == 0 {
				return nil
			}

			number, _ := raw.Lookup("delivery").AsInt64OK()
			id := mongodb.CloneValue(raw.Lookup("_id"))
			list = append(list, Wider{NS: c.NS(), ID: id, Delivery: int32(number), Topics: more})
			if len(list) < mongodb.MaxDocuments {
				return nil
			}
			return write()
		})
		if err != nil {
			return widened, err
		}
	}
	return widened, write()
}

// FindHits returns, for FinishHits, the hits of envelopes that an earlier owner may have sent outside of the
// stream. find returns the records of an envelope that were found in topics (nil: in all topics that it
// routes to). Its envelope has no payload. The size of the result is bounded by the envelopes that the
// earlier owner had in flight.
func (x *Exceptions) FindHits(ctx context.Context, find func(e *outboxes.Envelope, topics []string) []Hit) ([]Hit, error) {
	var hits []Hit
	for _, c := range x.config.Collections() {
		e := outboxes.Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		hash := routing.NamespaceHash(c.NS())
		coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
		err := EachTaken(ctx, coll, c.Part, x.config.Now().Add(Lookahead), func(raw bson.Raw) error {
			e.Raw = raw
			topics := stringArray(raw.Lookup("pending"))
			if len(topics) == 0 {
				topics = nil
			}

			for _, h := range find(&e, topics) {
				h.NSHash = (*[8]byte)(hash[:8])
				h.order, h.pos = placeOf(x.config.Mapping, c, raw, h.Topic)
				hits = append(hits, h)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return x.dropOvertakingHits(ctx, hits, find)
}

// placeOf returns the scope in which an envelope keeps its order, and its position there.
func placeOf(m *envelope.Mapping, c outboxes.Outbox, raw bson.Raw, topic string) (orderScope, string) {
	pos, _ := raw.Lookup("pos").StringValueOK()
	return orderScope{c.NS(), topic, storedKey(m, raw)}, pos
}

// dropOvertakingHits removes a hit in a compacted topic if an earlier envelope of the same key was not
// found. Compaction may have removed the record of the earlier envelope, which is then sent again. The
// later envelope has to follow it once more (N10).
func (x *Exceptions) dropOvertakingHits(
	ctx context.Context, hits []Hit, find func(e *outboxes.Envelope, topics []string) []Hit,
) ([]Hit, error) {
	// The lowest position without a record, for the keys that have hits in compacted topics.
	missing := map[orderScope]string{}
	for i := range hits {
		h := &hits[i]
		if h.pos != "" && x.config.Compacted(h.Topic) {
			missing[h.order] = ""
		}
	}
	if len(missing) == 0 {
		return hits, nil
	}

	for _, c := range x.config.Collections() {
		e := outboxes.Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
		err := EachTaken(ctx, coll, c.Part, x.config.Now().Add(Lookahead), func(raw bson.Raw) error {
			e.Raw = raw
			for _, topic := range stringArray(raw.Lookup("pending")) {
				o, pos := placeOf(x.config.Mapping, c, raw, topic)
				lowest, matters := missing[o]
				lower := pos != "" && (lowest == "" || pos < lowest)
				if matters && lower && len(find(&e, []string{topic})) == 0 {
					missing[o] = pos
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}

	return slices.DeleteFunc(hits, func(h Hit) bool {
		lowest := missing[h.order]
		return lowest != "" && h.pos > lowest
	}), nil
}

// recoverAtOnce is the number of ids in one query.
const recoverAtOnce = 500

// FinishHits finishes exceptions and claimed envelopes whose records an earlier owner has sent, so that
// they are not sent again (N8, N19). Call it at a takeover, after the read-back, before Load and before
// anything is published. After it has returned without an error, the offsets of the read-back may be
// released.
//
// FinishHits leaves the hits that are of no exception to the stream. It finishes an envelope that does not
// list its targets only if Route returns them. Otherwise the sink finds the records when the envelope
// is sent again.
func (x *Exceptions) FinishHits(ctx context.Context, hits []Hit) (finished int, err error) {
	if len(hits) == 0 {
		return 0, nil
	}

	for _, c := range x.config.Collections() {
		byID := hitsByID(c.NS(), hits)
		ids := make([]bson.RawValue, 0, len(byID))
		for _, h := range byID {
			ids = append(ids, h[0].idValue())
		}

		for part := range slices.Chunk(ids, recoverAtOnce) {
			n, err := x.recoverIDs(ctx, c, part, byID)
			finished += n
			if err != nil {
				return finished, fmt.Errorf("finishing envelopes that an earlier owner sent: %w", err)
			}
		}
	}
	return finished, nil
}

// hitsByID returns the hits that may belong to the collection ns, by the map key of their id.
func hitsByID(ns string, hits []Hit) map[string][]*Hit {
	hash := routing.NamespaceHash(ns)
	byID := map[string][]*Hit{}
	for i := range hits {
		h := &hits[i]
		if h.NSHash != nil && *h.NSHash != [8]byte(hash[:8]) {
			continue
		}

		id := IDKey(h.idValue())
		byID[id] = append(byID[id], h)
	}
	return byID
}

// idValue returns the id as it is stored in the outbox.
func (h *Hit) idValue() bson.RawValue {
	id := event.ParseID(h.ID)
	if h.StringID {
		id = event.NewID(h.ID)
	}

	kind, val, err := id.MarshalBSONValue()
	if err != nil {
		return bson.RawValue{Type: bson.TypeNull}
	}
	return bson.RawValue{Type: bson.Type(kind), Value: val}
}

// recoverIDs finishes the envelopes of c with the given ids, as far as hits have their records. It
// returns the number of envelopes it wrote.
func (x *Exceptions) recoverIDs(
	ctx context.Context, c outboxes.Outbox, ids []bson.RawValue, hits map[string][]*Hit,
) (int, error) {
	var batch []*decision
	coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
	err := mongodb.FetchMany(ctx, coll, ids, func(raw bson.Raw) error {
		if a := x.decideFromHits(c, raw, hits[IDKey(raw.Lookup("_id"))]); a != nil {
			batch = append(batch, a)
		}
		return nil
	})
	if err != nil || len(batch) == 0 {
		return 0, err
	}

	return len(batch), x.config.Finisher.writeBatch(ctx, batch)
}

// decideFromHits returns the decision that follows from the hits of an envelope, or nil if none does.
func (x *Exceptions) decideFromHits(c outboxes.Outbox, raw bson.Raw, hits []*Hit) *decision {
	// An envelope with neither a state nor a claim is left to the stream, or is not claimed yet.
	claim, _ := raw.Lookup("claim", "token").StringValueOK()
	state, _ := raw.Lookup("state").StringValueOK()
	if state == "" && claim == "" {
		return nil
	}
	if state != "" {
		claim = ""
	}

	number, _ := raw.Lookup("delivery").AsInt64OK()
	if !SameDelivery(raw, claim, int32(number)) {
		return nil
	}

	pending := stringArray(raw.Lookup("pending"))
	if len(pending) == 0 {
		pending = hits[0].Targets
	}
	if len(pending) == 0 {
		e := outboxes.Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll), Raw: raw}
		list, err := x.config.Route(&e)
		if err != nil || len(list) == 0 {
			return nil
		}
		pending = slices.Clone(list)
	}

	d := &Delivery{
		NS:      c.NS(),
		ID:      mongodb.CloneValue(raw.Lookup("_id")),
		Number:  int32(number),
		Claim:   claim,
		Pending: pending,
	}
	var answers []record.Answer
	for _, t := range pending {
		for _, h := range hits {
			if h.Topic == t && h.Delivery == d.Number {
				answers = append(answers, record.Answer{Topic: t, Partition: h.TP.Partition, Offset: h.Offset})
				break
			}
		}
	}
	if len(answers) == 0 {
		return nil
	}

	// A claimed envelope becomes an exception that waits for its other topics, and needs its key.
	if len(answers) < len(pending) {
		d.Key = storedKey(x.config.Mapping, raw)
	}

	a := &decision{Delivery: d}
	x.config.Finisher.decideFate(a, answers)
	return a
}
