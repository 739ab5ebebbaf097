package demo

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// What needs no server: the scenarios themselves run in test/integration.

func TestScenariosAreListed(t *testing.T) {
	t.Parallel()
	var names []string
	for _, s := range Scenarios() {
		names = append(names, s.Name)
		if s.Promise == "" || s.run == nil || s.rate == 0 && s.events == 0 {
			t.Errorf("scenario %q is not complete", s.Name)
		}
		if found, err := FindScenario(s.Name); err != nil || found.Promise != s.Promise {
			t.Errorf("%s: %v", s.Name, err)
		}
	}

	want := []string{"consumer", "drop", "lost-history", "poison", "retry", "scheduled"}
	if !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}

	_, err := FindScenario("Poison")
	if err == nil {
		t.Fatal("found")
	}

	for _, n := range want {
		if !strings.Contains(err.Error(), n) {
			t.Errorf("%q does not name %s", err, n)
		}
	}

	// A former scenario is rejected with what has replaced it.
	for name, instead := range map[string]string{"broker-outage": "TestKafkaAwayWithABacklog", "saga": "TestSagaNodesDie", "slots": "TestN28", "purge": "TestPurgeWhileOwnersDie"} {
		if _, err := FindScenario(name); err == nil || !strings.Contains(err.Error(), instead) {
			t.Errorf("%s: %v, want %s", name, err, instead)
		}
	}
}

// A finding is one flat object, and its account contains all of its values.
func TestFindingsAreFlat(t *testing.T) {
	t.Parallel()
	o := Outcome{Scenario: "x", Events: 3, Broken: []string{"the sky fell"}}
	for _, f := range []Finding{
		&PoisonFinding{Outcome: o, Classes: map[string]int{"malformed": 2}}, &HistoryFinding{Outcome: o},
		&DropFinding{Outcome: o}, &ConsumerFinding{Outcome: o}, &ScheduledFinding{Outcome: o}, &RetryFinding{Outcome: o},
	} {
		b, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}

		for _, name := range []string{"scenario", "held", "events", "delivered", "lost", "duplicates", "out_of_order", "phantoms", "dead", "seconds", "broken"} {
			if _, ok := m[name]; !ok {
				t.Errorf("%T has no %s: %s", f, name, b)
			}
		}

		text := FormatFinding(Scenario{Name: "x", Promise: "all is well"}, f)
		if !strings.Contains(text, "DID NOT HOLD") || !strings.Contains(text, "the sky fell") || len(f.describeFigures()) == 0 {
			t.Errorf("%T: %s", f, text)
		}
		if err := f.Err(); err == nil || !strings.Contains(err.Error(), "the sky fell") {
			t.Errorf("%T: %v", f, err)
		}

		*f.commonOutcome() = Outcome{Scenario: "x", Held: true, Broken: []string{}}
		if f.Err() != nil || !strings.Contains(FormatFinding(Scenario{Name: "x"}, f), "the promise held") {
			t.Errorf("%T: %v", f, f.Err())
		}
	}
}

// Each poison is at fault for the reason that its class says, as far as parsing can tell, and nothing else about it is.
func TestPoisonIsPoisonous(t *testing.T) {
	t.Parallel()
	classes := map[record.Class]bool{}
	for i, p := range poisonKinds() {
		raw, err := bson.Marshal(p.buildEnvelope(uuid.Must(uuid.NewV7()), "customer-101"))
		if err != nil {
			t.Fatal(err)
		}
		var v envelope.View
		err = envelope.Parse(raw, &v)
		var rejected *record.Rejection
		switch errors.As(err, &rejected); {
		case p.class == record.Malformed && (rejected == nil || rejected.Class != record.Malformed):
			t.Errorf("poison %d is not malformed: %v", i, err)
		case p.class != record.Malformed && err != nil:
			t.Errorf("poison %d (%s) is malformed: %v", i, p.class, err)
		case p.class == record.MessageTooLarge && len(v.Payload) != tooLarge:
			t.Errorf("poison %d has a payload of %d bytes", i, len(v.Payload))
		}
		classes[p.class] = true
	}
	if len(classes) != 5 {
		t.Errorf("%v", classes)
	}

	good, err := bson.Marshal(poison{}.buildEnvelope(uuid.Must(uuid.NewV7()), "customer-101"))
	if err != nil {
		t.Fatal(err)
	}

	var v envelope.View
	if err := envelope.Parse(good, &v); err != nil {
		t.Errorf("without its poison it is not good: %v", err)
	}
}

