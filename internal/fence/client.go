package fence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/record"
)

// Errors of a take-over and of what follows it. Others wrap a kafka.Error, by whose code the caller classifies.
var (
	// ErrStuck says that a transaction of this transactional id does not end: a partition that it covers cannot take
	// its marker (CONCURRENT_TRANSACTIONS).
	ErrStuck = errors.New("the transactional id has an unfinished transaction")
	// ErrFenced says that somebody else has taken the transactional id. An owner whose lease is confirmed takes over again;
	// three times within a minute means that another deployment uses the same id (N5).
	ErrFenced = errors.New("the transactional id was taken by another owner")
	// ErrSelfMove says that the owner's own transaction hangs: drain, NextGeneration, save, go on (N4).
	ErrSelfMove = errors.New("the owner's transactional id hangs and has to be left")
	// ErrNoHealthy says that no partition was fit to take a marker.
	ErrNoHealthy = errors.New("no partition is healthy")
	// ErrDeadline says that a step was given up for lack of time, not by an answer of the coordinator.
	ErrDeadline = errors.New("no usable answer in time")
)

// Producer is a producer id and its epoch.
type Producer struct {
	ID    int64
	Epoch int16
}

func (p Producer) String() string { return fmt.Sprintf("producer id %d epoch %d", p.ID, p.Epoch) }

// Anew asks Init for the next epoch whoever holds the id. (The zero Producer is a valid identity, so never a default.)
var Anew = Producer{ID: -1, Epoch: -1}

// Client asks Kafka the questions of a take-over. It is safe for concurrent use and must not be copied after first use.
type Client struct {
	Kafka     *kafka.Client    // Addr is used; its Transport should be the one below
	Transport *kafka.Transport // all requests go through it
	// Timeout bounds a request for one topic or partition; each further one adds a millisecond. Defaults to 5 s.
	Timeout time.Duration

	mu     sync.Mutex
	minISR map[string]minISR
}

// NewClient returns a client that uses the connections of k.
func NewClient(k *kafkawire.Client) *Client {
	addr := kafka.TCP(k.Brokers()...)
	return &Client{Kafka: &kafka.Client{Addr: addr, Transport: k.Transport()}, Transport: k.Transport()}
}

// perItem is the time that a request gets for each topic or partition in it.
const perItem = time.Millisecond

// bounded is ctx with the time that a request for so many topics or partitions may take.
func (c *Client) bounded(ctx context.Context, items int) (context.Context, context.CancelFunc) {
	least := c.Timeout
	if least <= 0 {
		least = 5 * time.Second
	}
	return context.WithTimeout(ctx, least+time.Duration(items)*perItem)
}

func (c *Client) roundTrip(ctx context.Context, items int, req kafka.Request) (kafka.Response, error) {
	ctx, cancel := c.bounded(ctx, items)
	defer cancel()
	return c.Transport.RoundTrip(ctx, c.Kafka.Addr, req)
}

// Patience says how long a step goes on asking.
type Patience struct {
	// Stuck is how long CONCURRENT_TRANSACTIONS is tolerated. Defaults to 10 s (N4).
	Stuck time.Duration
	// Total bounds the step as a whole; 0 is no bound: a coordinator that is away is waited for.
	Total time.Duration
	// Gate reports whether the lease is valid; nil is always. While it is not, the step waits.
	Gate func() bool
	// Waiting is called once when a step has been retried for 5 s, with the step's name and its last error.
	Waiting func(step string, err error)
}

const (
	stuckLimit = 10 * time.Second
	sayAfter   = 5 * time.Second
	gatePoll   = 10 * time.Millisecond
)

// open waits until the gate is open.
func (p Patience) open(ctx context.Context) error {
	for ctx.Err() == nil && p.Gate != nil && !p.Gate() {
		pause(ctx, gatePoll)
	}
	return context.Cause(ctx)
}

