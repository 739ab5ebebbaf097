package pipeline

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Outlet publishes envelopes that come from the collections instead of the stream. It implements
// reconciler.Outlet and is safe for concurrent use.
type Outlet struct {
	BuildConfig
	dispatcher *Dispatcher
	pool       sync.Pool // of *outgoing: the loops of the reconciler publish concurrently
}

// outgoing contains the buffers of one call of an Outlet.
type outgoing struct {
	recordBuilder
	recs []record.Record
}

// NewOutlet returns an outlet that publishes to dispatcher.
func NewOutlet(cfg BuildConfig, dispatcher *Dispatcher) *Outlet {
	outlet := &Outlet{BuildConfig: cfg, dispatcher: dispatcher}
	outlet.pool.New = func() any { return &outgoing{recordBuilder: cfg.newBuilder()} }
	return outlet
}

// Publish implements reconciler.Outlet.
func (o *Outlet) Publish(
	ctx context.Context, envelope *outboxes.Envelope, topics []string, report func(record.Published),
) error {
	outgoing := o.pool.Get().(*outgoing)
	defer o.pool.Put(outgoing)
	defer outgoing.filler.Release()
	if err := outgoing.mapping.Parse(envelope.Raw, &outgoing.view); err != nil {
		return err
	}
	outgoing.view.Delivery = envelope.Delivery
	now := o.Now()
	// An envelope whose delivery may have begun in time has not expired in these topics: a read-back will show whether it was sent.
	var begun []string
	expired := outgoing.checkExpiry(now)
	if expired != nil {
		if begun = o.findBegunTopics(envelope); len(begun) == 0 {
			return expired
		}
	}

	outgoing.meta = routing.Meta{
		DB:          envelope.DB,
		Coll:        envelope.Coll,
		ClusterTime: envelope.TS,
		CommitMS:    now.UnixMilli(), // the record gets the time at which it is sent (N12)
		Redelivered: envelope.Redelivered,
		Position:    envelope.Pos,
	}
	var rejected []record.Result
	var err error
	if outgoing.recs, rejected, err = outgoing.buildRecords(outgoing.recs[:0], topics); err != nil {
		return err
	}
	if expired != nil {
		for _, rec := range outgoing.recs {
			if !slices.Contains(begun, rec.Topic) {
				rejected = append(rejected, record.Result{Topic: rec.Topic, Partition: record.AnyPartition, Rejection: record.RejectionOf(expired)})
			}
		}
		outgoing.recs = slices.DeleteFunc(outgoing.recs, func(rec record.Record) bool { return !slices.Contains(begun, rec.Topic) })
	}
	// Topics that are not listed now may still get the envelope.
	if len(outgoing.recs) == 0 {
		report(record.Published{Results: rejected})
		return nil
	}

	if len(rejected) > 0 {
		forward := report
		report = func(published record.Published) {
			published.Results = append(slices.Clone(published.Results), rejected...)
			forward(published)
		}
	}
	publish := o.dispatcher.Publish
	if envelope.Unordered {
		publish = o.dispatcher.PublishUnordered
	}
	return publish(ctx, outgoing.recs, o.followResults(now, outgoing, envelope, report))
}

// RouteTopics returns the topics of an envelope that does not list its targets.
func (o *Outlet) RouteTopics(envelope *outboxes.Envelope) ([]string, error) {
	outgoing := o.pool.Get().(*outgoing)
	defer o.pool.Put(outgoing)
	if err := outgoing.mapping.Parse(envelope.Raw, &outgoing.view); err != nil {
		return nil, err
	}

	outgoing.meta.DB, outgoing.meta.Coll = envelope.DB, envelope.Coll
	targets, err := outgoing.router.Route(&outgoing.view, &outgoing.meta, outgoing.targets[:0])
	outgoing.targets = targets
	if err != nil {
		return nil, err
	}
	topics := make([]string, len(targets))
	for i := range targets {
		topics[i] = targets[i].Topic
	}
	return topics, nil
}

