package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/demo/check"
	"github.com/outrelay/outrelay/internal/demo/member"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

const (
	workers    = 8
	customers  = 8  // of each worker: the keys
	abortEvery = 25 // transactions of a worker, one is rolled back on purpose
	together   = 3  // events at most in one transaction
	burst      = 500
	finishTime = 45 * time.Second // for a transaction that is under way when the service stops
)

// errChangedMind rolls a transaction back on purpose: its events must never be seen.
var errChangedMind = errors.New("the customer changed their mind")

// service is the sample: each order is inserted together with the event that tells of it. A customer's events are
// appended one after the other by one worker, so they have an order to be kept.
type service struct {
	client *mongo.Client
	names  names
	orders *mongo.Collection
	box    *outbox.Box
	check  *check.Checker
	rate   int
	limit  int                   // events in all; 0 is no end
	hold   func(context.Context) // called once before the last tenth of a limited run

	aggregate string       // type of what is told of; its topic is named after it
	who       string       // beginning of the keys: two services that run at the same time need two
	together  int          // events at most in one transaction
	even      bool         // without bursts
	done      atomic.Int64 // events committed
	number    atomic.Int64 // of the newest order: those of one key grow as they are committed

	more chan int // extra events, now
}

func newService(client *mongo.Client, as names, c *check.Checker, rate, limit int) (*service, error) {
	db := client.Database(as.database)
	box, err := outbox.New(db)
	if err != nil {
		return nil, err
	}
	return &service{
		client: client, names: as, orders: db.Collection(member.OrdersColl), box: box, check: c, rate: rate, limit: limit, more: make(chan int, 1),
		aggregate: aggregate, who: "customer", together: together,
	}, nil
}

// prepare makes the collections, which a transaction under load should not have to.
func (s *service) prepare(ctx context.Context) error {
	for _, name := range []string{member.OrdersColl, outbox.DefaultCollection} {
		if err := s.orders.Database().CreateCollection(ctx, name); err != nil {
			return fmt.Errorf("making %s.%s: %w", s.names.database, name, err)
		}
	}
	return nil
}

// burst appends that many events as fast as they go.
func (s *service) burst(n int) {
	select {
	case s.more <- n:
	default: // one is on its way
	}
}

// Run appends until the limit is reached or ctx ends. What is in flight then is finished.
func (s *service) Run(ctx context.Context) error {
	slots := make(chan struct{}, max(s.together-together, 0)) // what waits there goes into one transaction
	g, ctx := errgroup.WithContext(ctx)
	for i := range workers {
		g.Go(func() error {
			if err := s.work(ctx, i, slots); err != nil {
				return fmt.Errorf("the sample service cannot append: %w", err)
			}
			return nil
		})
	}
	s.feed(ctx, slots)
	close(slots)
	return g.Wait()
}

// feed gives out one slot for each event.
func (s *service) feed(ctx context.Context, slots chan<- struct{}) {
	p, extra := &pace{rate: s.rate, even: s.even}, 0
	for n := 0; s.limit == 0 || n < s.limit; n++ {
		if s.hold != nil && s.limit > 0 && n == s.limit-s.limit/10-1 {
			s.hold(ctx)
		}
		if !p.wait(ctx, s.more, &extra) {
			return
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
	}
}

// work does one transaction for each slot, or one for a few that wait.
func (s *service) work(ctx context.Context, worker int, slots <-chan struct{}) error {
	seq := 0
	for range slots {
		seq++
		n := 1
		for range rand.IntN(s.together) {
			select {
			case _, ok := <-slots:
				if ok {
					n++
				}
			default:
			}
		}
		finish, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishTime)
		if seq%abortEvery == 0 {
			if _, err := s.place(finish, worker, 1, errChangedMind); err != nil {
				cancel()
				return err
			}
		}
		err := s.placeAll(finish, worker, n)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// placeAll repeats a transaction that did not commit with events of their own, so that each slot becomes one.
func (s *service) placeAll(ctx context.Context, worker, n int) error {
	for {
		done, err := s.place(ctx, worker, n, nil)
		if done || err != nil {
			return err
		}
	}
}

// place inserts n orders and appends their events in one transaction, which is rolled back if instead is an error. It
// reports whether the transaction committed; an error is one that will come again.
func (s *service) place(ctx context.Context, worker, n int, instead error) (bool, error) {
	ids := make([]string, n)
	events := make([]event.Event, n)
	orders := make([]any, n)
	for i := range n {
		id, order := uuid.Must(uuid.NewV7()), bson.NewObjectID()
		customer := fmt.Sprintf("%s-%d%02d", s.who, worker+1, rand.IntN(customers))
		total, number := 1+rand.IntN(20_000), s.number.Add(1)
		payload := fmt.Appendf(nil, `{"order":%q,"customer":%q,"total":%d.%02d}`, order.Hex(), customer, total/100, total%100)
		ids[i] = id.String()
		events[i] = event.New(s.aggregate, order.Hex(), "OrderPlaced", payload, event.WithID(id), event.WithKey(customer), event.WithContentType("application/json"),
			event.WithHeader(member.NumberHeader, strconv.AppendInt(nil, number, 10)))
		orders[i] = bson.D{
			{Key: "_id", Value: order},
			{Key: "customer", Value: customer},
			{Key: "cents", Value: total},
			{Key: "event", Value: ids[i]},
			{Key: "number", Value: number},
		}
		s.check.Begin(check.Event{ID: ids[i], Key: customer, Topics: []string{s.names.topic(s.aggregate)}, Value: payload})
	}
	err := outbox.Transaction(ctx, s.client, func(ctx context.Context) error {
		if _, err := s.orders.InsertMany(ctx, orders); err != nil {
			return err
		}
		if err := s.box.AppendMany(ctx, events); err != nil {
			return err
		}
		return instead
	})
	switch now := time.Now(); {
	case err == nil:
		s.check.Committed(now, ids...)
		s.done.Add(int64(n))
		return true, nil
	case uncertain(err):
		s.check.Unknown(ids...)
		return false, ctx.Err()
	case instead != nil && errors.Is(err, instead):
		s.check.Aborted(ids...)
		return false, nil
	}
	s.check.Aborted(ids...)
	if ctx.Err() != nil {
		return false, err
	}
	return false, permanent(err)
}

// uncertain reports whether a transaction that ended with err may have been committed.
func uncertain(err error) bool {
	var labeled mongo.LabeledError
	return errors.As(err, &labeled) && labeled.HasErrorLabel("UnknownTransactionCommitResult") ||
		errors.Is(err, context.DeadlineExceeded) || mongo.IsTimeout(err) || mongo.IsNetworkError(err)
}

// permanent is err if a second attempt would meet it again.
func permanent(err error) error {
	var labeled mongo.LabeledError
	if errors.As(err, &labeled) && labeled.HasErrorLabel("TransientTransactionError") {
		return nil
	}
	return err
}
