package nodes

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/activity"
)

// HistoryKept is the number of samples of a slot that are kept, one a minute: a day, in about 50 KB.
const HistoryKept = 24 * 60

// Sample describes one minute of a slot, or of all slots of a watcher.
type Sample struct {
	At   time.Time `bson:"t"` // when the minute began
	Rate float64   `bson:"r"` // acked records per second
	LagS float64   `bson:"l"` // the greatest lag of the minute
	// P50MS and P99MS are the latency from the commit to the ack, in milliseconds; 0 if nothing was measured. Of several slots, they
	// are the greatest.
	P50MS float64 `bson:"p50,omitempty"`
	P99MS float64 `bson:"p99,omitempty"`
}

// History is the collection `history` of the state database, with one document for each slot, which its owner writes:
// throughput and lag of the last day, and the activity of the last minute.
type History struct{ coll *mongo.Collection }

// NewHistory returns the history in coll.
func NewHistory(coll *mongo.Collection) *History { return &History{coll} }

// Append adds a sample of a slot and drops the oldest one above the limit.
func (h *History) Append(ctx context.Context, slot string, sample Sample) error {
	push := bson.D{{Key: "$push", Value: bson.D{{Key: "samples", Value: bson.D{
		{Key: "$each", Value: []Sample{sample}},
		{Key: "$slice", Value: -HistoryKept},
	}}}}}
	_, err := h.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: slot}}, push, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("adding to the history of slot %s: %w", slot, err)
	}
	return nil
}

// Read returns the newest samples of each slot of a watcher, oldest first. It adds the rates of the slots in the same minute, and takes
// the greatest lag.
func (h *History) Read(ctx context.Context, watcher string, newest int) ([]Sample, error) {
	type document struct {
		Samples []Sample `bson:"samples"`
	}
	docs, err := mongodb.FindAll[document](ctx, h.coll, "reading the history of watcher "+watcher, mongodb.OfSlots(watcher),
		options.Find().SetProjection(bson.D{{Key: "samples", Value: bson.D{{Key: "$slice", Value: bson.A{"$samples", -newest}}}}}))
	if err != nil {
		return nil, err
	}

	// Slots may report in the same minute, but not in the same second.
	byMinute := map[int64]Sample{}
	for _, d := range docs {
		for _, s := range d.Samples {
			minute := s.At.Truncate(time.Minute)
			sum := byMinute[minute.Unix()]
			byMinute[minute.Unix()] = Sample{
				At: minute, Rate: sum.Rate + s.Rate, LagS: max(sum.LagS, s.LagS), P50MS: max(sum.P50MS, s.P50MS), P99MS: max(sum.P99MS, s.P99MS),
			}
		}
	}
	list := make([]Sample, 0, len(byMinute))
	for _, s := range byMinute {
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b Sample) int { return cmp.Compare(a.At.Unix(), b.At.Unix()) })
	return list, nil
}

// SaveActivity replaces the activity of a slot.
func (h *History) SaveActivity(ctx context.Context, slot string, report activity.Report) error {
	set := bson.D{{Key: "$set", Value: bson.D{{Key: "activity", Value: report}}}}
	_, err := h.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: slot}}, set, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("writing the activity of slot %s: %w", slot, err)
	}
	return nil
}

// ReadSlotActivity returns the last report of a slot. Without one, it returns the zero report.
func (h *History) ReadSlotActivity(ctx context.Context, slot string) (activity.Report, error) {
	list, err := h.findActivity(ctx, bson.D{{Key: "_id", Value: slot}})
	if err != nil || len(list) == 0 {
		return activity.Report{}, err
	}
	return list[0].report, nil
}

// staleActivity is the age at which the rates of a report are out of date. An owner writes a report every five
// seconds until its rates are 0.
const staleActivity = 30 * time.Second

// ReadActivity returns the last report of each slot of a watcher. Slots without one are missing. The rates in a report are 0
// if its owner has stopped. The records of the last hour are those before the time of the server.
func (h *History) ReadActivity(ctx context.Context, watcher string) (list []activity.Report, err error) {
	reports, err := h.findActivity(ctx, mongodb.OfSlots(watcher))
	for i := range reports {
		report := &reports[i].report
		for j := range report.Topics {
			report.Topics[j].AlignRecent(report.At, reports[i].now)
		}
		list = append(list, *report)
	}
	return list, err
}

// foundReport is a report and the time of the server.
type foundReport struct {
	report activity.Report
	now    time.Time
}

func (h *History) findActivity(ctx context.Context, filter bson.D) (reports []foundReport, err error) {
	type document struct {
		Activity *activity.Report `bson:"activity"`
		Now      time.Time        `bson:"now"`
	}

	docs, err := mongodb.FindAll[document](ctx, h.coll, "reading the activity of slots", filter,
		options.Find().SetProjection(bson.D{{Key: "activity", Value: 1}, {Key: "now", Value: "$$NOW"}}))

	for _, d := range docs {
		if d.Activity == nil {
			continue
		}
		// A slot without an owner has no current rate.
		if d.Now.Sub(d.Activity.At) > staleActivity {
			d.Activity.ForgetRates()
		}
		reports = append(reports, foundReport{*d.Activity, d.Now})
	}
	return reports, err
}
