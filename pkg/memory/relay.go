package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	// DefaultAttempts is how often a relay tries a record that the broker refuses, before it is a dead letter.
	DefaultAttempts = 3
	// retryAfter is how long a relay waits, by the database's clock, until it tries again.
	retryAfter = 10 * time.Millisecond
)

// Relay brings what is committed to an Outbox to the topics of a Broker, in commit order, with the records and the topics
// that the real relay would make. What was appended before it runs is there when it does. One relay at a time serves an
// outbox.
//
// Scheduled events are delivered when the database's clock has reached their time; expired ones and those that the broker
// refuses become dead letters. An outage of the broker (any other error of an injected Fault) is waited out, in order.
type Relay struct {
	box      *Outbox
	broker   *Broker
	attempts int
	routes   routing.Config
	record   routing.PresetConfig
	router   *routing.Router
	filler   *routing.Filler

	one  sync.Mutex            // held while something is delivered
	sent map[event.ID][]string // the topics that have an event which others of its topics have not

	mu   sync.Mutex
	dead []DeadLetter
}

// DeadLetter is an event that could not be delivered.
type DeadLetter struct {
	ID     event.ID
	Type   string
	Class  string // as in the collection of dead letters: "expired", "record_refused", "malformed"…
	Reason string
}

// RelayOption configures a Relay.
type RelayOption func(*Relay)

// WithTopics sets the template of the topics' names, in which {aggregatetype} and {type} are filled in. Defaults to
// "outbox.event.{aggregatetype}".
func WithTopics(template string) RelayOption { return func(r *Relay) { r.routes.Template = template } }

// WithRoute sends events of an aggregate type and a type, both patterns with * and ?, "" for any, to those topics. The
// first that matches decides.
func WithRoute(aggregateType, typ string, to ...string) RelayOption {
	return func(r *Relay) {
		r.routes.Rules = append(r.routes.Rules, routing.Rule{AggregateType: aggregateType, Type: typ, To: to})
	}
}

// WithPreset sets the shape of the records, as record.preset does in the relay's configuration, with the same default:
// "typed", "debezium", "cloudevents" or "plain".
func WithPreset(name string) RelayOption { return func(r *Relay) { r.record.Name = name } }

// WithAttempts sets how often a record that the broker refuses is tried. Defaults to DefaultAttempts.
func WithAttempts(n int) RelayOption { return func(r *Relay) { r.attempts = n } }

// NewRelay makes a relay; it does nothing until it runs.
func NewRelay(box *Outbox, broker *Broker, opts ...RelayOption) (*Relay, error) {
	if box == nil || broker == nil {
		return nil, errors.New("relay: an outbox and a broker are needed")
	}
	r := &Relay{
		box: box, broker: broker, attempts: DefaultAttempts,
		sent: map[event.ID][]string{},
	}
	for _, o := range opts {
		o(r)
	}
	if r.attempts < 1 {
		return nil, fmt.Errorf("relay: %d attempts; at least 1 is needed", r.attempts)
	}
	var err error
	if r.router, err = routing.New(r.routes); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	preset, err := routing.NewPreset(r.record)
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	r.filler = preset.Filler()
	return r, nil
}

// DeadLetters are the events that could not be delivered, in the order of their failing.
func (r *Relay) DeadLetters() []DeadLetter {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.dead)
}

// Flush delivers what is committed and due now, and returns when there is no more or something cannot be delivered: then
// it returns why, and that event is the next one.
func (r *Relay) Flush(ctx context.Context) error {
	r.one.Lock()
	defer r.one.Unlock()
	for {
		more, err := r.next(ctx)
		if err != nil || !more {
			return err
		}
	}
}

// Run delivers until ctx ends. Then it delivers what was committed before, and returns nil, or why that could not be
// delivered: it stays in the outbox.
func (r *Relay) Run(ctx context.Context) error {
	for {
		r.broker.mu.Lock()
		healed := r.broker.changed
		r.broker.mu.Unlock()
		err := r.Flush(ctx)
		if ctx.Err() != nil {
			return r.Flush(context.WithoutCancel(ctx))
		}
		if err == nil {
			healed = nil
		}
		r.wait(ctx, err, healed)
	}
}

// wait returns when there may be something to do.
func (r *Relay) wait(ctx context.Context, failed error, healed <-chan struct{}) {
	clock := r.box.db.clock
	wake, ok := r.due(ctx)
	if failed != nil {
		wake, ok = clock.Now().Add(retryAfter), true
	}
	var reached <-chan struct{}
	if ok {
		var stop func()
		reached, stop = clock.At(wake)
		defer stop()
	}
	select {
	case <-r.box.feed.more:
	case <-reached:
	case <-healed:
	case <-ctx.Done():
	}
}

