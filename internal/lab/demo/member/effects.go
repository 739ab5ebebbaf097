package member

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/consumer"
)

const (
	// OrdersColl is the collection of a service's orders. Each order is inserted together with its
	// event.
	OrdersColl = "orders"

	effectsColl  = "effects"
	countersColl = "effect_counters"

	// NumberHeader is the header with the number of an order within its key, in decimal.
	NumberHeader = "number"
)

// Order contains the fields of an order that JudgeEffects compares. The numbers of a key's orders
// grow in commit order.
type Order struct {
	Event  string `bson:"event"` // id of its event
	Key    string `bson:"customer"`
	Number int64  `bson:"number"`
}

// storedEffect is the effect of one event.
type storedEffect struct {
	Event  string `bson:"event"`
	Key    string `bson:"key"`
	Number int64  `bson:"number"`
	Place  int64  `bson:"place"` // the value of the key's counter, which shows the order of the key's transactions
	By     string `bson:"by"`    // name of the member
}

// handleOrder is the handler. It increments the counter of the key and inserts the effect, in the
// transaction of ctx.
func (w *witness) handleOrder(ctx context.Context, message *consumer.Message) error {
	text, _ := message.Header(NumberHeader)
	number, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return fmt.Errorf("message %s has no number: %w", message.ID, err)
	}

	key := string(message.Key)
	var counter struct {
		Count int64 `bson:"count"`
	}
	increment := bson.D{{Key: "$inc", Value: bson.D{{Key: "count", Value: int64(1)}}}}
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
	// Transactions of one key conflict on the counter, so its value is the place of the effect.
	err = w.db.Collection(countersColl).FindOneAndUpdate(ctx, fieldEquals("_id", key), increment, opts).Decode(&counter)
	if err != nil {
		return fmt.Errorf("counting the effects of a key: %w", err)
	}

	effect := storedEffect{Event: message.ID, Key: key, Number: number, Place: counter.Count, By: w.spec.Name}
	if _, err := w.db.Collection(effectsColl).InsertOne(ctx, effect); err != nil {
		return fmt.Errorf("storing an effect: %w", err)
	}
	return nil
}

// stumblingRetry sets a message aside at its first failure, and retries it soon, so that the members are killed between all
// steps of a retry.
var stumblingRetry = consumer.Retry{Quick: []time.Duration{-1}, Min: 100 * time.Millisecond, Max: 200 * time.Millisecond}

const (
	// stumbleEvery is the distance of the orders of a key for which stumble fails.
	stumbleEvery = 10
	// stumbles is how often it fails for each of them.
	stumbles = 3
)

// stumble is handleOrder, but its transaction fails for every tenth order. The attempts of the message, which the consumer
// stores, decide when to stop.
func (w *witness) stumble(ctx context.Context, message *consumer.Message) error {
	if err := w.handleOrder(ctx, message); err != nil {
		return err
	}
	text, _ := message.Header(NumberHeader)
	if number, err := strconv.ParseInt(string(text), 10, 64); err == nil && number%stumbleEvery == 0 && message.Attempt <= stumbles {
		return fmt.Errorf("attempt %d of order %d stumbles", message.Attempt, number)
	}
	return nil
}

// CountEffects returns the sum of all counters.
func CountEffects(ctx context.Context, db *mongo.Database) (int, error) {
	return sumExpression(ctx, db.Collection(countersColl), "$count")
}

// sumExpression returns the sum of an expression over all documents of a small collection.
func sumExpression(ctx context.Context, coll *mongo.Collection, expr any) (int, error) {
	cur, err := coll.Aggregate(ctx, mongo.Pipeline{{{Key: "$group", Value: bson.D{
		{Key: "_id", Value: nil},
		{Key: "n", Value: bson.D{{Key: "$sum", Value: expr}}},
	}}}})
	if err != nil {
		return 0, fmt.Errorf("adding up %s: %w", coll.Name(), err)
	}

	var sums []struct {
		N int `bson:"n"`
	}
	if err := cur.All(ctx, &sums); err != nil || len(sums) == 0 {
		return 0, err
	}
	return sums[0].N, nil
}

