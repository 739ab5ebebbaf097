//go:build unix

package kit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Load configures a load. The zero value writes until Stop, as fast as the server accepts it.
type Load struct {
	Events     int     // end when this number is committed; 0: run until Stop
	Rate       float64 // events per second of all workers; 0: no limit
	Workers    int     // each has its own keys; defaults to 4
	Keys       int     // per worker; defaults to 5
	PerTx      int     // maximum number of events in a transaction; defaults to 3
	AbortEvery int     // every n-th transaction of a worker is rolled back; defaults to 8
	Size       int     // payload size in bytes; defaults to 120
	Type       string  // aggregate type; defaults to "order"
	Prefix     string  // prefix of the keys, for two loads into the same topic
	Tolerant   bool    // appends may fail, because the test breaks the servers
}

// RunningLoad is a load that was started.
type RunningLoad struct {
	scene  *Scene
	load   Load
	box    *outbox.Box
	stop   context.CancelFunc
	wg     sync.WaitGroup
	count  atomic.Int64
	failed atomic.Int64
}

// LoadColl is the collection of the business documents of a load.
const LoadColl = "changes"

var errRollBack = errors.New("rolled back on purpose")

// StartLoad starts a load into the scene's outbox. The end of the test stops it.
func (s *Scene) StartLoad(load Load) *RunningLoad {
	s.tb.Helper()
	load.Workers, load.Keys, load.PerTx = orDefault(load.Workers, 4), orDefault(load.Keys, 5), orDefault(load.PerTx, 3)
	load.AbortEvery, load.Size = orDefault(load.AbortEvery, 8), orDefault(load.Size, 120)
	if load.Type == "" {
		load.Type = "order"
	}

	box, err := outbox.New(s.DB)
	if err != nil {
		s.tb.Fatal(err)
	}

	ctx, stop := context.WithCancel(s.tb.Context())
	runningLoad := &RunningLoad{scene: s, load: load, box: box, stop: stop}
	for i := range load.Workers {
		runningLoad.wg.Go(func() { runningLoad.runWorker(ctx, i) })
	}

	s.tb.Cleanup(func() {
		runningLoad.Stop()
		if s.tb.Failed() {
			s.tb.Logf("load of %s: %d events committed, %d appends failed", load.Type, runningLoad.count.Load(), runningLoad.failed.Load())
		}
	})
	return runningLoad
}

func orDefault(n, otherwise int) int {
	if n == 0 {
		return otherwise
	}
	return n
}

// Stop ends the load and waits for the transactions in progress.
func (w *RunningLoad) Stop() {
	w.stop()
	w.wg.Wait()
}

// WaitDone waits until the load has written its events.
func (w *RunningLoad) WaitDone() {
	w.scene.tb.Helper()
	w.wg.Wait()
	w.stop()
	if w.scene.tb.Context().Err() != nil {
		w.scene.tb.Fatal("the load had not ended at the end of the test")
	}
}

// CountFailed returns the number of appends that returned an error.
func (w *RunningLoad) CountFailed() int { return int(w.failed.Load()) }

// WaitCommitted waits until n events are committed. The time limit applies to each new commit.
func (w *RunningLoad) WaitCommitted(n int) {
	w.scene.tb.Helper()
	for got := 0; got < n; {
		before := got
		stacktest.Eventually(w.scene.tb, fmt.Sprintf("%d events committed (%d so far)", n, got), func() bool {
			got = int(w.count.Load())
			return got >= n || got > before
		})
	}
}

func (w *RunningLoad) runWorker(ctx context.Context, worker int) {
	var pace <-chan time.Time
	if w.load.Rate > 0 {
		each := float64(1+w.load.PerTx) / 2 * float64(w.load.Workers) / w.load.Rate
		ticker := time.NewTicker(time.Duration(each * float64(time.Second)))
		defer ticker.Stop()
		pace = ticker.C
	}

	keys := make([]string, w.load.Keys)
	for i := range keys {
		keys[i] = fmt.Sprintf("%sw%d-k%d", w.load.Prefix, worker, i)
	}

	numbers := map[string]int{}
	for turn := 1; ctx.Err() == nil && (w.load.Events == 0 || w.count.Load() < int64(w.load.Events)); turn++ {
		if pace != nil {
			select {
			case <-pace:
			case <-ctx.Done():
				return
			}
		}

		at := turn % len(keys)
		events := w.newEvents(keys[at], 1+turn%w.load.PerTx, numbers)

		// A transaction in progress is finished even if the load is stopped, so that its fate is known.
		fate, err := w.commitEvents(context.WithoutCancel(ctx), events, turn%w.load.AbortEvery == 0)
		w.scene.Ledger.Add(w.scene.ledgerEntries(w.scene.DB.Name()+".outbox", fate, events)...)
		if err != nil {
			w.failed.Add(1)
			if !w.load.Tolerant {
				w.scene.tb.Errorf("appending: %v", err)
				return
			}
			// The append may still be committed, even after the following ones. These use another key.
			keys[at] = fmt.Sprintf("%sw%d-k%d-after-%d", w.load.Prefix, worker, at, turn)
		}

		if fate == Committed {
			w.count.Add(int64(len(events)))
		}
	}
}

