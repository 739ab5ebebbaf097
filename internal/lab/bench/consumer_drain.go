package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	kafka "github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

const (
	modeReader  = "reader"  // a loop with kafka-go's Reader: one transaction per record
	modeHandler = "handler" // a handler of pkg/consumer

	marksCollection = "marks" // of the Reader's loop

	groupRebalance  = 5 * time.Second
	readerCommits   = time.Second // the Reader commits its offsets as often as the consumer does by default
	longestRecorded = int64(time.Minute / time.Microsecond)
)

// handling configures a handler.
type handling struct {
	Inbox bool `json:"inbox"` // Optimistic; otherwise none, but also in a transaction
	Alone bool `json:"alone"` // one message at a time in each transaction, one transaction at a time

	Marked bool `json:"marked,omitempty"` // the Reader's loop inserts a mark of each record too

	Unbatched bool `json:"unbatched,omitempty"` // one message in each transaction, the default of consumer.WithSharedTransaction

	Transport string `json:"transport,omitempty"` // kafka-go or franz; "" is the default of the consumer
	Moves     bool   `json:"moves,omitempty"`     // a second member joins and leaves
}

// effects is the common part of both modes: one insert per record. It records when the first insert started and when
// enough records were handled.
type effects struct {
	spec
	client *mongo.Client
	coll   *mongo.Collection

	mu    sync.Mutex
	out   outcome
	delay *hdrhistogram.Histogram
	last  time.Time // when a record was last handled
	stop  context.CancelFunc
}

func newEffects(ctx context.Context, spec spec) (*effects, error) {
	client, err := connect(ctx, spec.MongoDB)
	if err != nil {
		return nil, err
	}
	return &effects{
		spec: spec, client: client, coll: client.Database(spec.DB).Collection(spec.Collection),
		delay: hdrhistogram.New(1, longestRecorded, 3),
	}, nil
}

func (e *effects) disconnect() { _ = e.client.Disconnect(context.Background()) }

// applyEffect makes the effect of one record.
func (e *effects) applyEffect(ctx context.Context, key, value []byte) error {
	e.markStarted()
	number, _ := eventNumber(value)
	_, err := e.coll.InsertOne(ctx, bson.D{{Key: "of", Value: string(key)}, {Key: "number", Value: number}})
	return err
}

func (e *effects) markStarted() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.out.Began == 0 {
		e.out.Began = time.Now().UnixNano()
	}
}

// countDone counts n records of a committed transaction.
func (e *effects) countDone(n int, took time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	// The rate is that of the time until the end. Lanes that finish their transactions afterwards do not belong to it.
	if e.out.Ended != 0 {
		return
	}
	_ = e.delay.RecordValue(min(took.Microseconds(), longestRecorded))
	e.noteStallLocked(time.Now())

	e.out.Goes++
	e.out.Events += n
	if e.out.Events >= e.Events {
		e.out.Ended = time.Now().UnixNano()
		e.stop()
	}
}

// leastStall is the least time without a handled record that counts as a stall.
const leastStall = 100 * time.Millisecond

// noteStallLocked records how long no record was handled before now.
func (e *effects) noteStallLocked(now time.Time) {
	if !e.last.IsZero() {
		stall := now.Sub(e.last)
		ms := float64(stall.Microseconds()) / 1000
		e.out.Stall = max(e.out.Stall, ms)
		if stall >= leastStall {
			e.out.Stalled += ms
		}
	}
	e.last = now
}

// finalOutcome returns the outcome, or an error if too few records were handled.
func (e *effects) finalOutcome(err error) (outcome, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.out.P50, e.out.P99 = quantileMS(e.delay, 50), quantileMS(e.delay, 99)

	if e.out.Ended == 0 {
		return e.out, errors.Join(fmt.Errorf("it ended after %d of %d records", e.out.Events, e.Events), err)
	}
	return e.out, nil
}

// readerLoop is the loop of a service without outrelay: fetch, one transaction with its effect, commit the offset. Without a mark, a
// duplicate record has its effect twice.
type readerLoop struct{ *effects }

func (r readerLoop) run(ctx context.Context) (outcome, error) {
	ctx, r.stop = context.WithCancel(ctx)
	defer r.stop()
	reader := kafka.NewReader(kafka.ReaderConfig{
		Brokers: r.Kafka, GroupID: r.Group, GroupTopics: []string{r.Topic}, CommitInterval: readerCommits,
		RebalanceTimeout: groupRebalance, MaxWait: fetchWait, StartOffset: kafka.FirstOffset,
	})
	err := r.handleRecords(ctx, reader)
	return r.finalOutcome(errors.Join(err, reader.Close()))
}

