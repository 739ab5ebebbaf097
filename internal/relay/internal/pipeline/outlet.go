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

// NewOutlet returns an outlet that publishes to d.
func NewOutlet(c BuildConfig, d *Dispatcher) *Outlet {
	o := &Outlet{BuildConfig: c, dispatcher: d}
	o.pool.New = func() any { return &outgoing{recordBuilder: c.newBuilder()} }
	return o
}

// Publish implements reconciler.Outlet.
func (o *Outlet) Publish(
	ctx context.Context, e *outboxes.Envelope, topics []string, answer func(record.Published),
) error {
	w := o.pool.Get().(*outgoing)
	defer o.pool.Put(w)
	defer w.filler.Release()
	if err := w.mapping.Parse(e.Raw, &w.view); err != nil {
		return err
	}
	w.view.Delivery = e.Delivery
	now := o.Now()
	if err := w.checkExpiry(now); err != nil {
		return err
	}

	w.meta = routing.Meta{
		DB:          e.DB,
		Coll:        e.Coll,
		ClusterTime: e.TS,
		CommitMS:    now.UnixMilli(), // the record gets the time at which it is sent (N12)
		Redelivered: e.Redelivered,
	}
	var refused []record.Answer
	var err error
	if w.recs, refused, err = w.buildRecords(w.recs[:0], topics); err != nil {
		return err
	}
	// Without a record there is no delivery whose answers could contain the refusals.
	if len(w.recs) == 0 {
		return refused[0].Refusal
	}

	if len(refused) > 0 {
		forward := answer
		answer = func(p record.Published) {
			p.Answers = append(slices.Clone(p.Answers), refused...)
			forward(p)
		}
	}
	return o.dispatcher.Publish(ctx, w.recs, o.followAnswers(now, w, e, answer))
}

// RouteTopics returns the topics of an envelope that does not list its targets.
func (o *Outlet) RouteTopics(e *outboxes.Envelope) ([]string, error) {
	w := o.pool.Get().(*outgoing)
	defer o.pool.Put(w)
	if err := w.mapping.Parse(e.Raw, &w.view); err != nil {
		return nil, err
	}

	w.meta.DB, w.meta.Coll = e.DB, e.Coll
	targets, err := w.router.Route(&w.view, &w.meta, w.targets[:0])
	w.targets = targets
	if err != nil {
		return nil, err
	}
	topics := make([]string, len(targets))
	for i := range targets {
		topics[i] = targets[i].Topic
	}
	return topics, nil
}

// buildIdentities builds the records of an envelope for topics, or for all its topics if topics is
// nil. The records have the right identities and targets, but neither values nor headers. It
// returns false if the envelope has no records.
func (w *outgoing) buildIdentities(o *Outlet, e *outboxes.Envelope, topics []string) bool {
	if w.mapping.Parse(e.Raw, &w.view) != nil {
		return false
	}
	w.view.Delivery = e.Delivery

	w.meta = routing.Meta{DB: e.DB, Coll: e.Coll, CommitMS: 1}
	var err error
	var refused []record.Answer
	if w.recs, refused, err = w.buildRecords(w.recs[:0], topics); err != nil || len(w.recs) == 0 {
		return false
	}

	// An earlier owner may have sent the record to a refused topic while that topic was allowed.
	for _, a := range refused {
		rec := w.recs[0]
		rec.Topic = a.Topic
		rec.Partition = record.AnyPartition
		w.recs = append(w.recs, rec)
	}
	return true
}

// FindHits is the reconciler.Outlet.FindHits of the read-back.
func (o *Outlet) FindHits(e *outboxes.Envelope, topics []string) (hits []record.Answer, all []string) {
	w := o.pool.Get().(*outgoing)
	defer o.pool.Put(w)
	if !w.buildIdentities(o, e, topics) {
		return nil, nil
	}

	for i := range w.recs {
		all = append(all, w.recs[i].Topic)
		if tp, offset, ok := o.dispatcher.sink.FindHit(&w.recs[i]); ok {
			hits = append(hits, record.Answer{Topic: tp.Topic, Partition: tp.Partition, Offset: offset})
		}
	}
	return hits, all
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
	h := routing.NamespaceHash(ns)
	return string(h[:])
}

// Reached implements reconciler.Outlet.
func (o *Outlet) Reached() string {
	p, ok := o.dispatcher.Reached()
	if !ok {
		return ""
	}
	return outboxes.PosOf(p)
}

// followAnswers returns answer. If the delivery of e, whose records are in w, has a follower, the returned function
// reports the answers to the follower as well.
func (o *Outlet) followAnswers(
	now time.Time, w *outgoing, e *outboxes.Envelope, answer func(record.Published),
) func(record.Published) {
	d := o.follow(now, &w.view, w.recs, e.DB, e.Coll, 0)
	if d == nil {
		return answer
	}

	return func(p record.Published) {
		for _, a := range p.Answers {
			switch {
			case a.Refusal != nil:
				d.NotSent(a.Topic, string(a.Refusal.Class), true)
			case a.Held != nil:
				d.NotSent(a.Topic, "held", false)
			default:
				d.Acked(record.TopicPartition{Topic: a.Topic, Partition: a.Partition}, a.Offset)
			}
		}
		answer(p)
	}
}
