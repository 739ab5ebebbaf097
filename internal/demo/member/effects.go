package member

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/consumer"
)

const (
	// OrdersColl is the collection of what a service did: each order is inserted together with the event that tells of it.
	OrdersColl = "orders"

	effectsColl  = "effects"
	countersColl = "effect_counters"

	// NumberHeader is the header with the number of an order within its key, in decimal.
	NumberHeader = "number"
)

// Order is what a judge needs of an order. Of one key the numbers of orders grow as they are committed.
type Order struct {
	Event  string `bson:"event"` // id of the event that tells of it
	Key    string `bson:"customer"`
	Number int64  `bson:"number"`
}

// Effect is what a handler did about one event.
type Effect struct {
	Event  string `bson:"event"`
	Key    string `bson:"key"`
	Number int64  `bson:"number"`
	Place  int64  `bson:"place"` // the value of the key's counter: transactions of one key follow one another by it
	By     string `bson:"by"`    // the member
}

// effect is the handler: it counts its key up and inserts the effect, both by the transaction of ctx.
func (w *witness) effect(ctx context.Context, m *consumer.Message) error {
	text, _ := m.Header(NumberHeader)
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return fmt.Errorf("message %s has no number: %w", m.ID, err)
	}
	key := string(m.Key)
	var counter struct {
		Count int64 `bson:"count"`
	}
	up := bson.D{{Key: "$inc", Value: bson.D{{Key: "count", Value: int64(1)}}}}
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
	if err := w.db.Collection(countersColl).FindOneAndUpdate(ctx, eq("_id", key), up, opts).Decode(&counter); err != nil {
		return fmt.Errorf("counting the effects of a key: %w", err)
	}
	e := Effect{Event: m.ID, Key: key, Number: n, Place: counter.Count, By: w.spec.Name}
	if _, err := w.db.Collection(effectsColl).InsertOne(ctx, e); err != nil {
		return fmt.Errorf("writing an effect down: %w", err)
	}
	return nil
}

// CountEffects is how many effects the counters count.
func CountEffects(ctx context.Context, db *mongo.Database) (int, error) {
	return sum(ctx, db.Collection(countersColl), "$count")
}

// sum adds an expression up over a small collection.
func sum(ctx context.Context, coll *mongo.Collection, expr any) (int, error) {
	cur, err := coll.Aggregate(ctx, mongo.Pipeline{{{Key: "$group", Value: bson.D{
		{Key: "_id", Value: nil}, {Key: "n", Value: bson.D{{Key: "$sum", Value: expr}}},
	}}}})
	if err != nil {
		return 0, fmt.Errorf("adding up %s: %w", coll.Name(), err)
	}
	var all []struct {
		N int `bson:"n"`
	}
	if err := cur.All(ctx, &all); err != nil || len(all) == 0 {
		return 0, err
	}
	return all[0].N, nil
}

// EffectReport is what a judge found. Examples are some of what is wrong, in words.
type EffectReport struct {
	Orders, Effects                   int
	Lost, Double, OutOfOrder, Phantom int
	Miscounted                        int // keys whose counter does not agree with their effects: half a transaction
	Examples                          []string
}

const maxExamples = 10

func (r *EffectReport) example(format string, args ...any) {
	if len(r.Examples) < maxExamples {
		r.Examples = append(r.Examples, fmt.Sprintf(format, args...))
	}
}

// Err is nil if every order had its effect once, in the order of its key, and there is no other effect.
func (r *EffectReport) Err() error {
	if r.Lost+r.Double+r.OutOfOrder+r.Phantom+r.Miscounted == 0 {
		return nil
	}
	return fmt.Errorf("of %d orders: %d effects lost, %d double, %d out of order, %d of no order, %d keys miscounted; for example: %s",
		r.Orders, r.Lost, r.Double, r.OutOfOrder, r.Phantom, r.Miscounted, strings.Join(r.Examples, "; "))
}

// JudgeEffects compares the orders of a database with the effects. Nobody may write meanwhile.
func JudgeEffects(ctx context.Context, db *mongo.Database) (*EffectReport, error) {
	var orders []Order
	var effects []Effect
	var counters []struct {
		Key   string `bson:"_id"`
		Count int64  `bson:"count"`
	}
	for name, into := range map[string]any{OrdersColl: &orders, effectsColl: &effects, countersColl: &counters} {
		cur, err := db.Collection(name).Find(ctx, bson.D{})
		if err == nil {
			err = cur.All(ctx, into)
		}
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
	}
	counts := make(map[string]int64, len(counters))
	for _, c := range counters {
		counts[c.Key] = c.Count
	}
	return judgeEffects(orders, effects, counts), nil
}

func judgeEffects(orders []Order, effects []Effect, counts map[string]int64) *EffectReport {
	r := &EffectReport{Orders: len(orders), Effects: len(effects)}
	told := make(map[string]Order, len(orders))
	for _, o := range orders {
		told[o.Event] = o
	}
	slices.SortFunc(effects, func(a, b Effect) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), cmp.Compare(a.Place, b.Place))
	})
	seen := make(map[string]string, len(effects)) // by whom
	newest, places := map[string]int64{}, map[string]int64{}
	odd := map[string]bool{} // keys that are miscounted
	for _, e := range effects {
		if places[e.Key]++; places[e.Key] != e.Place {
			odd[e.Key] = true
		}
		o, known := told[e.Event]
		by, twice := seen[e.Event]
		switch {
		case !known || o.Key != e.Key || o.Number != e.Number:
			r.Phantom++
			r.example("%s made an effect of event %s (number %d of %s), which no committed order has", e.By, e.Event, e.Number, e.Key)
		case twice:
			r.Double++
			r.example("event %s (number %d of %s) had an effect by %s and another by %s", e.Event, e.Number, e.Key, by, e.By)
		case e.Number < newest[e.Key]:
			r.OutOfOrder++
			r.example("%s handled number %d of %s after number %d", e.By, e.Number, e.Key, newest[e.Key])
		}
		if known && !twice {
			seen[e.Event] = e.By
			newest[e.Key] = max(newest[e.Key], e.Number)
		}
	}
	for _, o := range orders {
		if _, ok := seen[o.Event]; !ok {
			r.Lost++
			r.example("event %s (number %d of %s) had no effect", o.Event, o.Number, o.Key)
		}
	}
	for key, n := range counts {
		odd[key] = odd[key] || n != places[key]
	}
	for key := range places {
		if _, ok := counts[key]; !ok {
			odd[key] = true
		}
	}
	for key, is := range odd {
		if is {
			r.Miscounted++
			r.example("the counter of %s is %d, and it has %d effects", key, counts[key], places[key])
		}
	}
	return r
}
