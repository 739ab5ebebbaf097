package reconciler

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// sentEnvelope is a waiting envelope of which an earlier owner has sent records.
type sentEnvelope struct {
	doc    *waiting.Document
	topics []string        // that it waits for
	hits   []record.Result // the places of these records
	stamp  bson.Timestamp  // of the envelope in its outbox
}

// orderScope is the scope within which envelopes keep their order in a topic.
type orderScope struct{ ns, topic, key string }

// FinishSent finishes waiting envelopes whose records an earlier owner has sent, so that
// they are not sent again (N8). Call it at a takeover, after the read-back, before Load and before
// anything is published. After it has returned without an error, the offsets of the read-back may be
// released. It returns the number of envelopes that it finished in some of their topics. The memory is bounded by the
// envelopes that the earlier owner had in flight.
func (x *Sender) FinishSent(ctx context.Context) (finished int, err error) {
	// Usually the read-back has found nothing, or nothing in the topics for which envelopes wait.
	topics := x.config.Outlet.TopicsWithHits()
	if len(topics) == 0 {
		return 0, nil
	}

	var sent []sentEnvelope
	err = x.config.Store.EachWithoutPayload(ctx, topics, func(document *waiting.Document) error {
		hits, all := x.config.Outlet.FindHits(envelopeOf(document))
		if len(hits) == 0 {
			return nil
		}

		doc := *document
		doc.ID, doc.Envelope = mongodb.CloneValue(document.ID), nil
		envelope := sentEnvelope{doc: &doc, topics: document.Pending, hits: hits, stamp: outboxes.Stamp(document.Envelope)}
		if envelope.topics == nil {
			envelope.topics = all
		}
		sent = append(sent, envelope)
		return nil
	})
	if err != nil {
		return 0, err
	}

	if err := x.dropOvertakingHits(ctx, topics, sent); err != nil {
		return 0, err
	}

	var batch []*ledger.Outcome
	for _, s := range sent {
		if len(s.hits) > 0 {
			outcome := x.config.Ledger.Decide(s.doc, s.topics, s.hits)
			outcome.Stamp = s.stamp
			outcome.Recorded = outcome.Recorded && !x.isOwed(s.doc)
			batch = append(batch, outcome)
		}
	}
	n := len(batch)
	if n == 0 {
		return 0, nil
	}
	if err := x.config.Ledger.Store(ctx, batch); err != nil {
		return 0, fmt.Errorf("finishing envelopes that an earlier owner sent: %w", err)
	}
	return n, nil
}

// envelopeOf returns the envelope of document for the outlet.
func envelopeOf(document *waiting.Document) *outboxes.Envelope {
	envelope := outboxes.NewEnvelope(document.NS, document.Envelope)
	envelope.Delivery, envelope.StreamMS, envelope.Pending = document.Delivery, document.StreamMS, document.Pending
	// The number is of this document only: the stream and a sweep do not have it.
	envelope.Pos = outboxes.PosWithoutNumber(document.Pos)
	return &envelope
}

// dropOvertakingHits removes a hit in a compacted topic if an earlier envelope of the same key was not
// found. Compaction may have removed the record of the earlier envelope, which is then sent again. The
// later envelope has to follow it once more (N10).
func (x *Sender) dropOvertakingHits(ctx context.Context, topics []string, sent []sentEnvelope) error {
	// The lowest position without a record, for the keys that have hits in compacted topics.
	missing := map[orderScope]string{}
	for _, s := range sent {
		for _, h := range s.hits {
			if x.config.Compacted(h.Topic) {
				missing[orderScope{s.doc.NS, h.Topic, s.doc.Key}] = ""
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}

	err := x.config.Store.EachWithoutPayload(ctx, topics, func(document *waiting.Document) error {
		for _, topic := range document.Pending {
			scope := orderScope{document.NS, topic, document.Key}
			lowest, matters := missing[scope]
			if !matters || lowest != "" && document.Pos >= lowest {
				continue
			}
			envelope := envelopeOf(document)
			envelope.Pending = []string{topic}
			if hits, _ := x.config.Outlet.FindHits(envelope); len(hits) == 0 {
				missing[scope] = document.Pos
			}
		}
		return nil
	})
	if err != nil {
		return err
	}

	for i := range sent {
		document := sent[i].doc
		sent[i].hits = slices.DeleteFunc(sent[i].hits, func(result record.Result) bool {
			lowest := missing[orderScope{document.NS, result.Topic, document.Key}]
			return lowest != "" && document.Pos > lowest
		})
	}
	return nil
}
