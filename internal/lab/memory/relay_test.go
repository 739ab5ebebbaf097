package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// start is the time at which a bubble of synctest begins.
var start = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// kit contains everything that a service needs for one test.
type kit struct {
	t      *testing.T
	db     *DB
	box    *outbox.Box
	broker *Broker
	relay  *Relay
}

func newKit(t *testing.T) *kit {
	t.Helper()
	return newRoutedKit(t, routing.Config{}, "")
}

func newRoutedKit(t *testing.T, routes routing.Config, preset string) *kit {
	t.Helper()
	k := &kit{t: t, db: NewDB(), broker: NewBroker(0)}
	k.box = newOutbox(t, k.db)
	var err error
	if k.relay, err = NewRelay(k.box, k.broker, routes, preset); err != nil {
		t.Fatal(err)
	}
	return k
}

func (k *kit) append(events ...event.Event) {
	k.t.Helper()
	if err := k.db.Transaction(k.t.Context(), func(ctx context.Context) error { return k.box.Append(ctx, events...) }); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) schedule(ev event.Event, at time.Time) event.ID {
	k.t.Helper()
	if err := k.db.Transaction(k.t.Context(), func(ctx context.Context) error {
		_, err := k.box.Schedule(ctx, at, ev)
		return err
	}); err != nil {
		k.t.Fatal(err)
	}
	return ev.ID()
}

func (k *kit) flush() {
	k.t.Helper()
	if err := k.relay.Flush(k.t.Context()); err != nil {
		k.t.Fatal(err)
	}
}

// checkRecords compares the values of the records of a topic.
func (k *kit) checkRecords(topic string, values ...string) {
	k.t.Helper()
	if got := valuesOf(k.broker.Records(topic)); !slices.Equal(got, values) {
		k.t.Errorf("in %s: %v, want %v", topic, got, values)
	}
}

func valuesOf(list []transport.Record) []string {
	var got []string
	for _, r := range list {
		got = append(got, string(r.Value))
	}
	return got
}

func newOrder(id, value string, opts ...event.Option) event.Event {
	return event.New(event.Aggregate{Type: "order", ID: id}, "OrderPlaced", event.Bytes("", []byte(value)), opts...)
}

func TestRelayPublishesInTheOrderOfCommits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		no := errors.New("no")
		k.append(newOrder("o-1", "before the start"))
		if err := k.db.Transaction(t.Context(), func(ctx context.Context) error {
			_ = k.box.Append(ctx, newOrder("o-1", "rolled back"))
			return no
		}); !errors.Is(err, no) {
			t.Error(err)
		}

		// The transaction that commits first is delivered first, whichever appended first.
		if err := k.db.Transaction(t.Context(), func(ctx context.Context) error {
			if err := k.box.Append(ctx, newOrder("o-1", "committed last")); err != nil {
				return err
			}

			k.append(newOrder("o-1", "committed in between"))
			k.flush()
			return nil
		}); err != nil {
			t.Fatal(err)
		}

		k.flush()
		k.checkRecords("outbox.event.order", "before the start", "committed in between", "committed last")
		r := k.broker.Records("outbox.event.order")[0]
		if string(r.Key) != "o-1" || !r.Time.Equal(start) || r.Headers[0].Key != "id" {
			t.Errorf("%+v", r)
		}

		var names []string
		for _, h := range r.Headers {
			names = append(names, h.Key)
		}

		if want := []string{"id", "outrelay-ns", "type"}; !slices.Equal(names, want) {
			t.Errorf("headers %v, want %v", names, want)
		}
	})
}

func TestRelayRunsUntilItsContextEndsAndDrains(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		k.append(newOrder("o-1", "buffered before the start"))
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- k.relay.Run(ctx) }()
		synctest.Wait()
		k.append(newOrder("o-1", "while it runs"))
		synctest.Wait()
		k.checkRecords("outbox.event.order", "buffered before the start", "while it runs")
		// No record can be written when the context ends, but the committed events are still
		// delivered.
		outage := errors.New("the broker is away")
		k.broker.Inject(func(string, *transport.Record) Fault { return Fault{Err: outage} })
		k.append(newOrder("o-1", "in the outage"), newOrder("o-2", "too"))
		synctest.Wait()
		k.checkRecords("outbox.event.order", "buffered before the start", "while it runs")
		stop()
		if err := <-done; !errors.Is(err, outage) {
			t.Errorf("what could not be delivered is reported as %v", err)
		}

		k.broker.Inject(nil)
		k.flush()
		k.checkRecords("outbox.event.order", "buffered before the start", "while it runs", "in the outage", "too")
	})
}

func TestRelayWaitsAnOutageOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- k.relay.Run(ctx) }()
		// The detector of races does not recognize that synctest.Wait orders a later write after a read.
		var tries atomic.Int64
		k.broker.Inject(func(string, *transport.Record) Fault { tries.Add(1); return Fault{Err: errors.New("away")} })
		k.append(newOrder("o-1", "first"), newOrder("o-1", "second"))
		synctest.Wait()
		before := tries.Load()
		<-time.After(retryAfter)
		synctest.Wait()
		if after := tries.Load(); before == 0 || after <= before {
			t.Errorf("%d tries, then %d", before, after)
		}

		// The relay continues without help, in order.
		k.broker.Inject(nil)
		synctest.Wait()
		k.checkRecords("outbox.event.order", "first", "second")
		if dead := k.relay.DeadLetters(); len(dead) != 0 {
			t.Errorf("an outage spends attempts: %v", dead)
		}

		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestRelayFaults(t *testing.T) {
	t.Parallel()
	k := newKit(t)
	tries := 0
	k.broker.Inject(func(_ string, m *transport.Record) Fault {
		switch string(m.Value) {
		case "rejected":
			tries++
			return Fault{Err: errRejected}
		case "twice":
			return Fault{Duplicate: 1}
		}

		return Fault{}
	})

	bad := newOrder("o-1", "rejected")
	late := newOrder("o-1", "late", event.WithExpiry(start))
	k.append(bad, newOrder("o-1", "twice"), late, newOrder("o-1", "last"), newOrder("o-1", "nowhere", event.WithTopic("__consumer_offsets")))
	k.flush()
	k.checkRecords("outbox.event.order", "twice", "twice", "last")
	if tries != maxAttempts {
		t.Errorf("%d attempts, want %d", tries, maxAttempts)
	}

	var got []string
	for _, d := range k.relay.DeadLetters() {
		got = append(got, d.Class)
	}

	if want := []string{"attempts_exhausted", "expired", "not_allowed"}; !slices.Equal(got, want) || k.relay.DeadLetters()[0].ID != bad.ID() {
		t.Errorf("dead letters %v, want %v", got, want)
	}
}

// Each topic that rejects an event leaves a letter, and the others get the event.
func TestATopicThatRejectsAnEventStopsNoOther(t *testing.T) {
	t.Parallel()
	rule := routing.Rule{To: []string{"narrow", "wide", "closed"}}
	k := newRoutedKit(t, routing.Config{Rules: []routing.Rule{rule}}, "")
	tries, isAway := 0, true
	k.broker.Inject(func(topic string, _ *transport.Record) Fault {
		switch {
		case topic != "wide":
			tries++
			return Fault{Err: errRejected}
		case isAway:
			return Fault{Err: errors.New("away")}
		}
		return Fault{}
	})

	k.append(newOrder("o-1", "first"))
	if err := k.relay.Flush(t.Context()); err == nil {
		t.Error("no error in an outage")
	}
	isAway = false
	k.flush()
	k.checkRecords("wide", "first")
	if tries != 2*maxAttempts {
		t.Errorf("%d attempts, want %d", tries, 2*maxAttempts)
	}

	var topics []string
	for _, letter := range k.relay.DeadLetters() {
		topics = append(topics, letter.Topic)
	}
	if !slices.Equal(topics, []string{"narrow", "closed"}) {
		t.Errorf("dead letters of %q", topics)
	}
}

func TestScheduledEventsGoByTheClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- k.relay.Run(ctx) }()
		k.schedule(newOrder("o-1", "in an hour"), start.Add(time.Hour))
		moved := k.schedule(newOrder("o-1", "moved"), start.Add(time.Hour))
		cancelled := k.schedule(newOrder("o-1", "cancelled"), start.Add(time.Minute))
		k.schedule(newOrder("o-1", "past"), start.Add(-time.Minute))
		synctest.Wait()
		k.checkRecords("outbox.event.order", "past")
		if err := k.box.Reschedule(t.Context(), moved, start.Add(time.Minute)); err != nil {
			t.Error(err)
		}

		if err := k.box.Cancel(t.Context(), cancelled); err != nil {
			t.Error(err)
		}

		for _, x := range []struct {
			ahead time.Duration
			want  []string
		}{
			{time.Minute - time.Millisecond, []string{"past"}},
			{time.Millisecond, []string{"past", "moved"}},
			{time.Hour, []string{"past", "moved", "in an hour"}},
		} {
			synctest.Wait()
			<-time.After(x.ahead)
			synctest.Wait()
			k.checkRecords("outbox.event.order", x.want...)
		}

		if n := len(listStored(t, k.box)); n != 0 {
			t.Errorf("%d delivered ones are kept", n)
		}

		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestRoutesAndPresets(t *testing.T) {
	t.Parallel()
	rules := []routing.Rule{{AggregateType: "invoice", To: []string{"a", "b"}}}
	k := newRoutedKit(t, routing.Config{Template: "{aggregatetype}.{type}", Rules: rules}, "cloudevents")
	outage := true
	k.broker.Inject(func(topic string, _ *transport.Record) Fault {
		if topic == "b" && outage {
			return Fault{Err: errors.New("away")}
		}
		return Fault{}
	})

	k.append(event.New(event.Aggregate{Type: "invoice", ID: "i-1"}, "Issued", event.Bytes("", []byte("x"))), newOrder("o-1", "y"))
	if err := k.relay.Flush(t.Context()); err == nil {
		t.Error("an outage is not reported")
	}

	outage = false
	k.flush()
	// The record arrives once, although the other topic was away.
	k.checkRecords("a", "x")
	k.checkRecords("b", "x")
	k.checkRecords("order.OrderPlaced", "y")
	if h := k.broker.Records("a")[0].Headers; !slices.ContainsFunc(h, func(h event.Header) bool { return h.Key == "ce_type" && string(h.Value) == "Issued" }) {
		t.Errorf("headers %v", h)
	}

	if _, err := NewRelay(k.box, k.broker, routing.Config{Template: "{x}"}, ""); err == nil {
		t.Error("a bad template is accepted")
	}
	if _, err := NewRelay(k.box, k.broker, routing.Config{}, "x"); err == nil {
		t.Error("a bad preset is accepted")
	}
	if _, err := NewRelay(nil, nil, routing.Config{}, ""); err == nil {
		t.Error("nothing is accepted")
	}
}

func TestBrokerHelpsTests(t *testing.T) {
	t.Parallel()
	b := NewBroker(1)
	var ms []transport.Record
	for i := range 6 {
		ms = append(ms, transport.Record{Key: fmt.Appendf(nil, "k%d", i%2), Value: fmt.Appendf(nil, "%d", i)})
	}

	if err := b.Publish(t.Context(), "t", ms); err != nil {
		t.Fatal(err)
	}

	if list, err := b.Await(t.Context(), "t", 6); err != nil || len(list) != 6 {
		t.Errorf("%d records, %v", len(list), err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Await(ctx, "t", 7); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "there are 6") {
		t.Errorf("one that never comes: %v", err)
	}

	if lag := b.Lag("g", "t"); lag != 6 {
		t.Errorf("lag %d", lag)
	}

	b.Compact("t")
	if got := valuesOf(b.Records("t")); !slices.Equal(got, []string{"4", "5"}) {
		t.Errorf("after compaction: %v", got)
	}

	if got := b.Topics(); !slices.Equal(got, []string{"t"}) {
		t.Errorf("topics %v", got)
	}

	if err := b.Publish(t.Context(), "no name", ms); !errors.Is(err, errRejected) {
		t.Errorf("a topic of a bad name: %v", err)
	}
}

// The caller cannot change a stored record, neither by its source nor by its copies.
func TestStoredRecordsCannotBeChanged(t *testing.T) {
	t.Parallel()
	k := newKit(t)
	m := transport.Record{Key: []byte("k"), Value: []byte("value"), Headers: []event.Header{{Key: "h", Value: []byte("x")}}}
	if err := k.broker.Publish(t.Context(), "t", []transport.Record{m}); err != nil {
		t.Fatal(err)
	}

	m.Value[0], m.Headers[0].Value[0] = '!', '!'
	first := k.broker.Records("t")
	first[0].Value[0], first[0].Headers[0].Value[0], first[0].Key[0] = '?', '?', '?'
	second := k.broker.Records("t")[0]
	if string(second.Value) != "value" || string(second.Headers[0].Value) != "x" || string(second.Key) != "k" {
		t.Errorf("%+v", second)
	}

	if &first[0].Value[0] == &second.Value[0] || &first[0].Headers[0].Value[0] == &second.Headers[0].Value[0] || &first[0].Key[0] == &second.Key[0] {
		t.Error("the two readings share their bytes")
	}
}
