package member

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

const (
	// Asked is the aggregate type of the messages that sagas handle.
	Asked = "walk"
	// Taken is the aggregate type of the events that sagas emit.
	Taken = "step"

	sagaName = "walk_sagas"

	// stepBatch is the number of messages in one transaction. With more, almost all transactions
	// would conflict in some saga.
	stepBatch = 2
)

// step is the payload of a message, and of the event that its saga emits.
type step struct {
	Saga int32 `json:"saga"`
	N    int   `json:"n"`
}

// sagaState is the state of a saga.
type sagaState struct {
	Done []int `bson:"done"` // numbers of the steps, in the order in which they were taken
}

var (
	stepAsked = event.Type[step]{Aggregate: Asked, Name: "StepAsked"}
	stepTaken = event.Type[step]{Aggregate: Taken, Name: "StepTaken"}
)

// Ask returns a message that requests the n-th step of a saga, counted from 1. The caller chooses
// the ordering key: messages of one saga with several keys are handled concurrently.
func Ask(saga int32, n int, key string, opts ...event.Option) event.Event {
	return stepAsked.New(strconv.Itoa(int(saga)), step{saga, n}, append(opts, event.WithKey(key))...)
}

// registerSaga registers the saga as the handler of the consumer.
func (w *witness) registerSaga(target *consumer.Consumer) error {
	box, err := outbox.New(w.db)
	if err != nil {
		return err
	}

	walks := saga.Define[sagaState](sagaName, saga.WithIDs(saga.Int32IDs), saga.WithTombstone(time.Hour))
	// Messages of a saga have different keys, so any of them may arrive first and start it.
	saga.StartOrOn(walks, stepAsked, func(_ context.Context, instance *saga.Instance[sagaState], step step) error {
		instance.State.Done = append(instance.State.Done, step.N)
		instance.Emit(stepTaken.New(instance.ID(), step))

		if len(instance.State.Done) == w.spec.Steps {
			instance.Complete()
		}
		return nil
	}, saga.By(func(step step) string { return strconv.Itoa(int(step.Saga)) }))

	handler, err := walks.Handler(box)
	if err != nil {
		return err
	}
	return target.Handle(walks.Name(), handler, consumer.WithSharedTransaction(stepBatch), consumer.WithMiddleware(w.countConflicts))
}

// countConflicts counts the steps that conflicted with another step.
func (w *witness) countConflicts(next consumer.HandlerFunc) consumer.HandlerFunc {
	return func(ctx context.Context, message *consumer.Message) error {
		err := next(ctx, message)
		if errors.Is(err, saga.ErrConflict) {
			w.conflicts.Add(1)
		}
		return err
	}
}

// CountSteps returns the number of steps that all sagas have taken.
func CountSteps(ctx context.Context, db *mongo.Database) (int, error) {
	done := bson.D{{Key: "$ifNull", Value: bson.A{"$state.done", bson.A{}}}}
	return sumExpression(ctx, db.Collection(sagaName), bson.D{{Key: "$size", Value: done}})
}

// StepReport is the result of JudgeSteps. Examples describes the first violations.
type StepReport struct {
	Sagas, Steps               int
	Lost, Double               int // steps in the states
	Unfinished                 int // sagas that are not complete
	Emitted                    int // events in the outbox
	LostEmitted, DoubleEmitted int
	Examples                   []string
}

func (r *StepReport) addExample(format string, args ...any) {
	if len(r.Examples) < maxExamples {
		r.Examples = append(r.Examples, fmt.Sprintf(format, args...))
	}
}

// Err returns nil if every saga took every step once, emitted one event for each, and is complete.
func (r *StepReport) Err() error {
	if r.Lost+r.Double+r.Unfinished+r.LostEmitted+r.DoubleEmitted == 0 {
		return nil
	}
	return fmt.Errorf("%d sagas: %d steps lost, %d double; %d of their events lost, %d double; "+
		"%d not complete; for example: %s",
		r.Sagas, r.Lost, r.Double, r.LostEmitted, r.DoubleEmitted, r.Unfinished, strings.Join(r.Examples, "; "))
}

// storedSaga is a saga as it is stored.
type storedSaga struct {
	ID        int32     `bson:"_id"`
	Version   int64     `bson:"version"`
	State     sagaState `bson:"state"`
	Completed time.Time `bson:"completedAt"`
}

// JudgeSteps checks the steps 1 to steps of the sagas 0 to sagas-1, in their states and in the
// outbox. No process may write at the same time, and no envelope may have been purged.
func JudgeSteps(ctx context.Context, db *mongo.Database, outboxColl string, sagas, steps int) (*StepReport, error) {
	var stored []storedSaga
	cur, err := db.Collection(sagaName).Find(ctx, bson.D{})
	if err == nil {
		err = cur.All(ctx, &stored)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the sagas: %w", err)
	}

	var events []struct {
		Payload string `bson:"payload"`
	}
	cur, err = db.Collection(outboxColl).Find(ctx, fieldEquals("type", stepTaken.Name))
	if err == nil {
		err = cur.All(ctx, &events)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the events of sagas: %w", err)
	}
	emitted := make([]step, len(events))
	for i, e := range events {
		if err := json.Unmarshal([]byte(e.Payload), &emitted[i]); err != nil {
			return nil, fmt.Errorf("parsing an event of a saga: %w", err)
		}
	}
	return judgeSteps(stored, emitted, sagas, steps), nil
}

// judgeSteps checks the stored sagas, and the steps in the emitted events.
func judgeSteps(stored []storedSaga, emitted []step, sagas, steps int) *StepReport {
	report := &StepReport{Sagas: len(stored), Emitted: len(emitted)}

	takenTimes := map[step]int{}
	for _, s := range stored {
		done := len(s.State.Done)
		report.Steps += done
		for _, n := range s.State.Done {
			takenTimes[step{s.ID, n}]++
		}
		if s.Completed.IsZero() {
			report.Unfinished++
			report.addExample("saga %d is not complete: it took %d of %d steps", s.ID, done, steps)
		}
		if s.Version != int64(done) {
			report.addExample("saga %d has changed %d times and taken %d steps", s.ID, s.Version, done)
			report.Lost++
		}
	}

	emittedTimes := map[step]int{}
	for _, s := range emitted {
		emittedTimes[s]++
	}

	for id := range int32(sagas) {
		for n := 1; n <= steps; n++ {
			step := step{id, n}
			report.compareStep(step, takenTimes[step], "was taken", &report.Lost, &report.Double)
			report.compareStep(step, emittedTimes[step], "was emitted", &report.LostEmitted, &report.DoubleEmitted)
			delete(takenTimes, step)
			delete(emittedTimes, step)
		}
	}

	// Only steps that were never requested are left.
	for _, extra := range []map[step]int{takenTimes, emittedTimes} {
		for s := range extra {
			report.Double++
			report.addExample("step %d of saga %d exists, but was never requested", s.N, s.Saga)
		}
	}
	slices.Sort(report.Examples)
	return report
}

// compareStep counts a step that happened never, or several times.
func (r *StepReport) compareStep(step step, times int, what string, lost, double *int) {
	switch {
	case times == 0:
		*lost++
		r.addExample("step %d of saga %d %s never", step.N, step.Saga, what)
	case times > 1:
		*double += times - 1
		r.addExample("step %d of saga %d %s %d times", step.N, step.Saga, what, times)
	}
}
