package watched

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// scene is a database with outboxes and the list of the outboxes with scheduled envelopes.
type scene struct {
	t      *testing.T
	client *mongo.Client
	db     *mongo.Database
	coll   *mongo.Collection
}

func newScene(t *testing.T, opts ...*options.ClientOptions) *scene {
	t.Helper()
	client := stacktest.Client(t, opts...)
	db := stacktest.Database(t, client)
	return &scene{t: t, client: client, db: db, coll: db.Collection("schedules")}
}

// newList returns the list as the owner of a slot has it.
func (s *scene) newList(p slot.Range) *Schedules {
	return &Schedules{Coll: s.coll, Client: s.client, Watcher: "w", Slot: p, Log: slog.New(slog.DiscardHandler), Calls: newCalls()}
}

func newCalls() *readiness.Calls {
	return &readiness.Calls{Timeout: time.Minute, State: readiness.NewState(time.Minute, time.Now, slog.New(slog.DiscardHandler))}
}

func (s *scene) ns(name string) string { return s.db.Name() + "." + name }

// schedule inserts a scheduled envelope.
func (s *scene) schedule(name string) {
	s.t.Helper()
	if _, err := s.db.Collection(name).InsertOne(s.t.Context(), bson.D{{Key: "dueAt", Value: time.Now().Add(time.Hour)}}); err != nil {
		s.t.Fatal(err)
	}
}

// age makes all stored entries as old as if they were noted so long ago.
func (s *scene) age(d time.Duration) {
	s.t.Helper()
	older := mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "at", Value: bson.D{{Key: "$subtract", Value: bson.A{"$at", d.Milliseconds()}}}}}}}}
	if _, err := s.coll.UpdateMany(s.t.Context(), bson.D{}, older); err != nil {
		s.t.Fatal(err)
	}
}

// insertOld stores an entry that was not noted for long, if there is none.
func (s *scene) insertOld(name string) {
	s.t.Helper()
	entry := bson.D{{Key: "watcher", Value: "w"}, {Key: "ns", Value: s.ns(name)}, {Key: "at", Value: time.Now().Add(-forgetAfter - time.Minute)}}
	_, err := s.coll.UpdateOne(s.t.Context(), bson.D{{Key: "_id", Value: "w/" + s.ns(name)}}, bson.D{{Key: "$setOnInsert", Value: entry}}, options.UpdateOne().SetUpsert(true))
	if err != nil && !mongo.IsDuplicateKeyError(err) {
		s.t.Error(err)
	}
}

func (s *scene) stored() (list []string) {
	s.t.Helper()
	next := s.newList(slot.Range{})
	if err := next.Load(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	for _, o := range next.Outboxes() {
		list = append(list, o.Coll)
	}
	slices.Sort(list)
	return list
}

func (s *scene) checkStored(want ...string) {
	s.t.Helper()
	if got := s.stored(); !slices.Equal(got, want) {
		s.t.Errorf("the list has %q, want %q", got, want)
	}
}

// N17: an outbox is on the list when Note returns, and the next owner finds it there. Another Note within a minute costs nothing.
func TestN17_ANotedOutboxIsStored(t *testing.T) {
	t.Parallel()
	var commands atomic.Int64
	s := newScene(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(context.Context, *event.CommandStartedEvent) { commands.Add(1) }}))
	l := s.newList(slot.Range{})
	var prepared []string
	l.Prepare = func(ns string) { prepared = append(prepared, ns) }
	if err := l.Note(t.Context(), s.ns("a")); err != nil {
		t.Fatal(err)
	}
	s.checkStored("a")

	before := commands.Load()
	for range 1000 {
		if err := l.Note(t.Context(), s.ns("a")); err != nil {
			t.Fatal(err)
		}
	}
	if n := commands.Load() - before; n != 0 {
		t.Errorf("%d commands for an outbox that is noted", n)
	}
	// A name with dots and dollars is not read as an expression.
	if err := l.Note(t.Context(), s.ns("$odd.$name")); err != nil {
		t.Fatal(err)
	}
	s.checkStored("$odd.$name", "a")
	if want := []string{s.ns("a"), s.ns("$odd.$name")}; !slices.Equal(prepared, want) {
		t.Errorf("prepared %q, want %q", prepared, want)
	}

	// Another watcher has its own list.
	other := s.newList(slot.Range{})
	other.Watcher = "other"
	if err := other.Load(t.Context()); err != nil || len(other.Outboxes()) != 0 {
		t.Errorf("another watcher has %v, %v", other.Outboxes(), err)
	}
}

