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
	"github.com/outrelay/outrelay/pkg/saga"
)

const (
	// Asked is the aggregate type of the messages that sagas take, Taken that of the events that they emit.
	Asked = "walk"
	Taken = "step"

	sagaName = "walk_sagas"
	askType  = "StepAsked"
	tookType = "StepTaken"

	// atOnce is how many messages share a transaction: with many, hardly two of them would not meet in some saga.
	atOnce = 2
)

// step is the payload of a message and of the event that tells of it.
type step struct {
	Saga int32 `json:"saga"`
	N    int   `json:"n"`
}

// walk is the state of a saga.
type walk struct {
	Done []int `bson:"done"` // numbers of the steps, in the order in which they were taken
}

// Ask is a message that asks a saga for its n-th step, from 1. Its ordering key is the caller's: messages of one saga under
// several keys are handled at the same time.
func Ask(saga int32, n int, key string, opts ...event.Option) event.Event {
	b, _ := json.Marshal(step{saga, n})
	return event.New(Asked, strconv.Itoa(int(saga)), askType, b, append(opts, event.WithKey(key))...)
}

// saga registers the saga.
func (w *witness) saga(ctx context.Context, c *consumer.Consumer) error {
	store, err := saga.NewMongoStore(w.db)
	if err != nil {
		return err
	}
	box, err := w.box()
	if err != nil {
		return err
	}
	reg, err := saga.NewRegistry(&counting{store, w}, saga.WithOutbox(box))
	if err != nil {
		return err
	}
	walks, err := saga.New[walk, int32](reg, sagaName, saga.WithTombstone(time.Hour))
	if err != nil {
		return err
	}
	walks.StartOrHandle(askType, saga.ByJSON(func(s step) int32 { return s.Saga }),
		saga.JSON(func(_ context.Context, in *saga.Instance[walk, int32], s step) error {
			in.State.Done = append(in.State.Done, s.N)
			payload, err := json.Marshal(s)
			if err != nil {
				return err
			}
			in.Emit(event.New(Taken, saga.FormatID(in.ID()), tookType, payload))
			if len(in.State.Done) == w.spec.Steps {
				in.Complete()
			}
			return nil
		}))
	if err := reg.Prepare(ctx); err != nil {
		return err
	}
	return walks.Register(c, consumer.Batch(atOnce))
}

// counting counts the conflicts of a store.
type counting struct {
	saga.Store
	w *witness
}

func (c *counting) count(err error) {
	if errors.Is(err, saga.ErrConflict) {
		c.w.conflicts.Add(1)
	}
}

// Save is that of the store.
func (c *counting) Save(ctx context.Context, name string, r saga.Record) (saga.Record, error) {
	r, err := c.Store.Save(ctx, name, r)
	c.count(err)
	return r, err
}

// Complete is that of the store.
func (c *counting) Complete(ctx context.Context, name string, r saga.Record, keep time.Duration) error {
	err := c.Store.Complete(ctx, name, r, keep)
	c.count(err)
	return err
}

// CountSteps is how many steps the sagas have taken.
func CountSteps(ctx context.Context, db *mongo.Database) (int, error) {
	return sum(ctx, db.Collection(sagaName), bson.D{{Key: "$size", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$state.done", bson.A{}}}}}})
}

// StepReport is what a judge found. Examples are some of what is wrong, in words.
type StepReport struct {
	Sagas, Steps               int
	Lost, Double               int // steps of states
	Unfinished                 int // sagas that are not complete
	Emitted                    int // events, in the outbox
	LostEmitted, DoubleEmitted int
	Examples                   []string
}

func (r *StepReport) example(format string, args ...any) {
	if len(r.Examples) < maxExamples {
		r.Examples = append(r.Examples, fmt.Sprintf(format, args...))
	}
}

// Err is nil if every saga took every step once, told of each once, and is complete.
func (r *StepReport) Err() error {
	if r.Lost+r.Double+r.Unfinished+r.LostEmitted+r.DoubleEmitted == 0 {
		return nil
	}
	return fmt.Errorf("%d sagas: %d steps lost, %d double; %d of their events lost, %d double; %d not complete; for example: %s",
		r.Sagas, r.Lost, r.Double, r.LostEmitted, r.DoubleEmitted, r.Unfinished, strings.Join(r.Examples, "; "))
}

// walked is a saga as it is stored.
type walked struct {
	ID        int32     `bson:"_id"`
	Version   int64     `bson:"version"`
	State     walk      `bson:"state"`
	Completed time.Time `bson:"completedAt"`
}

// JudgeSteps looks for the steps 1 … steps of the sagas 0 … sagas-1, in their states and in the outbox. Nobody may write
// meanwhile, and nothing may have been purged.
func JudgeSteps(ctx context.Context, db *mongo.Database, outboxColl string, sagas, steps int) (*StepReport, error) {
	var all []walked
	cur, err := db.Collection(sagaName).Find(ctx, bson.D{})
	if err == nil {
		err = cur.All(ctx, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the sagas: %w", err)
	}
	var events []struct {
		Payload bson.Binary `bson:"payload"`
	}
	cur, err = db.Collection(outboxColl).Find(ctx, eq("type", tookType))
	if err == nil {
		err = cur.All(ctx, &events)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the events of sagas: %w", err)
	}
	told := make([]step, len(events))
	for i, e := range events {
		if err := json.Unmarshal(e.Payload.Data, &told[i]); err != nil {
			return nil, fmt.Errorf("reading an event of a saga: %w", err)
		}
	}
	return judgeSteps(all, told, sagas, steps), nil
}

func judgeSteps(all []walked, told []step, sagas, steps int) *StepReport {
	r := &StepReport{Sagas: len(all), Emitted: len(told)}
	taken, emitted := map[step]int{}, map[step]int{}
	for _, s := range all {
		r.Steps += len(s.State.Done)
		for _, n := range s.State.Done {
			taken[step{s.ID, n}]++
		}
		if s.Completed.IsZero() {
			r.Unfinished++
			r.example("saga %d is not complete: it took %d of %d steps", s.ID, len(s.State.Done), steps)
		}
		if s.Version != int64(len(s.State.Done)) {
			r.example("saga %d has changed %d times and taken %d steps", s.ID, s.Version, len(s.State.Done))
			r.Lost++
		}
	}
	for _, s := range told {
		emitted[s]++
	}
	for id := range int32(sagas) {
		for n := 1; n <= steps; n++ {
			s := step{id, n}
			r.compare(s, taken[s], "was taken", &r.Lost, &r.Double)
			r.compare(s, emitted[s], "was told of", &r.LostEmitted, &r.DoubleEmitted)
			delete(taken, s)
			delete(emitted, s)
		}
	}
	for _, extra := range []map[step]int{taken, emitted} {
		for s := range extra {
			r.Double++
			r.example("step %d of saga %d is there, and nobody asked for it", s.N, s.Saga)
		}
	}
	slices.Sort(r.Examples)
	return r
}

func (r *StepReport) compare(s step, times int, what string, lost, double *int) {
	switch {
	case times == 0:
		*lost++
		r.example("step %d of saga %d %s never", s.N, s.Saga, what)
	case times > 1:
		*double += times - 1
		r.example("step %d of saga %d %s %d times", s.N, s.Saga, what, times)
	}
}