// due is when the next scheduled event is.
func (r *Relay) due(ctx context.Context) (at time.Time, ok bool) {
	_ = r.box.db.alone(ctx, func(t *tx) error { // a read that nothing stands in the way of
		ok = false
		t.scan(r.box.rows, func(_ string, v any) {
			if e := v.(*envelope); !e.ev.dueAt.IsZero() && (!ok || e.ev.dueAt.Before(at)) {
				at, ok = e.ev.dueAt, true
			}
		})
		return nil
	})
	return at, ok
}

// next delivers one event; false says that there is none.
func (r *Relay) next(ctx context.Context) (bool, error) {
	if e, ok := r.box.feed.first(); ok {
		if err := r.deliver(ctx, e.envelope, e.at); err != nil {
			return true, err
		}
		r.box.feed.delivered()
		return true, nil
	}
	e, err := r.claim(ctx)
	if err != nil || e == nil {
		return false, err
	}
	if err := r.deliver(ctx, e, r.box.db.clock.Now()); err != nil {
		return true, err
	}
	return true, r.box.db.alone(ctx, func(t *tx) error { return t.put(r.box.rows, mustKey(e.id), nil) })
}

// claim takes the scheduled event that is due first; from then on it can be neither cancelled nor moved. An event that was
// claimed and not delivered is claimed again.
func (r *Relay) claim(ctx context.Context) (found *envelope, err error) {
	now := r.box.db.clock.Now()
	err = r.box.db.alone(ctx, func(t *tx) error {
		found = nil
		t.scan(r.box.rows, func(_ string, v any) {
			e := v.(*envelope)
			if e.ev.dueAt.IsZero() || e.ev.dueAt.After(now) {
				return
			}
			if found == nil || comparePlace(placeOf(e), placeOf(found)) < 0 {
				found = e
			}
		})
		if found == nil || found.claim {
			return nil
		}
		mine := *found
		mine.claim, found = true, &mine
		return t.put(r.box.rows, mustKey(mine.id), &mine)
	})
	return found, err
}

// deliver writes the records of an event, or makes it a dead letter. An error says that it is to be tried again.
func (r *Relay) deliver(ctx context.Context, e *envelope, at time.Time) error {
	for failed := 1; ; failed++ {
		err := r.send(ctx, e, at)
		var refusal *record.Refusal
		switch {
		case err == nil:
		case errors.As(err, &refusal):
			r.bury(e, string(refusal.Class), refusal.Reason)
		case errors.Is(err, ErrRefused) && failed < r.attempts:
			continue
		case errors.Is(err, ErrRefused):
			r.bury(e, string(record.AttemptsExhausted), err.Error())
		default:
			return fmt.Errorf("delivering event %s: %w", e.id, err)
		}
		delete(r.sent, e.id)
		return nil
	}
}

func (r *Relay) bury(e *envelope, class, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dead = append(r.dead, DeadLetter{ID: e.id, Type: e.ev.typ, Class: class, Reason: reason})
}

// send writes the record of each topic that does not have it yet.
func (r *Relay) send(ctx context.Context, e *envelope, at time.Time) error {
	if x := e.ev.expiresAt; !x.IsZero() && !r.box.db.clock.Now().Before(x) {
		return &record.Refusal{Class: record.Expired, Reason: "it was to be delivered before " + x.Format(time.RFC3339)}
	}
	var v event.View
	if err := event.Parse(e.doc, &v); err != nil {
		return err
	}
	targets, err := r.router.Route(&v, nil)
	if err != nil {
		return err
	}
	meta := routing.Meta{
		DB: []byte("memory"), Coll: []byte(r.box.collection),
		ClusterTime: bson.Timestamp{T: uint32(at.Unix()), I: 1}, CommitMS: at.UnixMilli(),
	}
	for _, target := range targets {
		if slices.Contains(r.sent[e.id], target.Topic) {
			continue
		}
		var rec record.Record
		if err := r.filler.Fill(&v, &meta, target, &rec); err != nil {
			return err
		}
		if err := r.broker.write(ctx, target.Topic, messageOf(&rec), rec.Partition); err != nil {
			return err
		}
		r.sent[e.id] = append(r.sent[e.id], target.Topic)
	}
	return nil
}

// messageOf shares the record's bytes; the broker copies them.
func messageOf(rec *record.Record) *consumer.Message {
	m := &consumer.Message{Key: rec.Key, Value: rec.Value, Time: time.UnixMilli(rec.TimeMS)}
	for _, h := range rec.Headers {
		m.Headers = append(m.Headers, consumer.Header{Key: string(h.Key), Value: h.Value})
	}
	return m
}
