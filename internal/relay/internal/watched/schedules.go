package watched

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

const (
	// touchEvery is how old the stored time of an outbox may be when another scheduled envelope of it is read.
	touchEvery = time.Minute
	// forgetAfter is the time without a scheduled envelope after which an outbox is removed from the list. It is much longer than
	// touchEvery, so an owner never relies on an entry that another owner removes at that moment.
	forgetAfter = 10 * time.Minute
	// refreshEvery is the interval at which the list is read again: other slots add to it.
	refreshEvery = 5 * time.Second
	// lookAtOnce bounds the outboxes that are searched for scheduled envelopes at the same time.
	lookAtOnce = 8
)

// Schedules is the list of the outboxes of a watcher that hold scheduled envelopes (N19). It is stored, so a takeover finds these
// envelopes without a read of every outbox. All slots share it. An entry too many costs a query of an index; a missing one would
// hide an envelope, so the entry is stored before the resolved position passes the envelope.
type Schedules struct {
	Coll    *mongo.Collection // `schedules` of the state database
	Client  *mongo.Client     // that reads the outboxes
	Watcher string
	Slot    slot.Range
	Calls   *readiness.Calls
	Log     *slog.Logger
	// Prepare is called with an outbox that is new on the list, to create its index. It must not block. It may be nil.
	Prepare func(ns string)

	mu      sync.Mutex
	touched map[string]touch // entries that this owner has stored
	list    []string
}

// touch has the times before and after this owner last stored an entry.
type touch struct{ began, ended time.Time }

// Note returns once the list contains the outbox ns. It costs nothing if the entry is new enough.
func (s *Schedules) Note(ctx context.Context, ns string) error {
	s.mu.Lock()
	last, known := s.touched[ns]
	s.mu.Unlock()
	if known && time.Since(last.began) < touchEvery {
		return nil
	}

	// The time is taken before the write, so that it is not later than the stored one.
	began := time.Now()
	err := s.Calls.RetryCall(ctx, func(ctx context.Context) error {
		update := mongo.Pipeline{{{Key: "$set", Value: bson.D{
			{Key: "watcher", Value: mongodb.Literal(s.Watcher)}, {Key: "ns", Value: mongodb.Literal(ns)}, {Key: "at", Value: "$$NOW"},
		}}}}
		_, err := mongodb.Majority(s.Coll).UpdateOne(ctx, s.filterEntry(ns), update, options.UpdateOne().SetUpsert(true))
		return mongodb.DescribeError(err, "storing that an outbox has scheduled envelopes", "find, insert and update", mongodb.Namespace(s.Coll))
	})
	if err != nil {
		return err
	}

	s.mu.Lock()
	isNew := !slices.Contains(s.list, ns)
	if s.touched == nil {
		s.touched = map[string]touch{}
	}
	s.touched[ns] = touch{began, time.Now()}
	if isNew {
		s.list = append(s.list, ns)
	}
	s.mu.Unlock()

	if isNew && s.Prepare != nil {
		s.Prepare(ns)
	}
	return nil
}

// filterEntry returns the filter of the entry of an outbox.
func (s *Schedules) filterEntry(ns string) bson.D {
	return bson.D{{Key: "_id", Value: s.Watcher + "/" + ns}}
}

func (s *Schedules) parseOutbox(ns string) outboxes.Outbox {
	db, coll, _ := strings.Cut(ns, ".")
	return outboxes.Outbox{DB: db, Coll: coll, Slot: s.Slot}
}

// Outboxes returns the outboxes of the list.
func (s *Schedules) Outboxes() []outboxes.Outbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]outboxes.Outbox, len(s.list))
	for i, ns := range s.list {
		out[i] = s.parseOutbox(ns)
	}
	return out
}

// Load reads the list. It repeats the read until it succeeds.
func (s *Schedules) Load(ctx context.Context) error {
	return s.Calls.RetryCall(ctx, s.load)
}

func (s *Schedules) load(ctx context.Context) error {
	began := time.Now()
	list, err := outboxes.ListScheduled(ctx, s.Coll, s.Watcher)
	if err != nil {
		return err
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	for ns, last := range s.touched {
		switch {
		case slices.Contains(list, ns):
		// The read may have come before the write.
		case !last.ended.Before(began):
			list = append(list, ns)
		// Note has to store an entry again that is gone.
		default:
			delete(s.touched, ns)
		}
	}
	s.list = list
	return nil
}

// NoteExisting adds those of the outboxes that hold scheduled envelopes. It is for envelopes that no stream contains: they were
// inserted before the first position of the watcher, or in a gap.
func (s *Schedules) NoteExisting(ctx context.Context, list []outboxes.Outbox) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(lookAtOnce)

	for _, o := range list {
		group.Go(func() error {
			found := false
			err := s.Calls.RetryRead(ctx, func(ctx context.Context) (err error) {
				found, err = s.hasScheduled(ctx, o)
				return err
			})
			if err != nil || !found {
				return err
			}
			return s.Note(ctx, o.NS())
		})
	}

	return group.Wait()
}

// hasScheduled reports whether the outbox holds a scheduled envelope of any slot.
func (s *Schedules) hasScheduled(ctx context.Context, outbox outboxes.Outbox) (bool, error) {
	coll := mongodb.Majority(mongodb.Database(s.Client, outbox.DB).Collection(outbox.Coll))
	return outboxes.HasScheduled(ctx, coll, slot.Range{})
}

// Run keeps the list up to date until ctx ends: it reads the entries of other slots, and removes the outboxes without scheduled
// envelopes.
func (s *Schedules) Run(ctx context.Context) error {
	for retry.Sleep(ctx, refreshEvery) == nil {
		call, cancel := context.WithTimeout(ctx, s.Calls.Timeout)
		err := s.load(call)
		cancel()
		if err == nil {
			err = s.forgetEmpty(ctx)
		}
		if err != nil && ctx.Err() == nil {
			s.Log.Debug("cannot update the list of outboxes with scheduled envelopes", "error", err)
		}
	}
	return nil
}

// forgetEmpty removes the outboxes that got no scheduled envelope for a while and hold none.
func (s *Schedules) forgetEmpty(ctx context.Context) error {
	ago := bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", forgetAfter.Milliseconds()}}}
	old := bson.E{Key: "$expr", Value: bson.D{{Key: "$lt", Value: bson.A{"$at", ago}}}}
	list, err := outboxes.ListScheduled(ctx, s.Coll, s.Watcher, old)
	if err != nil {
		return err
	}

	for _, ns := range list {
		if found, err := s.hasScheduled(ctx, s.parseOutbox(ns)); err != nil || found {
			continue
		}
		if _, err := mongodb.Majority(s.Coll).DeleteOne(ctx, append(s.filterEntry(ns), old)); err != nil {
			return mongodb.DescribeError(err, "removing an outbox without scheduled envelopes", "remove", mongodb.Namespace(s.Coll))
		}
	}
	return nil
}
