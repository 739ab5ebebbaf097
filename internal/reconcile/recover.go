package reconcile

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// Hit is a record of ours that a take-over found in the tail of a partition (N7).
type Hit struct {
	NSHash   *[8]byte // of the namespace; nil where the watcher has one collection
	ID       string   // canonical text
	StringID bool     // the id is a string although its text reads like another type
	Delivery int32
	Topic    string
	Targets  []string // all that an envelope that does not list its targets goes to; nil if that is not known
	TP       record.TopicPartition
	Offset   int64

	order orderScope // of a hit that Find has collected
	pos   string     // likewise; empty if it has no place in the order of its key
}

// orderScope is the scope within which envelopes keep their order in a topic.
type orderScope struct{ ns, topic, key string }

// Widen lets exceptions of the stream for which unsure holds by their position wait for all topics that they route to; it
// asks for none at or below after. Call it at a take-over before Find. Such an exception was written as soon as one of its
// topics could not be had; what became of the others was known to the earlier owner alone: they may be queued still when it
// dies, and neither the stream nor a sweep sends an envelope that has a state. Those that have it are then found by Find.
func (x *Exceptions) Widen(ctx context.Context, after string, unsure func(pos string) bool) (widened int, err error) {
	x.ensureInit()
	if x.Route == nil {
		return 0, nil
	}
	var list []store.Wider
	write := func() error {
		if err := store.WidenExceptions(ctx, x.Finisher.config.Fencer, list); err != nil {
			return err
		}
		widened += len(list)
		list = list[:0]
		return nil
	}
	for _, c := range x.Collections() {
		e := Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		err := store.EachBehind(ctx, x.Client.Database(c.DB).Collection(c.Coll), c.Part, after, func(raw bson.Raw) error {
			e.Raw = raw
			pos, _ := raw.Lookup("pos").StringValueOK()
			origin, _ := raw.Lookup("origin").StringValueOK()
			pending := stringArray(raw.Lookup("pending"))
			if origin != store.OriginStream || len(pending) == 0 || !unsure(pos) {
				return nil
			}
			all, err := x.Route(&e)
			if err != nil {
				return nil //nolint:nilerr // it is judged when its turn comes
			}
			more := slices.DeleteFunc(slices.Clone(all), func(t string) bool { return slices.Contains(pending, t) })
			if len(more) == 0 {
				return nil
			}
			number, _ := raw.Lookup("delivery").AsInt64OK()
			list = append(list, store.Wider{NS: c.NS(), ID: copyValue(raw.Lookup("_id")), Delivery: int32(number), Topics: more})
			if len(list) < store.MaxExceptions {
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

// Disown frees the scheduled envelopes with claims of this epoch or a later one. Call it at a take-over, before anything is
// claimed: then they are of another life of the watcher document, whose epochs have begun anew since, and nobody else would
// ever have them (N19).
func (x *Exceptions) Disown(ctx context.Context) error {
	x.ensureInit()
	epoch := x.Finisher.config.Epoch
	for _, c := range x.Collections() {
		coll := x.Client.Database(c.DB).Collection(c.Coll)
		ids, err := store.StrayClaims(ctx, coll, epoch, x.Now().Add(lookahead), c.Part)
		if err != nil {
			return err
		}
		if len(ids) == 0 {
			continue
		}
		if err := store.DisownClaims(ctx, x.Finisher.config.Fencer, coll, epoch, ids); err != nil {
			return err
		}
		x.Log.Warn("scheduled envelopes bear claims of a watcher document that is no more; they are sent now", "collection", c.NS(), "envelopes", len(ids))
	}
	return nil
}

// Find collects the hits of what an earlier owner may have sent outside of the stream's order, for Recover: found tells which
// records of an envelope, for those topics (nil: all that it routes to), stand where. The envelope has no payload. What it
// returns grows with what the earlier owner had sent and not written down, which is bounded.
func (x *Exceptions) Find(ctx context.Context, found func(e *Envelope, topics []string) []Hit) ([]Hit, error) {
	x.ensureInit()
	var hits []Hit
	for _, c := range x.Collections() {
		e := Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		hash := routing.NamespaceHash(c.NS())
		err := store.EachTaken(ctx, x.Client.Database(c.DB).Collection(c.Coll), c.Part, x.Now().Add(lookahead), func(raw bson.Raw) error {
			e.Raw = raw
			topics := stringArray(raw.Lookup("pending"))
			if len(topics) == 0 {
				topics = nil
			}
			for _, h := range found(&e, topics) {
				h.NSHash = (*[8]byte)(hash[:8])
				h.order, h.pos = placeOf(c, raw, h.Topic)
				hits = append(hits, h)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return x.dropOvertakingHits(ctx, hits, found)
}

// placeOf is the place of an envelope among those of its key in a topic.
func placeOf(c store.Outbox, raw bson.Raw, topic string) (orderScope, string) {
	pos, _ := raw.Lookup("pos").StringValueOK()
	return orderScope{c.NS(), topic, keyText(raw.Lookup("key"), raw.Lookup("aggregateid"))}, pos
}

// dropOvertakingHits leaves out what was found in a compacted topic behind an earlier envelope of its key that was not. Compaction may
// have removed the record of that one, which is sent again: the later one has to stand behind it once more (N10).
func (x *Exceptions) dropOvertakingHits(ctx context.Context, hits []Hit, found func(e *Envelope, topics []string) []Hit) ([]Hit, error) {
	missing := map[orderScope]string{} // the lowest position of what was not found, of the keys that matter
	for i := range hits {
		if h := &hits[i]; h.pos != "" && x.Compacted != nil && x.Compacted(h.Topic) {
			missing[h.order] = ""
		}
	}
	if len(missing) == 0 {
		return hits, nil
	}

	for _, c := range x.Collections() {
		e := Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		err := store.EachTaken(ctx, x.Client.Database(c.DB).Collection(c.Coll), c.Part, x.Now().Add(lookahead), func(raw bson.Raw) error {
			e.Raw = raw
			for _, topic := range stringArray(raw.Lookup("pending")) {
				o, pos := placeOf(c, raw, topic)
				lowest, matters := missing[o]
				if matters && pos != "" && (lowest == "" || pos < lowest) && len(found(&e, []string{topic})) == 0 {
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

// recoverAtOnce is how many ids are looked up at a time.
const recoverAtOnce = 500

// Recover finishes exceptions and claimed envelopes whose records an earlier owner had sent already, so that they are not sent again
// (N8, N19). Call it at a take-over, behind the read-back, before Load and before anything is published; the read-back's offsets may be
// given free when it has returned without an error. A hit that is of no exception is the stream's. An envelope that does
// not list its targets is finished only if Route tells them; another's are found by the sink when they are sent again.
func (x *Exceptions) Recover(ctx context.Context, hits []Hit) (finished int, err error) {
	x.ensureInit()
	if len(hits) == 0 {
		return 0, nil
	}
	for _, c := range x.Collections() {
		mine := hitsByID(c.NS(), hits)
		ids := make([]bson.RawValue, 0, len(mine))
		for _, h := range mine {
			ids = append(ids, h[0].idValue())
		}
		for len(ids) > 0 {
			part := ids[:min(len(ids), recoverAtOnce)]
			ids = ids[len(part):]
			n, err := x.recoverIDs(ctx, c, part, mine)
			finished += n
			if err != nil {
				return finished, fmt.Errorf("finishing what an earlier owner had sent: %w", err)
			}
		}
	}
	return finished, nil
}

// hitsByID sorts the hits that may be of a collection by their id.
func hitsByID(ns string, hits []Hit) map[string][]*Hit {
	hash := routing.NamespaceHash(ns)
	mine := map[string][]*Hit{}
	for i := range hits {
		h := &hits[i]
		if h.NSHash != nil && *h.NSHash != [8]byte(hash[:8]) {
			continue
		}
		id := idKey(h.idValue())
		mine[id] = append(mine[id], h)
	}
	return mine
}

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

func (x *Exceptions) recoverIDs(ctx context.Context, c store.Outbox, ids []bson.RawValue, hits map[string][]*Hit) (int, error) {
	var batch []*decision
	err := store.FetchMany(ctx, x.Client.Database(c.DB).Collection(c.Coll), ids, func(raw bson.Raw) error {
		if a := x.decideFromHits(c, raw, hits[idKey(raw.Lookup("_id"))]); a != nil {
			batch = append(batch, a)
		}
		return nil
	})
	if err != nil || len(batch) == 0 {
		return 0, err
	}
	return len(batch), x.Finisher.writeBatch(ctx, batch)
}

// decideFromHits is what the hits make of an envelope, nil for nothing.
func (x *Exceptions) decideFromHits(c store.Outbox, raw bson.Raw, hits []*Hit) *decision {
	claim, _ := raw.Lookup("claim", "token").StringValueOK()
	state, _ := raw.Lookup("state").StringValueOK()
	if state != "" {
		claim = ""
	} else if claim == "" {
		return nil // the stream's, or not yet taken
	}
	number, _ := raw.Lookup("delivery").AsInt64OK()
	if !store.SameDelivery(raw, claim, int32(number)) {
		return nil
	}
	pending := stringArray(raw.Lookup("pending"))
	if len(pending) == 0 {
		pending = hits[0].Targets
	}
	if len(pending) == 0 {
		if x.Route == nil {
			return nil
		}
		e := Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll), Raw: raw}
		list, err := x.Route(&e)
		if err != nil || len(list) == 0 {
			return nil
		}
		pending = slices.Clone(list)
	}
	d := &Delivery{NS: c.NS(), ID: copyValue(raw.Lookup("_id")), Number: int32(number), State: state, Claim: claim, Pending: pending}
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
	if len(answers) < len(pending) { // a claimed one becomes an exception that waits for the others
		d.Key = keyText(raw.Lookup("key"), raw.Lookup("aggregateid"))
	}
	a := &decision{Delivery: d}
	x.Finisher.decideFate(a, answers)
	return a
}
