package waiting

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// Hit is a record of an envelope that a takeover found at the end of a partition (N7).
type Hit struct {
	Topic   string
	Targets []string // all topics of the envelope
	TP      record.TopicPartition
	Offset  int64
}

// sentEnvelope is an envelope of which an earlier owner has sent records, outside of the stream.
type sentEnvelope struct {
	delivery *Delivery
	key      string
	pos      string // empty if the envelope has no place in the order of its key
	hits     []Hit
}

// orderScope is the scope within which envelopes keep their order in a topic.
type orderScope struct{ ns, topic, key string }

// WidenIncomplete adds topics to exceptions that may be incomplete after a crash: an exception of the stream
// with a position above after for which unsure holds then waits for all topics that it routes to. Call
// it at a takeover before FinishSent. It returns the number of exceptions it changed.
//
// The previous owner wrote such an exception as soon as one of its topics could not be written. The
// records for its other topics may still have been queued when that owner died, and neither the stream
// nor a sweep sends an envelope that has a state. FinishSent then finds the topics that have the record.
func (x *Exceptions) WidenIncomplete(ctx context.Context, after string, unsure func(pos string) bool) (widened int, err error) {
	var list []widening
	write := func() error {
		if err := widenExceptions(ctx, x.config.Fencer, list); err != nil {
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
			list = append(list, widening{NS: c.NS(), ID: id, Delivery: int32(number), Topics: more})
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

// FinishSent finishes exceptions and claimed envelopes whose records an earlier owner has sent, so that
// they are not sent again (N8, N19). Call it at a takeover, after the read-back, before Load and before
// anything is published. After it has returned without an error, the offsets of the read-back may be
// released. It returns the number of envelopes that it finished in some of their topics.
//
// find returns the records of an envelope that were found in topics (nil: in all topics that it
// routes to). Its envelope has no payload. The memory is bounded by the envelopes that the earlier owner
// had in flight.
func (x *Exceptions) FinishSent(
	ctx context.Context, find func(e *outboxes.Envelope, topics []string) []Hit,
) (finished int, err error) {
	var sent []sentEnvelope
	err = x.eachTaken(ctx, func(c outboxes.Outbox, e *outboxes.Envelope) {
		topics := stringArray(e.Raw.Lookup("pending"))
		if len(topics) == 0 {
			topics = nil
		}
		if hits := find(e, topics); len(hits) > 0 {
			sent = append(sent, x.newSentEnvelope(c, e.Raw, hits))
		}
	})
	if err != nil {
		return 0, err
	}

	if err := x.dropOvertakingHits(ctx, sent, find); err != nil {
		return 0, err
	}

	var batch []*decision
	for i := range sent {
		if len(sent[i].hits) > 0 {
			batch = append(batch, x.decideFromHits(&sent[i]))
		}
	}
	if len(batch) == 0 {
		return 0, nil
	}
	if err := x.config.Finisher.writeBatch(ctx, batch); err != nil {
		return 0, fmt.Errorf("finishing envelopes that an earlier owner sent: %w", err)
	}
	return len(batch), nil
}

// eachTaken calls take for each envelope of the collections that an earlier owner may have sent: see [EachTaken].
func (x *Exceptions) eachTaken(ctx context.Context, take func(c outboxes.Outbox, e *outboxes.Envelope)) error {
	for _, c := range x.config.Collections() {
		e := outboxes.Envelope{DB: []byte(c.DB), Coll: []byte(c.Coll)}
		coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
		err := EachTaken(ctx, coll, c.Part, x.config.Now().Add(Lookahead), func(raw bson.Raw) error {
			e.Raw = raw
			take(c, &e)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// newSentEnvelope returns the parts of the envelope raw that FinishSent needs. The result does not
// alias raw.
func (x *Exceptions) newSentEnvelope(c outboxes.Outbox, raw bson.Raw, hits []Hit) sentEnvelope {
	pending := stringArray(raw.Lookup("pending"))
	if len(pending) == 0 {
		pending = hits[0].Targets
	}
	number, _ := raw.Lookup("delivery").AsInt64OK()
	d := &Delivery{NS: c.NS(), ID: mongodb.CloneValue(raw.Lookup("_id")), Number: int32(number), Pending: pending}
	// An exception has no claim that counts.
	if state, _ := raw.Lookup("state").StringValueOK(); state == "" {
		d.Claim, _ = raw.Lookup("claim", "token").StringValueOK()
	}

	pos, _ := raw.Lookup("pos").StringValueOK()
	return sentEnvelope{d, storedKey(x.config.Mapping, raw), pos, hits}
}

// dropOvertakingHits removes a hit in a compacted topic if an earlier envelope of the same key was not
// found. Compaction may have removed the record of the earlier envelope, which is then sent again. The
// later envelope has to follow it once more (N10).
func (x *Exceptions) dropOvertakingHits(
	ctx context.Context, sent []sentEnvelope, find func(e *outboxes.Envelope, topics []string) []Hit,
) error {
	// The lowest position without a record, for the keys that have hits in compacted topics.
	missing := map[orderScope]string{}
	for i := range sent {
		s := &sent[i]
		for _, h := range s.hits {
			if s.pos != "" && x.config.Compacted(h.Topic) {
				missing[orderScope{s.delivery.NS, h.Topic, s.key}] = ""
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}

	err := x.eachTaken(ctx, func(c outboxes.Outbox, e *outboxes.Envelope) {
		key := storedKey(x.config.Mapping, e.Raw)
		pos, _ := e.Raw.Lookup("pos").StringValueOK()
		for _, topic := range stringArray(e.Raw.Lookup("pending")) {
			o := orderScope{c.NS(), topic, key}
			lowest, matters := missing[o]
			lower := pos != "" && (lowest == "" || pos < lowest)
			if matters && lower && len(find(e, []string{topic})) == 0 {
				missing[o] = pos
			}
		}
	})
	if err != nil {
		return err
	}

	for i := range sent {
		s := &sent[i]
		s.hits = slices.DeleteFunc(s.hits, func(h Hit) bool {
			lowest := missing[orderScope{s.delivery.NS, h.Topic, s.key}]
			return lowest != "" && s.pos > lowest
		})
	}
	return nil
}

// decideFromHits returns the decision that follows from the hits of an envelope.
func (x *Exceptions) decideFromHits(s *sentEnvelope) *decision {
	answers := make([]record.Answer, len(s.hits))
	for i, h := range s.hits {
		answers[i] = record.Answer{Topic: h.Topic, Partition: h.TP.Partition, Offset: h.Offset}
	}
	// A claimed envelope becomes an exception that waits for its other topics, and needs its key.
	if len(answers) < len(s.delivery.Pending) {
		s.delivery.Key = s.key
	}

	a := &decision{Delivery: s.delivery}
	x.config.Finisher.decideFate(a, answers)
	return a
}