// do repeats try until it succeeds, fails for good, or patience ends.
func (p Patience) do(ctx context.Context, step string, try func(context.Context) error, refresh func(context.Context)) error {
	stuck := cmp.Or(p.Stuck, stuckLimit)
	var stuckSince time.Time
	begin, said := time.Now(), false
	for n := 1; ; n++ {
		if err := p.open(ctx); err != nil {
			return err
		}
		err := try(ctx)
		now := time.Now()
		wait := min(time.Duration(n)*3*time.Millisecond, 100*time.Millisecond)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case isFenced(err):
			return fmt.Errorf("%s: %w (%w)", step, ErrFenced, err)
		case errors.Is(err, kafka.ConcurrentTransactions):
			if stuckSince.IsZero() {
				stuckSince = now
			}
			if now.Sub(stuckSince) >= stuck {
				return fmt.Errorf("%s: %w", step, ErrStuck)
			}
		case !retriable(err):
			return fmt.Errorf("%s: %w", step, err)
		default:
			wait = min(time.Duration(n)*20*time.Millisecond, time.Second)
			refresh(ctx)
		}
		if p.Total > 0 && now.Sub(begin) >= p.Total {
			if !stuckSince.IsZero() {
				return fmt.Errorf("%s: %w", step, ErrStuck)
			}
			return fmt.Errorf("%s: %w: %w", step, ErrDeadline, err)
		}
		if !said && now.Sub(begin) >= sayAfter && p.Waiting != nil {
			said = true
			p.Waiting(step, err)
		}
		pause(ctx, wait)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// notAttempted is OPERATION_NOT_ATTEMPTED: the partition was not added because of another one. kafka-go calls it
// otherwise.
const notAttempted = kafka.Error(55)

func isFenced(err error) bool {
	return errors.Is(err, kafka.ProducerFenced) || errors.Is(err, kafka.InvalidProducerEpoch)
}

// retriable reports whether asking again may help. An error that is no answer of a broker is one of the way to it: a
// coordinator that died, a connection that broke. Taking a hopeless one for retriable costs patience, the opposite
// would give up a take-over over a restart of a broker.
func retriable(err error) bool {
	var code kafka.Error
	if !errors.As(err, &code) {
		return true
	}
	return code == kafka.BrokerNotAvailable || code == kafka.UnknownTopicOrPartition || code == kafka.Unknown || code.Temporary()
}

// lost reports whether the coordinator no longer knows the producer id under this transactional id.
func lost(err error) bool { return errors.Is(err, kafka.InvalidProducerIDMapping) }

// Event is something an operator may want to know. It is no error: the take-over goes on.
type Event struct {
	Kind  EventKind
	Topic string   // of the kinds that concern a partition
	Text  string   // for people: what happened, to what, and what to do
	Alarm bool     // of ProducerIDChanged: it was not to be expected
	Old   Producer // of ProducerIDChanged
}

// EventKind names an event; it is fit for a log field and a metric label.
type EventKind string

// The events.
const (
	// OutOfRange: the stored offset is not in the partition; it was read from the start of its log (N8, N9).
	OutOfRange EventKind = "read_back_out_of_range"
	// Truncated: the tail is longer than the bound; a stretch of it was not read back (N8).
	Truncated EventKind = "read_back_truncated"
	// ProducerIDChanged: the coordinator forgot an earlier producer id, which can be fenced no more (N5).
	ProducerIDChanged EventKind = "producer_id_changed"
	// GenerationMoved: the transactional id was left for the one of the next generation.
	GenerationMoved EventKind = "generation_moved"
	// Hung: the first step of a take-over hung; what cannot be fenced waits.
	Hung EventKind = "transactional_id_hung"
	// Waiting: a step has been repeated for seconds.
	Waiting EventKind = "take_over_waiting"
)

func tpString(tp record.TopicPartition) string { return fmt.Sprintf("%s-%d", tp.Topic, tp.Partition) }