func (r readerLoop) handleRecords(ctx context.Context, reader *kafka.Reader) error {
	for ctx.Err() == nil {
		message, err := reader.FetchMessage(ctx)
		if err != nil {
			return err
		}

		began := time.Now()
		err = transaction.Run(ctx, r.client, func(ctx context.Context) error {
			if err := r.insertMark(ctx, message); err != nil {
				return err
			}
			return r.applyEffect(ctx, message.Key, message.Value)
		})
		if err != nil {
			return err
		}

		r.countDone(1, time.Since(began))

		if err := reader.CommitMessages(ctx, message); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// insertMark marks a message as handled by its id, if that is measured.
func (r readerLoop) insertMark(ctx context.Context, message kafka.Message) error {
	if !r.Handling.Marked {
		return nil
	}
	r.markStarted()
	_, err := r.coll.Database().Collection(marksCollection).InsertOne(ctx, bson.D{{Key: "_id", Value: string(message.Headers[0].Value)}})
	return err
}

// handlerLoop is a handler of pkg/consumer with the same effect.
type handlerLoop struct {
	*effects
	telemetry.Discard
}

// Measure counts the messages of each transaction that has committed.
func (h handlerLoop) Measure(measurement telemetry.Measurement) {
	if measurement.Metric == telemetry.Handled {
		h.countDone(int(measurement.N), measurement.Took)
	}
}

func (h handlerLoop) run(ctx context.Context) (outcome, error) {
	ctx, h.stop = context.WithCancel(ctx)
	defer h.stop()
	opts := []consumer.Option{
		consumer.WithBrokers(h.Kafka...), consumer.WithTopics(h.Topic), consumer.WithTelemetry(h),
		consumer.WithLogger(slog.New(slog.DiscardHandler)),
	}

	var problems []error
	opts = append(opts, consumer.WithErrorHook(func(_ context.Context, err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		problems = append(problems, err)
	}))

	if h.Handling.Transport == transportFranz {
		opts = append(opts, franz.Use())
	}
	switch {
	case h.Handling.Alone:
		opts = append(opts, consumer.WithConcurrency(1))
	case !h.Handling.Unbatched:
		opts = append(opts, consumer.WithSharedTransaction(64))
	}
	// Without an inbox, the effect is still written in a transaction, so that only the inbox differs.
	mode := consumer.WithMode(consumer.Transactional)
	if !h.Handling.Inbox {
		mode = consumer.WithMode(consumer.AtLeastOnceInTransaction)
	}

	opts = append(opts, mode)
	consumer, err := h.newMember(opts)
	if err != nil {
		return outcome{}, err
	}

	var joining sync.WaitGroup
	// A second member joins and leaves until the drain is over.
	if h.Handling.Moves {
		joining.Go(func() {
			if err := h.joinAndLeave(ctx, opts); err != nil {
				h.mu.Lock()
				defer h.mu.Unlock()
				problems = append(problems, err)
			}
		})
	}
	err = consumer.Run(ctx)
	h.stop()
	joining.Wait()
	h.mu.Lock()
	err = errors.Join(append(problems, err)...)
	h.mu.Unlock()
	return h.finalOutcome(err)
}

// newMember returns a member of the group.
func (h handlerLoop) newMember(opts []consumer.Option) (*consumer.Consumer, error) {
	member, err := consumer.New(h.Group, h.client.Database(h.DB), opts...)
	if err != nil {
		return nil, err
	}
	handler := func(ctx context.Context, message *consumer.Message) error {
		return h.applyEffect(ctx, message.Key, message.Value)
	}
	return member, member.Handle("effects", consumer.Func(handler, "*"))
}

// joinAndLeave runs a second member for one turn after another, with a turn between them, until ctx ends.
func (h handlerLoop) joinAndLeave(ctx context.Context, opts []consumer.Option) error {
	for retry.Sleep(ctx, memberTurn) == nil {
		consumer, err := h.newMember(opts)
		if err != nil {
			return err
		}

		turn, cancel := context.WithTimeout(ctx, memberTurn)
		err = consumer.Run(turn)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}