// buildIdentities returns the records of an envelope for its pending topics, with the identities that they have in the stream and out of
// the store, but without values and headers. They are valid until the next use of w. An envelope that cannot be routed has none.
func (w *outgoing) buildIdentities(envelope *outboxes.Envelope) []record.Record {
	if w.mapping.Parse(envelope.Raw, &w.view) != nil {
		return nil
	}
	w.view.Delivery = envelope.Delivery
	w.meta = routing.Meta{DB: envelope.DB, Coll: envelope.Coll, CommitMS: 1, Position: envelope.Pos}

	var err error
	if envelope.Pending == nil {
		w.recs, _, err = w.buildRecords(w.recs[:0], nil)
	} else {
		// Without headers and payload, rules may decide in another way. An earlier owner may also have sent the record under other rules.
		w.targets = w.targets[:0]
		for _, topic := range envelope.Pending {
			w.targets = append(w.targets, routing.Target{Topic: topic, Partition: record.AnyPartition})
		}
		w.recs, err = w.fillRecords(w.recs[:0])
	}
	if err != nil {
		return nil
	}

	for i := range w.recs {
		w.recs[i].Sent.StreamMS = envelope.StreamMS
	}
	return w.recs
}

// FindHits is the reconciler.Outlet.FindHits of the read-back.
func (o *Outlet) FindHits(envelope *outboxes.Envelope) (hits []record.Result, all []string) {
	outgoing := o.pool.Get().(*outgoing)
	defer o.pool.Put(outgoing)

	for _, rec := range outgoing.buildIdentities(envelope) {
		all = append(all, rec.Topic)
		if tp, offset, ok := o.dispatcher.sink.FindHit(&rec); ok {
			hits = append(hits, record.Result{Topic: tp.Topic, Partition: tp.Partition, Offset: offset})
		}
	}
	return hits, all
}

// findBegunTopics returns the pending topics of an envelope that may contain its record already.
func (o *Outlet) findBegunTopics(envelope *outboxes.Envelope) (topics []string) {
	outgoing := o.pool.Get().(*outgoing)
	defer o.pool.Put(outgoing)

	for _, rec := range outgoing.buildIdentities(envelope) {
		if o.dispatcher.sink.MayHold(&rec) {
			topics = append(topics, rec.Topic)
		}
	}
	return topics
}

// TopicsWithHits implements reconciler.Outlet.
func (o *Outlet) TopicsWithHits() []string { return o.dispatcher.sink.TopicsWithHits() }

// Settle implements reconciler.Outlet.
func (o *Outlet) Settle(tickets []record.Ticket) { o.dispatcher.Settle(tickets) }

// OpenGate implements reconciler.Outlet.
func (o *Outlet) OpenGate(ns, topic, key string) {
	o.dispatcher.OpenGate(o.RecordNamespace(ns), topic, key)
}

// ResumeKey implements reconciler.Outlet.
func (o *Outlet) ResumeKey(ns, topic, key string) {
	o.dispatcher.ResumeKey(o.RecordNamespace(ns), topic, key)
}

// Flush implements reconciler.Outlet.
func (o *Outlet) Flush() { o.dispatcher.Flush() }

// RecordNamespace returns the namespace ns in the form that records have, which is part of the
// names of gates (N7, N15).
func (o *Outlet) RecordNamespace(ns string) string {
	hash := routing.NamespaceHash(ns)
	return string(hash[:])
}

// Reached implements reconciler.Outlet.
func (o *Outlet) Reached() string {
	position, ok := o.dispatcher.Reached()
	if !ok {
		return ""
	}
	return outboxes.PosOf(position)
}

// followResults returns report. If the delivery of envelope, whose records are in outgoing, has a follower, the returned function
// reports the results to the follower as well.
func (o *Outlet) followResults(
	now time.Time, outgoing *outgoing, envelope *outboxes.Envelope, report func(record.Published),
) func(record.Published) {
	follower := o.follow(now, &outgoing.view, outgoing.recs, envelope.DB, envelope.Coll, 0)
	if follower == nil {
		return report
	}

	return func(published record.Published) {
		for _, a := range published.Results {
			switch {
			case a.Rejection != nil:
				follower.Rejected(a.Topic, string(a.Rejection.Class))
			case a.Held != nil:
				follower.NotSent(a.Topic, "held")
			default:
				follower.Acked(record.TopicPartition{Topic: a.Topic, Partition: a.Partition}, a.Offset)
			}
		}
		report(published)
	}
}