func TestQuantile(t *testing.T) {
	t.Parallel()
	if q := quantile(nil, 0.5); q != 0 {
		t.Error(q)
	}

	var list []time.Duration
	for i := range 100 {
		list = append(list, time.Duration(i+1)*time.Millisecond)
	}

	for q, want := range map[float64]float64{0: 1, 0.5: 51, 0.99: 100, 1: 100} {
		if got := quantile(list, q); got != want {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
	}
}

// The due error leaves out what had to wait for the next owner, and nothing else.
func TestScheduledFigures(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	c := &calendar{all: map[string]*dueEvent{}}
	for _, e := range []struct{ due, seen int }{
		{100, 110}, {900, 920}, {990, 3070}, {1100, 3100}, {2900, 3050}, {3060, 3080}, {4000, 4010}, {5000, 4900}, {6000, -1},
	} {
		d := &dueEvent{id: uuid.Must(uuid.NewV7()), at: at(e.due)}
		if e.seen >= 0 {
			d.seen = at(e.seen)
		}
		c.addAll([]*dueEvent{d})
	}

	var f ScheduledFinding
	c.computeFigures(&f, at(1000), at(3000))
	if f.TakeoverS != 2.05 || f.Early != 1 || f.MaxMS != 2080 || f.P99MS != 20 || f.AllP99MS != 2080 {
		t.Errorf("%+v", f)
	}

	id := slices.Sorted(func(yield func(string) bool) {
		for id := range c.all {
			if !yield(id) {
				return
			}
		}
	})[0]

	c.moveEvent(id, at(7000))
	if all := c.byTime(); all[len(all)-1].id.String() != id || !c.dueTimeOf(id).Equal(at(7000)) {
		t.Error("it was not moved")
	}
}

func TestScheduledChangesSomeOfThem(t *testing.T) {
	t.Parallel()
	n := map[fate]int{}
	for range 10_000 {
		n[(&calendar{}).fateOf(uuid.Must(uuid.NewV7()))]++
	}
	if n[cancel] < 300 || n[move] < 300 || n[keep] < 8000 {
		t.Errorf("%v", n)
	}
}

func TestWitnessCountsItsTopic(t *testing.T) {
	t.Parallel()
	s := &stage{demo: &demo{check: check.New(check.Options{})}}
	w := s.startWitness("a")
	now := time.Now()
	for i, topic := range []string{"a", "b", "a"} {
		s.handleRecord(devstack.Message{Topic: topic, Key: []byte("free-1"), Time: now, Seen: now.Add(time.Duration(i+1) * time.Millisecond)})
	}
	if a, b, c := w.countOf("free"), w.countOf("free-1"), w.countOf("free-2"); a != 2 || b != 2 || c != 0 {
		t.Errorf("%d of all, %d and %d of two keys", a, b, c)
	}
	if n, p99 := w.stopCounting(); n != 2 || p99 != 3 {
		t.Errorf("%d records, p99 %v", n, p99)
	}

	s.handleRecord(devstack.Message{Topic: "a"})
	if n := w.countOf(""); n != 0 {
		t.Error("it goes on after the stop")
	}
}

// What does not come in time is a broken promise; what ends the scenario is its cause.
func TestStageAwaits(t *testing.T) {
	t.Parallel()
	s := &stage{demo: &demo{view: newView(io.Discard, nil), check: check.New(check.Options{})}}
	var broken *brokenPromise
	if err := s.awaitCondition(t.Context(), "the moon", time.Millisecond, func() bool { return false }); !errors.As(err, &broken) || !strings.Contains(broken.why, "the moon") {
		t.Errorf("%v", err)
	}

	n := 0
	if err := s.awaitCondition(t.Context(), "three", time.Minute, func() bool { n++; return n == 3 }); err != nil {
		t.Error(err)
	}

	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("a relay ended")
	cancel(why)
	if err := s.awaitCondition(ctx, "anything", time.Minute, func() bool { return false }); !errors.Is(err, why) {
		t.Errorf("%v", err)
	}
	if err := s.awaitArrival(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCollectionExists(t *testing.T) {
	t.Parallel()
	if !collectionExists(mongo.CommandError{Code: 48}) || collectionExists(mongo.CommandError{Code: 13}) || collectionExists(errors.New("no")) {
		t.Error("code 48 is that of a collection that is there already")
	}
}

// A set-up that takes too long is no broken promise: the relay was not tried, and nothing is lost.
func TestALateSetUpIsNoBrokenPromise(t *testing.T) {
	t.Parallel()
	never := func() bool { return false }
	err := (&stage{}).awaitSetUp(t.Context(), "the backlog is appended", time.Nanosecond, never)
	if _, broken := errors.AsType[*brokenPromise](err); broken || err == nil || !strings.Contains(err.Error(), "could not begin: not within 1ns: the backlog is appended") {
		t.Errorf("got %v", err)
	}
}