func (w *RunningLoad) commitEvents(ctx context.Context, events []event.Event, abort bool) (Fate, error) {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	err := w.box.Transaction(ctx, func(ctx context.Context) error {
		business := bson.D{{Key: "_id", Value: events[0].ID().String()}, {Key: "events", Value: len(events)}}
		if _, err := w.scene.DB.Collection(LoadColl).InsertOne(ctx, business); err != nil {
			return err
		}
		if err := w.box.Append(ctx, events...); err != nil {
			return err
		}
		if abort {
			return errRollBack
		}
		return nil
	})

	switch {
	case err == nil:
		return Committed, nil
	case errors.Is(err, errRollBack):
		return Aborted, nil
	}
	return Unknown, err
}

func (w *RunningLoad) newEvents(key string, n int, numbers map[string]int) []event.Event {
	out := make([]event.Event, n)
	for i := range out {
		numbers[key]++
		out[i] = NewEvent(w.load.Type, key, numbers[key], w.load.Size)
	}
	return out
}

// NewEvent returns the n-th event of a key. Its payload and headers contain bytes that are not text,
// and a header name repeats.
func NewEvent(aggregateType, key string, n, size int) event.Event {
	payload := fmt.Appendf(nil, "%s:%d:", key, n)
	noise := make([]byte, size+4)
	_, _ = rand.Read(noise)
	return event.New(event.Aggregate{Type: aggregateType, ID: key}, "Changed", event.Bytes("", append(payload, noise[:size]...)),
		event.WithHeader("trace", noise[size:size+2]), event.WithHeader("trace", []byte{0, 0xff, '\n'}), event.WithHeader("none", nil))
}

// ledgerEntries returns the ledger entries for events with a binary payload.
func (s *Scene) ledgerEntries(ns string, fate Fate, events []event.Event) []Entry {
	out := make([]Entry, len(events))
	for i, e := range events {
		payload := parsePayload(e)
		out[i] = Entry{
			NS: ns, ID: e.ID().String(), Key: e.Key(), Topics: s.Route(e.Aggregate().Type),
			Payload: payload.payload, Null: payload.null, Headers: e.Headers(), Fate: fate, At: time.Now(),
		}
	}
	return out
}

type storedPayload struct {
	payload []byte
	null    bool
}

// parsePayload returns the payload of an event in its stored form.
func parsePayload(event event.Event) storedPayload {
	raw, err := event.MarshalBSON()
	if err != nil {
		return storedPayload{}
	}

	var view envelope.View
	if err := envelope.Parse(raw, &view); err != nil {
		return storedPayload{}
	}

	data, err := envelope.AppendPayload(nil, &view)
	if err != nil {
		return storedPayload{}
	}
	return storedPayload{data, bson.Type(view.PayloadType) == bson.TypeNull}
}

// AppendEvents commits events in one transaction into a collection, and adds them to the ledger with
// the topics of their aggregate types.
func (s *Scene) AppendEvents(coll *mongo.Collection, events ...event.Event) {
	s.tb.Helper()
	s.AppendWithin(coll, func() {}, events...)
}

// AppendWithin is AppendEvents with a transaction that stays open during linger, which may be called again.
func (s *Scene) AppendWithin(coll *mongo.Collection, linger func(), events ...event.Event) {
	s.tb.Helper()
	box, err := outbox.New(coll.Database(), outbox.WithCollection(coll.Name()))
	if err != nil {
		s.tb.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(s.tb.Context(), Patience)
	defer cancel()
	err = box.Transaction(ctx, func(ctx context.Context) error {
		err := box.Append(ctx, events...)
		linger()
		return err
	})
	if err != nil {
		s.tb.Fatal(err)
	}
	s.Ledger.Add(s.ledgerEntries(coll.Database().Name()+"."+coll.Name(), Committed, events)...)
}

// Outbox returns the outbox of the scene.
func (s *Scene) Outbox() *mongo.Collection { return s.DB.Collection("outbox") }

func cleanupContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 15*time.Second)
}

// AppendMalformed inserts an envelope that cannot be sent, and marks it as a dead letter in the ledger.
func (s *Scene) AppendMalformed(id string) {
	s.tb.Helper()
	ctx, cancel := context.WithTimeout(s.tb.Context(), Patience)
	defer cancel()
	doc := bson.D{{Key: "_id", Value: id}, {Key: "aggregatetype", Value: 5}, {Key: "payload", Value: "text"}}
	if _, err := s.Outbox().InsertOne(ctx, doc); err != nil {
		s.tb.Fatal(err)
	}
	ns := s.DB.Name() + ".outbox"
	s.Ledger.Add(Entry{NS: ns, ID: id, Topics: []string{s.TopicOf("order")}})
	s.Ledger.MarkDead(ns, id)
}

// CheckDead waits until each envelope marked as a dead letter is one.
func (s *Scene) CheckDead() {
	s.tb.Helper()
	_, dead := s.Ledger.copyEntries()
	for e := range dead {
		filter := bson.D{{Key: "ns", Value: e.ns}, {Key: "id", Value: event.ParseID(e.id)}}
		stacktest.EventuallyIn(s.tb, Patience, "one dead letter of "+e.id, func() bool { return s.CountState("letters", filter) == 1 },
			func() any { return s.readState("letters", filter) })
	}
}
