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

	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/lab/demo/member"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// outboxName is the collection of the service's outbox.
const outboxName = "outbox"

const (
	workers               = 8
	customers             = 8  // per worker; each customer is a key
	abortEvery            = 25 // a worker rolls back one of this many transactions on purpose
	defaultPerTransaction = 3  // maximum number of events in one transaction
	burstSize             = 500
	finishTime            = 45 * time.Second // for a transaction that is in progress when the service stops
)

// errChangedMind rolls a transaction back on purpose. Its events must never be delivered.
var errChangedMind = errors.New("the customer changed their mind")

// service is the sample service. It inserts each order together with its event. One worker appends
// all events of a customer, one after the other, so that they have an order.
type service struct {
	client *mongo.Client
	names  names
	orders *mongo.Collection
	box    *outbox.Box
	check  *check.Checker
	rate   int
	limit  int // number of events; 0 means no limit

	beforeLastTenth func(context.Context) // called once before the last tenth of a limited run; may be nil

	aggregate         string       // aggregate type of the events, which selects the topic
	keyPrefix         string       // of the keys; must differ between services that run at the same time
	maxPerTransaction int          // events
	even              bool         // without bursts
	done              atomic.Int64 // committed events
	number            atomic.Int64 // of the newest order; the numbers of a key grow in commit order

	burstRequests chan int // numbers of additional events
}

func newService(client *mongo.Client, n names, checker *check.Checker, rate, limit int) (*service, error) {
	db := client.Database(n.database)
	box, err := outbox.New(db)
	if err != nil {
		return nil, err
	}

	return &service{
		client:            client,
		names:             n,
		orders:            db.Collection(member.OrdersColl),
		box:               box,
		check:             checker,
		rate:              rate,
		limit:             limit,
		burstRequests:     make(chan int, 1),
		aggregate:         aggregate,
		keyPrefix:         "customer",
		maxPerTransaction: defaultPerTransaction,
	}, nil
}

// createCollections creates the collections, so that transactions under load do not have to create
// them.
func (s *service) createCollections(ctx context.Context) error {
	for _, name := range []string{member.OrdersColl, outboxName} {
		if err := s.orders.Database().CreateCollection(ctx, name); err != nil {
			return fmt.Errorf("creating %s.%s: %w", s.names.database, name, err)
		}
	}
	return nil
}

// requestBurst makes the service append n more events as fast as possible. It does nothing if a
// burst is already requested.
func (s *service) requestBurst(n int) {
	select {
	case s.burstRequests <- n:
	default:
	}
}

// Run appends events until the limit is reached or ctx ends. It finishes transactions that are in
// progress.
func (s *service) Run(ctx context.Context) error {
	// Slots that are buffered can be combined into one transaction.
	slots := make(chan struct{}, max(s.maxPerTransaction-defaultPerTransaction, 0))
	group, ctx := errgroup.WithContext(ctx)
	for i := range workers {
		group.Go(func() error {
			if err := s.runWorker(ctx, i, slots); err != nil {
				return fmt.Errorf("the sample service cannot append: %w", err)
			}
			return nil
		})
	}

	s.feedSlots(ctx, slots)
	close(slots)
	return group.Wait()
}

// feedSlots sends one slot for each event when it is due.
func (s *service) feedSlots(ctx context.Context, slots chan<- struct{}) {
	pace := &pace{rate: s.rate, even: s.even}
	extra := 0
	for n := 0; s.limit == 0 || n < s.limit; n++ {
		if s.beforeLastTenth != nil && s.limit > 0 && n == s.limit-s.limit/10-1 {
			s.beforeLastTenth(ctx)
		}
		if !pace.waitNext(ctx, s.burstRequests, &extra) {
			return
		}

		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
	}
}

