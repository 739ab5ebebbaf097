package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

const (
	// maxAttempts is the number of attempts to write a record that the broker rejects. After the last one, the event becomes
	// a dead letter.
	maxAttempts = 3

	// retryAfter is the delay of a relay before it tries again.
	retryAfter = 10 * time.Millisecond
)

// Relay delivers the committed events of an outbox to the topics of a Broker in commit order. It
// creates the same records for the same topics as the real relay. Events that were appended before
// it runs are delivered too. An outbox must have one relay at a time.
//
// Scheduled events are delivered at their due time. Expired
// events and events that the broker rejects become dead letters. After any other error of an
// injected Fault, the relay waits until the outage is over, and keeps the order.
type Relay struct {
	box     *outboxStore
	broker  *Broker
	mapping *envelope.Mapping // nil: the documents are envelopes of the contract
	router  *routing.Router
	filler  *routing.Filler

	// deliveryMu is held while an event is delivered. It protects sent.
	deliveryMu sync.Mutex
	sent       map[event.ID][]string // topics of an event that have its record or reject it, until none is left

	mu   sync.Mutex
	dead []DeadLetter
}

// DeadLetter is an event that could not be delivered, or not to one of its topics.
type DeadLetter struct {
	// ID and Type identify the event.
	ID   event.ID
	Type string

	// Topic rejects the record. It is "" if the event is in none of its topics.
	Topic string

	// Class is the class as in the collection of dead letters, such as "expired", "record_rejected"
	// or "malformed".
	Class string

	// Reason is a text for operators.
	Reason string
}

// NewRelay returns a relay. It does nothing until Flush or Run is called. preset sets the headers and values of the records, as
// record.preset in the configuration of the relay. The error reports a nil argument or an invalid one.
func NewRelay(box *outbox.Box, broker *Broker, routes routing.Config, preset string) (*Relay, error) {
	store := storeOf(box)
	if store == nil || broker == nil {
		return nil, errors.New("relay: pass a broker of NewBroker and an outbox of NewOutbox")
	}

	// NewMapping cannot fail: the names of a preset are valid.
	mapping, _ := envelope.NewMapping(routing.FieldNames(preset, envelope.Names{}))
	routes.Mapping = mapping
	if routes.Template == "" {
		routes.Template = routing.TemplateOf(preset)
	}
	router, err := routing.New(routes)
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	records, err := routing.NewPreset(routing.PresetConfig{Name: preset, Mapping: mapping})
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	return &Relay{box: store, broker: broker, mapping: mapping, router: router, filler: records.Filler(), sent: map[event.ID][]string{}}, nil
}

// DeadLetters returns the events that could not be delivered, in the order of their failures.
func (r *Relay) DeadLetters() []DeadLetter {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.dead)
}

// Flush delivers all events that are committed and due. It returns nil when there are no more. If
// an event cannot be delivered because of an outage, it returns the error, and the next call begins
// with that event.
func (r *Relay) Flush(ctx context.Context) error {
	r.deliveryMu.Lock()
	defer r.deliveryMu.Unlock()

	for {
		more, err := r.deliverNext(ctx)
		if err != nil || !more {
			return err
		}
	}
}

// Pending returns the number of events that are committed and due, and not delivered yet.
func (r *Relay) Pending(ctx context.Context) (n int, err error) {
	err = r.box.db.runAlone(ctx, func(tx *tx) error {
		n = r.box.feed.countPending()
		for _, e := range rowsOf[*outboxEntry](tx, r.box.rows) {
			if !e.fields.dueAt.IsZero() && !e.fields.dueAt.After(time.Now()) {
				n++
			}
		}
		return nil
	})
	return n, err
}

// Run delivers events until ctx ends. Then it delivers the events that were committed before, and
// returns nil. If that fails, it returns the error, and the events stay in the outbox.
func (r *Relay) Run(ctx context.Context) error {
	for {
		// Read before the attempt, so that no change after it is missed.
		changed := r.broker.Changed()
		err := r.Flush(ctx)
		if ctx.Err() != nil {
			return r.Flush(context.WithoutCancel(ctx))
		}

		// Changes of the broker matter only after a failure.
		if err == nil {
			changed = nil
		}
		r.waitForWork(ctx, err, changed)
	}
}

// waitForWork blocks until there may be events to deliver: after a commit, at the next due time,
// after a change of the broker, or if the last attempt has failed, after retryAfter.
func (r *Relay) waitForWork(ctx context.Context, failed error, brokerChanged <-chan struct{}) {
	wake, ok := r.nextDueTime(ctx)
	if failed != nil {
		wake = time.Now().Add(retryAfter)
		ok = true
	}

	var reached <-chan time.Time
	if ok {
		timer := time.NewTimer(time.Until(wake))
		defer timer.Stop()
		reached = timer.C
	}

	select {
	case <-r.box.feed.wake:
	case <-reached:
	case <-brokerChanged:
	case <-ctx.Done():
	}
}

// nextDueTime returns the time of the next scheduled event, and whether there is one.
func (r *Relay) nextDueTime(ctx context.Context) (dueAt time.Time, ok bool) {
	// This cannot fail: a read has no conflicts.
	_ = r.box.db.runAlone(ctx, func(tx *tx) error {
		ok = false
		for _, e := range rowsOf[*outboxEntry](tx, r.box.rows) {
			if !e.fields.dueAt.IsZero() && (!ok || e.fields.dueAt.Before(dueAt)) {
				dueAt = e.fields.dueAt
				ok = true
			}
		}
		return nil
	})
	return dueAt, ok
}

