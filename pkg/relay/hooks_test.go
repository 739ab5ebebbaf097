package relay_test

import (
	"log/slog"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/relay"
)

// receive returns the next value of a hook.
func receive[T any](t *testing.T, hook string, values chan T) (value T) {
	t.Helper()
	select {
	case value = <-values:
	case <-time.After(patience):
		t.Fatalf("%s was not called", hook)
	}
	return value
}

// appendExpired appends an event that the relay gives up at once, and returns its id.
func (s *scene) appendExpired(t *testing.T) string {
	t.Helper()
	old := event.New(event.Aggregate{Type: "order", ID: "7"}, "Placed", event.Bytes("", []byte("x")), event.WithExpiry(time.Now().Add(-time.Hour)))
	if err := s.box.Append(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	return old.ID().String()
}

// The hooks report an event that the relay gave up, and lost history when the relay has sent its events.
func TestHooksReportGivenUpEventsAndLostHistory(t *testing.T) {
	t.Parallel()
	s := setup(t)
	given, lost := make(chan relay.GivenUp, 10), make(chan relay.LostHistory, 10)
	start := func() (stop func() error) {
		r, err := relay.New(s.config, relay.WithLogger(slog.New(slog.DiscardHandler)),
			relay.WithGivenUpHook(func(event relay.GivenUp) { given <- event }), relay.WithLostHistoryHook(func(history relay.LostHistory) { lost <- history }))
		if err != nil {
			t.Fatal(err)
		}
		stop = s.run(t, r)
		waitPhases(t, r, relay.Owner)
		return stop
	}

	began := time.Now().Add(-time.Minute)
	stop := start()
	s.append(t, 3)
	s.readValues(t, 3)
	id := s.appendExpired(t)
	event := receive(t, "WithGivenUpHook", given)
	if event.ID != id || event.Collection != s.config.Watch[0] || event.Class != "expired" || event.Reason == "" || event.Letter == "" || event.Delivery != 0 {
		t.Errorf("the event that was given up: got %+v", event)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	// The earlier owner had found that MongoDB discarded a minute of the history.
	client := stacktest.Client(t)
	watchers := state.Open(client, s.config.State).Collection("watchers")
	end := time.Now().Add(time.Second)
	gap := lease.Gap{
		Reason: "history_lost", From: bson.Timestamp{T: uint32(began.Unix())}, To: bson.Timestamp{T: uint32(end.Unix())},
		Since: time.Now(), Cursor: bson.Timestamp{T: uint32(began.Unix())},
	}
	if _, err := watchers.UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "gap", Value: gap}}}}); err != nil {
		t.Fatal(err)
	}
	start()
	history := receive(t, "WithLostHistoryHook", lost)
	if history.Reason != "history_lost" || history.From.Unix() != began.Unix() || history.To.Unix() != end.Unix() || history.Swept < 3 || history.Slot != "0of1" {
		t.Errorf("the lost history: got %+v", history)
	}
}

// A hook that panics and one that does not return stop neither the events nor the end of the relay.
func TestHooksCannotStopTheRelay(t *testing.T) {
	t.Parallel()
	s := setup(t)
	entered, release := make(chan struct{}, 1), make(chan struct{})
	ended := make(chan struct{})
	r, err := relay.New(s.config, relay.WithLogger(slog.New(slog.DiscardHandler)),
		relay.WithStatusHook(func(relay.Status) { panic("boom") }),
		relay.WithGivenUpHook(func(relay.GivenUp) {
			defer close(ended)
			entered <- struct{}{}
			<-release
		}))
	if err != nil {
		t.Fatal(err)
	}
	stop := s.run(t, r)

	waitPhases(t, r, relay.Owner)
	s.appendExpired(t)
	receive(t, "WithGivenUpHook", entered)
	s.append(t, 3)
	if got := s.readValues(t, 3); len(got) != 3 {
		t.Errorf("records while a hook blocks: got %v", got)
	}
	began := time.Now()
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("the stop took %v", took)
	}
	close(release)
	<-ended
}
