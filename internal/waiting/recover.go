package waiting

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/slot"
)

// sentEnvelope is an envelope of which an earlier owner has sent records, outside of the stream.
type sentEnvelope struct {
	delivery *Delivery
	hits     []record.Answer // the places of these records
}

// orderScope is the scope within which envelopes keep their order in a topic.
type orderScope struct{ ns, topic, key string }

// FindHits returns the places of the records of an envelope that a takeover found at the ends of partitions (N7), and all
// topics of the envelope. It looks for topics only; nil stands for all topics. The envelope has no payload.
type FindHits func(e *outboxes.Envelope, topics []string) (hits []record.Answer, all []string)

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

	read := func(ctx context.Context, coll *mongo.Collection, p slot.Range, take func(bson.Raw) error) error {
		return EachBehind(ctx, coll, p, after, take)
	}
	err = x.eachStored(ctx, read, func(c outboxes.Outbox, e *outboxes.Envelope, s stored) error {
		if s.origin != outboxes.OriginStream || s.pending == nil || !unsure(s.pos) {
			return nil
		}

		// An envelope that cannot be routed is rejected when its turn comes.
		all, err := x.config.Route(e)
		if err != nil {
			return nil //nolint:nilerr // see above
		}
		more := slices.DeleteFunc(slices.Clone(all), func(t string) bool { return slices.Contains(s.pending, t) })
		if len(more) == 0 {
			return nil
		}

		id := mongodb.CloneValue(e.Raw.Lookup("_id"))
		list = append(list, widening{NS: c.NS(), ID: id, Delivery: s.delivery, Topics: more})
		if len(list) < mongodb.MaxDocuments {
			return nil
		}
		return write()
	})
	if err != nil {
		return widened, err
	}
	return widened, write()
}

// FinishSent finishes exceptions and claimed envelopes whose records an earlier owner has sent, so that
// they are not sent again (N8, N19). Call it at a takeover, after the read-back, before Load and before
// anything is published. After it has returned without an error, the offsets of the read-back may be
// released. It returns the number of envelopes that it finished in some of their topics. The memory is bounded by the
// envelopes that the earlier owner had in flight.
func (x *Exceptions) FinishSent(ctx context.Context, find FindHits) (finished int, err error) {
	var sent []sentEnvelope
	err = x.eachStored(ctx, x.eachTaken, func(c outboxes.Outbox, e *outboxes.Envelope, s stored) error {
		if hits, all := find(e, s.pending); len(hits) > 0 {
			sent = append(sent, x.newSentEnvelope(c, e.Raw, s, hits, all))
		}
		return nil
	})
	if err != nil {
		return 0, err
	}

	if err := x.dropOvertakingHits(ctx, sent, find); err != nil {
		return 0, err
	}

	var batch []*decision
	for _, s := range sent {
		if len(s.hits) > 0 {
			a := &decision{Delivery: s.delivery}
			x.config.Finisher.decideFate(a, s.hits)
			batch = append(batch, a)
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

// eachTaken is [EachTaken] for the envelopes that are due now.
func (x *Exceptions) eachTaken(ctx context.Context, coll *mongo.Collection, p slot.Range, take func(bson.Raw) error) error {
	return EachTaken(ctx, coll, p, x.config.Now().Add(ClaimedAhead), take)
}

// newSentEnvelope returns the parts of the envelope raw that FinishSent needs. The result does not
// alias raw.
func (x *Exceptions) newSentEnvelope(
	c outboxes.Outbox, raw bson.Raw, s stored, hits []record.Answer, all []string,
) sentEnvelope {
	d := &Delivery{
		NS:      c.NS(),
		ID:      mongodb.CloneValue(raw.Lookup("_id")),
		Number:  s.delivery,
		Key:     storedKey(x.config.Mapping, raw),
		Pending: s.pending,
	}
	if d.Pending == nil {
		d.Pending = all
	}

	// Only an exception has a place in the order of its key, and it has no claim that counts.
	if s.state != "" {
		d.Pos = s.pos
	} else {
		d.Claim = s.claim
	}
	return sentEnvelope{d, hits}
}

// dropOvertakingHits removes a hit in a compacted topic if an earlier envelope of the same key was not
// found. Compaction may have removed the record of the earlier envelope, which is then sent again. The
// later envelope has to follow it once more (N10).
func (x *Exceptions) dropOvertakingHits(ctx context.Context, sent []sentEnvelope, find FindHits) error {
	// The lowest position without a record, for the keys that have hits in compacted topics.
	missing := map[orderScope]string{}
	for _, s := range sent {
		for _, h := range s.hits {
			if s.delivery.Pos != "" && x.config.Compacted(h.Topic) {
				missing[orderScope{s.delivery.NS, h.Topic, s.delivery.Key}] = ""
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}

	err := x.eachStored(ctx, x.eachTaken, func(c outboxes.Outbox, e *outboxes.Envelope, s stored) error {
		key := storedKey(x.config.Mapping, e.Raw)
		for _, topic := range s.pending {
			o := orderScope{c.NS(), topic, key}
			lowest, matters := missing[o]
			if lower := s.pos != "" && (lowest == "" || s.pos < lowest); !matters || !lower {
				continue
			}
			if hits, _ := find(e, []string{topic}); len(hits) == 0 {
				missing[o] = s.pos
			}
		}
		return nil
	})
	if err != nil {
		return err
	}

	for i := range sent {
		d := sent[i].delivery
		sent[i].hits = slices.DeleteFunc(sent[i].hits, func(h record.Answer) bool {
			lowest := missing[orderScope{d.NS, h.Topic, d.Key}]
			return lowest != "" && d.Pos > lowest
		})
	}
	return nil
}