// runWorker runs one transaction for each slot, or for several slots that are available at the same
// time.
func (s *service) runWorker(ctx context.Context, worker int, slots <-chan struct{}) error {
	transactions := 0
	for range slots {
		transactions++
		n := 1
		for range rand.IntN(s.maxPerTransaction) {
			select {
			case _, ok := <-slots:
				if ok {
					n++
				}
			default:
			}
		}

		// A transaction in progress is finished when the service stops.
		finishCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishTime)
		if transactions%abortEvery == 0 {
			if _, err := s.placeOrders(finishCtx, worker, 1, errChangedMind); err != nil {
				cancel()
				return err
			}
		}
		err := s.placeAll(finishCtx, worker, n)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// placeAll repeats a transaction with new events until one is committed, so that each slot becomes
// an event.
func (s *service) placeAll(ctx context.Context, worker, n int) error {
	for {
		done, err := s.placeOrders(ctx, worker, n, nil)
		if done || err != nil {
			return err
		}
	}
}

// placeOrders inserts n orders and appends their events in one transaction. If rollback is not nil,
// it rolls the transaction back. It reports whether the transaction was committed. It returns an
// error only if a repetition would fail too.
func (s *service) placeOrders(ctx context.Context, worker, n int, rollback error) (bool, error) {
	ids := make([]string, n)
	events := make([]event.Event, n)
	orders := make([]any, n)
	for i := range n {
		id := uuid.Must(uuid.NewV7())
		order := bson.NewObjectID()
		customer := fmt.Sprintf("%s-%d%02d", s.keyPrefix, worker+1, rand.IntN(customers))
		cents := 1 + rand.IntN(20_000)
		number := s.number.Add(1)
		payload := fmt.Appendf(nil, `{"order":%q,"customer":%q,"total":%d.%02d}`,
			order.Hex(), customer, cents/100, cents%100)

		ids[i] = id.String()
		events[i] = event.New(event.Aggregate{Type: s.aggregate, ID: order.Hex()}, "OrderPlaced", event.Bytes("application/json", payload),
			event.WithID(id),
			event.WithKey(customer),
			event.WithHeader(member.NumberHeader, strconv.AppendInt(nil, number, 10)))
		orders[i] = bson.D{
			{Key: "_id", Value: order},
			{Key: "customer", Value: customer},
			{Key: "cents", Value: cents},
			{Key: "event", Value: ids[i]},
			{Key: "number", Value: number},
		}
		// The check gets the events before the outbox, because a record may arrive before the commit returns.
		s.check.Begin(check.Event{
			ID:     ids[i],
			Key:    customer,
			Topics: []string{s.names.topicName(s.aggregate)},
			Value:  payload,
		})
	}

	err := s.box.Transaction(ctx, func(ctx context.Context) error {
		if _, err := s.orders.InsertMany(ctx, orders); err != nil {
			return err
		}
		if err := s.box.Append(ctx, events...); err != nil {
			return err
		}
		return rollback
	})
	now := time.Now()
	if err == nil {
		s.check.Committed(now, ids...)
		s.done.Add(int64(n))
		return true, nil
	}
	if mayBeCommitted(err) {
		s.check.Unknown(ids...)
		return false, ctx.Err()
	}

	s.check.Aborted(ids...)
	if rollback != nil && errors.Is(err, rollback) {
		return false, nil
	}
	if ctx.Err() != nil {
		return false, err
	}
	return false, keepPermanent(err)
}

// mayBeCommitted reports whether a transaction that ended with err may have been committed.
func mayBeCommitted(err error) bool {
	var labeled mongo.LabeledError
	return errors.As(err, &labeled) && labeled.HasErrorLabel("UnknownTransactionCommitResult") ||
		errors.Is(err, context.DeadlineExceeded) || mongo.IsTimeout(err) || mongo.IsNetworkError(err)
}

// keepPermanent returns err if a repetition would fail too, and otherwise nil.
func keepPermanent(err error) error {
	var labeled mongo.LabeledError
	if errors.As(err, &labeled) && labeled.HasErrorLabel("TransientTransactionError") {
		return nil
	}
	return err
}