// deliverNext delivers one event: first the committed ones, then the scheduled ones that are due.
// It returns false if there is none.
func (r *Relay) deliverNext(ctx context.Context) (bool, error) {
	if envelope, ok := r.box.feed.firstPending(); ok {
		if err := r.deliverEvent(ctx, envelope.outboxEntry, envelope.at); err != nil {
			return true, err
		}

		// Only a delivered event leaves the feed. After an error, the next call begins with it.
		r.box.feed.removeFirst()
		r.broker.notify()
		return true, nil
	}

	// The committed events come first: a scheduled event has no order with them.
	entry, err := r.claimDue(ctx)
	if err != nil || entry == nil {
		return false, err
	}
	if err := r.deliverEvent(ctx, entry, time.Now()); err != nil {
		return true, err
	}

	return true, r.box.db.runAlone(ctx, func(tx *tx) error { return tx.putRow(r.box.rows, mustKey(entry.id), nil) })
}

// claimDue claims the scheduled event that is due first, or returns nil. A claimed event can
// neither be canceled nor rescheduled. If a claimed event was not delivered, it is claimed again.
func (r *Relay) claimDue(ctx context.Context) (found *outboxEntry, err error) {
	now := time.Now()
	err = r.box.db.runAlone(ctx, func(tx *tx) error {
		found = nil
		for _, e := range rowsOf[*outboxEntry](tx, r.box.rows) {
			isDue := !e.fields.dueAt.IsZero() && !e.fields.dueAt.After(now)
			if isDue && (found == nil || compareDue(e, found) < 0) {
				found = e
			}
		}

		// An event that was claimed before was not delivered, and needs no second claim.
		if found == nil || found.claimed {
			return nil
		}

		claimed := *found
		claimed.claimed = true
		found = &claimed
		return tx.putRow(r.box.rows, mustKey(claimed.id), &claimed)
	})

	return found, err
}

// deliverEvent writes the records of an event, or makes it a dead letter. An error means that the
// event must be tried again.
func (r *Relay) deliverEvent(ctx context.Context, entry *outboxEntry, sentAt time.Time) error {
	err := r.sendRecords(ctx, entry, sentAt)
	var rejection *record.Rejection
	switch {
	case err == nil:
	// A rule discards the event, so it counts as delivered.
	case errors.As(err, &rejection) && rejection.Class == record.Dropped:
	case errors.As(err, &rejection):
		r.addDeadLetter(entry, "", rejection.Class, rejection.Reason)
	default:
		return fmt.Errorf("delivering event %s: %w", entry.id, err)
	}

	delete(r.sent, entry.id)
	return nil
}

// addDeadLetter records that an event could not be delivered.
func (r *Relay) addDeadLetter(entry *outboxEntry, topic string, class record.Class, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.dead = append(r.dead, DeadLetter{ID: entry.id, Type: entry.fields.typ, Topic: topic, Class: string(class), Reason: reason})
}

// sendRecords writes the record of each topic that has neither the record nor rejected it. A topic that rejects it gets a dead letter,
// and does not keep the record from the others.
func (r *Relay) sendRecords(ctx context.Context, entry *outboxEntry, sentAt time.Time) error {
	if moment := entry.fields.expiresAt; !moment.IsZero() && !time.Now().Before(moment) {
		return &record.Rejection{Class: record.Expired, Reason: "expired at " + moment.Format(time.RFC3339)}
	}

	var view envelope.View
	if err := r.mapping.Parse(entry.doc, &view); err != nil {
		return err
	}

	meta := routing.Meta{
		DB:          []byte("memory"),
		Coll:        []byte(r.box.rows.name),
		ClusterTime: bson.Timestamp{T: uint32(sentAt.Unix()), I: 1},
		CommitMS:    sentAt.UnixMilli(),
	}
	targets, err := r.router.Route(&view, &meta, nil)
	if err != nil {
		return err
	}

	for _, target := range targets {
		// An earlier attempt may have reached some of the topics.
		if slices.Contains(r.sent[entry.id], target.Topic) {
			continue
		}

		var rec record.Record
		if err := r.filler.Fill(&view, &meta, target, &rec); err != nil {
			return err
		}
		err := r.writeRecord(ctx, &rec)
		if errors.Is(err, errRejected) {
			r.addDeadLetter(entry, target.Topic, record.AttemptsExhausted, err.Error())
		} else if err != nil {
			return err
		}

		r.sent[entry.id] = append(r.sent[entry.id], target.Topic)
	}

	return nil
}

// writeRecord writes a record. If the broker rejects it, writeRecord tries again, and returns the error of the last attempt.
func (r *Relay) writeRecord(ctx context.Context, rec *record.Record) (err error) {
	for range maxAttempts {
		if err = r.broker.writeRecord(ctx, rec.Topic, toBrokerRecord(rec), rec.Partition); !errors.Is(err, errRejected) {
			return err
		}
	}
	return err
}

// toBrokerRecord returns a record that shares the bytes of rec. The broker copies them.
func toBrokerRecord(rec *record.Record) *transport.Record {
	record := &transport.Record{Key: rec.Key, Value: rec.Value, Time: time.UnixMilli(rec.TimeMS)}
	for _, h := range rec.Headers {
		record.Headers = append(record.Headers, event.Header{Key: string(h.Key), Value: h.Value})
	}
	return record
}
