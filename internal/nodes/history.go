package nodes

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// historyKept is the number of samples of a slot that are kept, one a minute: a day, in about 50 KB.
const historyKept = 24 * 60

// Sample describes one minute of a slot, or of all slots of a watcher.
type Sample struct {
	At   time.Time `bson:"t"` // when the minute began
	Rate float64   `bson:"r"` // acked records per second
	LagS float64   `bson:"l"` // the greatest age of the oldest event that was not settled
}

// History is the collection `history` of the state database: throughput and lag of the last day, which the owners write.
type History struct{ coll *mongo.Collection }

// NewHistory returns the history in coll.
func NewHistory(coll *mongo.Collection) *History { return &History{coll} }

// Append adds a sample of a slot and drops the oldest one above the limit.
func (h *History) Append(ctx context.Context, slot string, s Sample) error {
	push := bson.D{{Key: "$push", Value: bson.D{{Key: "samples", Value: bson.D{
		{Key: "$each", Value: []Sample{s}},
		{Key: "$slice", Value: -historyKept},
	}}}}}
	_, err := h.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: slot}}, push, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("adding to the history of slot %s: %w", slot, err)
	}
	return nil
}

// Read returns the samples of a watcher, oldest first. It adds the rates of its slots in the same minute, and takes the greatest lag.
func (h *History) Read(ctx context.Context, watcher string) ([]Sample, error) {
	type document struct {
		Samples []Sample `bson:"samples"`
	}
	ofWatcher := bson.D{{Key: "_id", Value: bson.Regex{Pattern: "^" + regexp.QuoteMeta(watcher) + "/"}}}
	docs, err := mongodb.FindAll[document](ctx, h.coll, "reading the history of watcher "+watcher, ofWatcher)
	if err != nil {
		return nil, err
	}

	byMinute := map[int64]Sample{}
	for _, d := range docs {
		for _, s := range d.Samples {
			minute := s.At.Truncate(time.Minute)
			sum := byMinute[minute.Unix()]
			byMinute[minute.Unix()] = Sample{At: minute, Rate: sum.Rate + s.Rate, LagS: max(sum.LagS, s.LagS)}
		}
	}
	list := make([]Sample, 0, len(byMinute))
	for _, s := range byMinute {
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b Sample) int { return cmp.Compare(a.At.Unix(), b.At.Unix()) })
	return list, nil
}