// An outbox leaves the list when it got no scheduled envelope for ten minutes and holds none of any slot.
func TestAnEmptyOutboxIsForgotten(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	l := s.newList(slot.Range{I: 1, N: 2})
	for _, name := range []string{"empty", "dropped", "holds", "holds of the other slot"} {
		if err := l.Note(t.Context(), s.ns(name)); err != nil {
			t.Fatal(err)
		}
	}
	s.schedule("holds")
	s.schedule("dropped")
	if _, err := s.db.Collection("holds of the other slot").InsertOne(t.Context(), bson.D{{Key: "dueAt", Value: time.Now()}, {Key: "slot", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	if err := s.db.Collection("dropped").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}

	s.age(forgetAfter - 10*time.Second)
	if err := l.forgetEmpty(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.checkStored("dropped", "empty", "holds", "holds of the other slot")

	s.age(20 * time.Second)
	if err := l.forgetEmpty(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.checkStored("holds", "holds of the other slot")
	names, err := s.db.ListCollectionNames(t.Context(), bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: bson.A{"empty", "dropped"}}}}})
	if err != nil || len(names) != 0 {
		t.Errorf("a look has created %q, %v", names, err)
	}

	// The owner noted the forgotten ones less than a minute ago. Once it has read the list, it stores them again.
	if err := l.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := l.Note(t.Context(), s.ns("empty")); err != nil {
		t.Fatal(err)
	}
	s.checkStored("empty", "holds", "holds of the other slot")
}

// N17: slots note outboxes while others forget them. An outbox that holds a scheduled envelope whose Note has returned is on the list.
func TestN17_SlotsThatNoteAndForgetAtTheSameTime(t *testing.T) {
	t.Parallel()
	const slots, rounds, names = 4, 60, 3
	s := newScene(t)
	var running sync.WaitGroup
	var mu sync.Mutex
	noted := map[string]bool{}
	for i := range slots {
		l := s.newList(slot.Range{I: i, N: slots})
		running.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 7))
			for range rounds {
				name := fmt.Sprint("o", r.IntN(names))
				switch r.IntN(4) {
				case 0:
					s.insertOld(name)
				case 1:
					if err := l.forgetEmpty(t.Context()); err != nil {
						t.Error(err)
					}
				case 2:
					if err := l.Load(t.Context()); err != nil {
						t.Error(err)
					}
				case 3:
					// The insert comes before the event of the stream, which comes before the resolved position.
					s.schedule(name)
					if err := l.Note(t.Context(), s.ns(name)); err != nil {
						t.Error(err)
					}
					mu.Lock()
					noted[name] = true
					mu.Unlock()
				}
			}
		})
	}
	running.Wait()

	list := s.stored()
	for name := range noted {
		if !slices.Contains(list, name) {
			t.Errorf("%s holds scheduled envelopes and is not on the list %q", name, list)
		}
	}
	if len(noted) == 0 {
		t.Error("nothing was noted")
	}
}

// N17: the envelopes of before the first position, or of a gap, are found by one look at each outbox.
func TestN17_ExistingScheduledEnvelopesAreFound(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	var list []outboxes.Outbox
	for i := range 20 {
		name := fmt.Sprintf("o%02d", i)
		list = append(list, outboxes.Outbox{DB: s.db.Name(), Coll: name})
		if i%5 == 0 {
			s.schedule(name)
		} else if _, err := s.db.Collection(name).InsertOne(t.Context(), bson.D{{Key: "dueAt", Value: nil}}); err != nil {
			t.Fatal(err)
		}
	}
	// One is gone since the listing.
	list = append(list, outboxes.Outbox{DB: s.db.Name(), Coll: "gone"})
	if err := s.newList(slot.Range{}).NoteExisting(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	s.checkStored("o00", "o05", "o10", "o15")
}

// N17: a later owner reads the list with one command for any number of outboxes.
func TestN17_ATakeoverReadsTheListOnly(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var commands []string
	s := newScene(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		mu.Lock()
		defer mu.Unlock()
		commands = append(commands, e.CommandName)
	}}))
	l := s.newList(slot.Range{})
	for i := range 50 {
		s.schedule(fmt.Sprint("o", i))
	}
	if err := l.Note(t.Context(), s.ns("o7")); err != nil {
		t.Fatal(err)
	}

	next := s.newList(slot.Range{})
	mu.Lock()
	commands = nil
	mu.Unlock()
	if err := next.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(commands, []string{"aggregate"}) || len(next.Outboxes()) != 1 || next.Outboxes()[0].Coll != "o7" {
		t.Errorf("%q; the list is %v", commands, next.Outboxes())
	}
}

// Run brings the outboxes that other slots have noted.
func TestRunReadsWhatOtherSlotsNote(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	l := s.newList(slot.Range{I: 0, N: 2})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	s.schedule("a")
	if err := s.newList(slot.Range{I: 1, N: 2}).Note(t.Context(), s.ns("a")); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the outbox of another slot", func() bool {
		list := l.Outboxes()
		return len(list) == 1 && list[0].Slot == slot.Range{I: 0, N: 2}
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// N17: an outbox that is noted while the list is read stays on the list.
func TestN17_ANotedOutboxSurvivesAConcurrentRead(t *testing.T) {
	t.Parallel()
	var afterRead func()
	s := newScene(t, options.Client().SetMonitor(&event.CommandMonitor{Succeeded: func(context.Context, *event.CommandSucceededEvent) {
		if call := afterRead; call != nil {
			afterRead = nil
			call()
		}
	}}))
	list := s.newList(slot.Range{})
	afterRead = func() {
		if err := list.Note(t.Context(), s.ns("a")); err != nil {
			t.Error(err)
		}
	}

	if err := list.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := list.Outboxes(); len(got) != 1 {
		t.Errorf("the list has %v, want the noted outbox", got)
	}
}