// EffectReport is the result of JudgeEffects. Examples describes the first violations.
type EffectReport struct {
	Orders, Effects                   int
	Lost, Double, OutOfOrder, Phantom int
	Miscounted                        int // keys whose counter differs from their effects: half a transaction
	Examples                          []string
}

const maxExamples = 10

func (r *EffectReport) addExample(format string, args ...any) {
	if len(r.Examples) < maxExamples {
		r.Examples = append(r.Examples, fmt.Sprintf(format, args...))
	}
}

// Err returns nil if every order had its effect once, in the order of its key, and there is no
// other effect.
func (r *EffectReport) Err() error {
	if r.Lost+r.Double+r.OutOfOrder+r.Phantom+r.Miscounted == 0 {
		return nil
	}
	return fmt.Errorf("of %d orders: %d effects lost, %d double, %d out of order, %d of no order, "+
		"%d keys miscounted; for example: %s",
		r.Orders, r.Lost, r.Double, r.OutOfOrder, r.Phantom, r.Miscounted, strings.Join(r.Examples, "; "))
}

// JudgeEffects compares the orders of a database with the effects. No process may write at the same
// time.
func JudgeEffects(ctx context.Context, db *mongo.Database) (*EffectReport, error) {
	var orders []Order
	var effects []storedEffect
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

// judgeEffects compares orders with effects. counts are the counters by key.
func judgeEffects(orders []Order, effects []storedEffect, counts map[string]int64) *EffectReport {
	report := &EffectReport{Orders: len(orders), Effects: len(effects)}
	byEvent := make(map[string]Order, len(orders))
	for _, o := range orders {
		byEvent[o.Event] = o
	}
	slices.SortFunc(effects, func(a, b storedEffect) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), cmp.Compare(a.Place, b.Place))
	})

	handledBy := make(map[string]string, len(effects)) // members by event
	newest := map[string]int64{}                       // numbers by key
	places := map[string]int64{}                       // effects by key
	miscounted := map[string]bool{}                    // by key
	for _, e := range effects {
		// The handler stores the counter of the key with its effect, so a gap shows a lost or doubled transaction.
		places[e.Key]++
		if places[e.Key] != e.Place {
			miscounted[e.Key] = true
		}

		order, known := byEvent[e.Event]
		by, twice := handledBy[e.Event]
		switch {
		case !known || order.Key != e.Key || order.Number != e.Number:
			report.Phantom++
			report.addExample("%s made an effect of event %s (number %d of %s), which no committed order has",
				e.By, e.Event, e.Number, e.Key)
		case twice:
			report.Double++
			report.addExample("event %s (number %d of %s) had an effect by %s and another by %s",
				e.Event, e.Number, e.Key, by, e.By)
		case e.Number < newest[e.Key]:
			report.OutOfOrder++
			report.addExample("%s handled number %d of %s after number %d", e.By, e.Number, e.Key, newest[e.Key])
		}
		if known && !twice {
			handledBy[e.Event] = e.By
			newest[e.Key] = max(newest[e.Key], e.Number)
		}
	}

	for _, o := range orders {
		if _, ok := handledBy[o.Event]; !ok {
			report.Lost++
			report.addExample("event %s (number %d of %s) had no effect", o.Event, o.Number, o.Key)
		}
	}

	for key, n := range counts {
		miscounted[key] = miscounted[key] || n != places[key]
	}
	for key := range places {
		if _, ok := counts[key]; !ok {
			miscounted[key] = true
		}
	}
	for key, is := range miscounted {
		if is {
			report.Miscounted++
			report.addExample("the counter of %s is %d, and it has %d effects", key, counts[key], places[key])
		}
	}
	return report
}
