package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack"
)

var purgeScenario = Scenario{
	Name:       "purge",
	Promise:    "delivered envelopes are removed automatically under load, unsent ones are not, and a purge hardly slows down publishing",
	events:     purgePairs * 7_000,
	rate:       1000,
	ownServers: true,
	relayConfig: map[string]any{
		"start":     "now",
		"retention": purgeRetention.String(),
		"purge":     map[string]any{"interval": purgeLook.String(), "rate": purgeRate},
	},
	run: runPurge,
}

// PurgeFinding is the result of scenario purge: pairs of measurements, one during a purge and one
// without.
type PurgeFinding struct {
	Outcome
	Purged     int       `json:"purged"`     // removed envelopes
	PurgeRate  float64   `json:"purge_rate"` // envelopes per second during purges
	WithP50MS  float64   `json:"with_p50_ms"`
	WithP99MS  float64   `json:"with_p99_ms"` // medians over the measurements: from commit to the consumer
	NoneP50MS  float64   `json:"without_p50_ms"`
	NoneP99MS  float64   `json:"without_p99_ms"`
	Ratios     []float64 `json:"p99_ratios"` // with ÷ without, of each pair
	Ratio      float64   `json:"p99_ratio"`  // their median
	Kept       int       `json:"kept"`       // unsent envelopes of the same age, which must all stay
	Overstayed int       `json:"overstayed"` // envelopes that should have been removed
}

func (f *PurgeFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("purged            %s envelopes, %s a second; %d unsent ones of the same age stayed",
			formatThousands(f.Purged), formatThousands(int(f.PurgeRate)), f.Kept),
		fmt.Sprintf("commit to Kafka   with a purge p50 %.1f ms p99 %.1f ms, without p50 %.1f ms p99 %.1f ms",
			f.WithP50MS, f.WithP99MS, f.NoneP50MS, f.NoneP99MS),
		fmt.Sprintf("p99 ratio         median %.2f of %v", f.Ratio, f.Ratios),
	}
}

const (
	purgePairs     = 11
	purgeRetention = 11 * time.Minute // above the margin that the purge keeps for long transactions
	purgeRate      = 40_000           // the limit; a purge begins at a sixteenth of it, more than twice the append rate
	purgeLook      = 200 * time.Millisecond
	purgeRatio     = 1.25                   // maximum median of the ratios
	purgeEdge      = 500 * time.Millisecond // around a purge, excluded from both measurements
	purgeWait      = 5 * time.Second        // maximum duration of a measurement without a purge
	purgeLeast     = 200                    // minimum number of records in a measurement, for the percentiles
	protected      = 200                    // unsent envelopes as old as the purged ones
)

func runPurge(ctx context.Context, s *stage) (Finding, error) {
	f := &PurgeFinding{}
	perPair := max(s.options.Events/purgePairs, 1)
	// Envelopes that get this timestamp are older than the retention, so they may be purged at once.
	old := &oldEnvelopes{stage: s, stamp: uint32(time.Now().Add(-purgeRetention - time.Minute).Unix()), perPair: perPair}
	if err := old.insertOld(ctx); err != nil {
		return f, err
	}

	if _, err := s.startAndAwait(ctx, "owner"); err != nil {
		return f, err
	}
	l, err := s.startLoad(ctx, aggregate, "customer", s.options.Rate, 0, appendEvenly)
	if err != nil {
		return f, err
	}
	if err := s.runFor(ctx, warmUp); err != nil {
		return f, err
	}

	rounds, err := old.purgeRounds(ctx)
	if err = errors.Join(err, l.finishLoad(true)); err != nil {
		return f, err
	}
	if err := s.awaitArrival(ctx); err != nil {
		return f, err
	}
	rounds.computeFigures(f, perPair)
	if f.Ratio > purgeRatio {
		s.recordBroken("the median of the p99 ratios is %.2f, at most %.2f expected", f.Ratio, purgeRatio)
	}
	return f, s.countPurged(ctx, f, int(l.done.Load()))
}

// oldEnvelopes count as delivered, because the watcher starts after them. The envelopes of a pair
// are too young for the purge until ageEnvelopes changes their timestamps. The protected ones are
// old enough from the start, but not sent.
type oldEnvelopes struct {
	stage   *stage
	stamp   uint32 // timestamp in seconds of envelopes that are old enough
	perPair int
	ids     []bson.Binary
}

// insertOld inserts the protected envelopes, and those of all pairs.
func (o *oldEnvelopes) insertOld(ctx context.Context) error {
	began := time.Now()
	later := began.Add(time.Hour)

	n := protected + purgePairs*o.perPair
	docs := make([]any, 0, 1000)
	for i := range n {
		id := uuid.Must(uuid.NewV7())
		o.ids = append(o.ids, bson.Binary{Subtype: bson.TypeBinaryUUID, Data: id[:]})
		doc := bson.D{
			{Key: "_id", Value: o.ids[i]},
			{Key: "aggregatetype", Value: aggregate},
			{Key: "aggregateid", Value: fmt.Sprint("old-", i)},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: make([]byte, 200)},
		}
		// The protected ones are as old as the others, and are kept only because they are scheduled.
		if i >= protected {
			young := bson.Timestamp{T: uint32(began.Unix()), I: uint32(i + 1)}
			doc = append(doc, bson.E{Key: "ts", Value: young})
		} else {
			doc = append(doc, bson.E{Key: "ts", Value: o.stampOf(i)}, bson.E{Key: "dueAt", Value: later})
		}

		docs = append(docs, doc)
		if len(docs) < cap(docs) && i+1 < n {
			continue
		}
		if _, err := o.stage.outboxCollection().InsertMany(ctx, docs, options.InsertMany().SetOrdered(false)); err != nil {
			return fmt.Errorf("inserting old envelopes: %w", err)
		}
		docs = docs[:0]
	}
	o.stage.printEvent("%s old envelopes are inserted in %.1f s", formatThousands(n), time.Since(began).Seconds())
	return nil
}

// stampOf returns the timestamp of the i-th envelope when it is old enough.
func (o *oldEnvelopes) stampOf(i int) bson.Timestamp {
	return bson.Timestamp{T: o.stamp, I: uint32(i + 1)}
}

// ageEnvelopes makes the envelopes of a pair old enough for the purge. The watcher reads only
// inserts, so it ignores these updates.
func (o *oldEnvelopes) ageEnvelopes(ctx context.Context, pair int) error {
	var models []mongo.WriteModel
	for k := range o.perPair {
		i := protected + pair*o.perPair + k
		models = append(models, mongo.NewUpdateOneModel().
			SetFilter(bson.D{{Key: "_id", Value: o.ids[i]}}).
			SetUpdate(bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: o.stampOf(i)}}}}))
	}

	_, err := o.stage.outboxCollection().BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	if err != nil {
		return fmt.Errorf("changing the timestamps of old envelopes: %w", err)
	}
	return nil
}

// purgeRound contains the latencies of one pair.
type purgeRound struct {
	with, without []time.Duration
	took          time.Duration // of the purge
}

type purgeRounds []purgeRound

// purgeRounds measures the pairs. In each pair some envelopes are purged, and then there is no
// purge for as long.
func (o *oldEnvelopes) purgeRounds(ctx context.Context) (purgeRounds, error) {
	latencies := &delays{}
	onRecord := latencies.recordDelay
	o.stage.onRecord.Store(&onRecord)

	rounds := make(purgeRounds, purgePairs)
	for pair := range rounds {
		r := &rounds[pair]
		if err := o.ageEnvelopes(ctx, pair); err != nil {
			return rounds, err
		}
		if err := o.stage.runFor(ctx, purgeEdge); err != nil {
			return rounds, err
		}

		already, err := o.awaitPurged(ctx, pair, 1)
		if err != nil {
			return rounds, err
		}
		began := time.Now()
		latencies.takeSorted()
		if _, err := o.awaitPurged(ctx, pair, o.perPair); err != nil {
			return rounds, err
		}
		measured := time.Since(began)
		r.with = latencies.takeSorted()

		// Some envelopes were purged before the measurement, so the duration is extrapolated to all
		// of them.
		r.took = measured * time.Duration(o.perPair) / time.Duration(max(o.perPair-already, 1))

		if err := o.stage.runFor(ctx, purgeEdge); err != nil {
			return rounds, err
		}
		latencies.takeSorted()
		if err := o.stage.runFor(ctx, min(measured, purgeWait)); err != nil {
			return rounds, err
		}
		r.without = latencies.takeSorted()
		o.stage.printEvent("%s purged in %.1f s: p99 %.1f ms, without a purge %.1f ms",
			formatThousands(o.perPair), r.took.Seconds(), quantile(r.with, 0.99), quantile(r.without, 0.99))
	}
	return rounds, nil
}

// awaitPurged blocks until n envelopes of a pair are purged, and returns the number of purged ones.
func (o *oldEnvelopes) awaitPurged(ctx context.Context, pair, n int) (gone int, err error) {
	what := fmt.Sprintf("%d of %d envelopes that are old enough are purged", n, o.perPair)
	awaitErr := o.stage.awaitCondition(ctx, what, patience, func() bool {
		gone, err = o.countGone(ctx, pair)
		return err != nil || gone >= n
	})
	return gone, errors.Join(awaitErr, err)
}

// countGone returns how many envelopes of a pair were purged. A purge works in the order of the
// timestamps, so the oldest remaining envelope shows the number.
func (o *oldEnvelopes) countGone(ctx context.Context, pair int) (int, error) {
	from := protected + pair*o.perPair
	ofPair := bson.D{{Key: "ts", Value: bson.D{
		{Key: "$gte", Value: o.stampOf(from)},
		{Key: "$lt", Value: o.stampOf(from + o.perPair)},
	}}}
	var oldest struct {
		TS bson.Timestamp `bson:"ts"`
	}

	first := options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}})
	err := o.stage.outboxCollection().FindOne(ctx, ofPair, first).Decode(&oldest)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return o.perPair, nil
	}
	if err != nil {
		return 0, fmt.Errorf("finding old envelopes: %w", err)
	}
	// The increment of a timestamp is the number of the envelope, from 1.
	return int(oldest.TS.I) - 1 - from, nil
}

// delays collects the times of records since their commit.
type delays struct {
	mu   sync.Mutex
	list []time.Duration
}

func (d *delays) recordDelay(m devstack.Message) {
	d.mu.Lock()
	defer d.mu.Unlock()

	d.list = append(d.list, m.Seen.Sub(m.Time))
}

// takeSorted removes and returns all collected times, sorted.
func (d *delays) takeSorted() []time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()

	list := d.list
	d.list = nil
	slices.Sort(list)
	return list
}

// computeFigures sets the figures of f. perPair is the number of purged envelopes in each round.
func (rs purgeRounds) computeFigures(f *PurgeFinding, perPair int) {
	var with50, with99, none50, none99 []float64
	var took time.Duration
	for i, r := range rs {
		// A quantile of few records is chance.
		if n := min(len(r.with), len(r.without)); n < purgeLeast {
			f.Broken = append(f.Broken, fmt.Sprintf("pair %d has a measurement of only %d records", i+1, n))
		}

		with, without := quantile(r.with, 0.99), quantile(r.without, 0.99)
		with50 = append(with50, quantile(r.with, 0.5))
		with99 = append(with99, with)
		none50 = append(none50, quantile(r.without, 0.5))
		none99 = append(none99, without)
		f.Ratios = append(f.Ratios, float64(int(100*with/max(without, 0.001)))/100)
		took += r.took
	}

	f.WithP50MS = median(with50)
	f.WithP99MS = median(with99)
	f.NoneP50MS = median(none50)
	f.NoneP99MS = median(none99)
	// The median of the ratios is robust against one pair with a pause of the machine.
	f.Ratio = median(f.Ratios)
	f.PurgeRate = float64(int(float64(perPair*len(rs)) / max(took.Seconds(), 0.001)))
}

// median returns the median of the values. It does not change their order.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// countPurged compares the remaining envelopes with the expected ones. young is the number of
// envelopes that the load has appended.
func (s *stage) countPurged(ctx context.Context, f *PurgeFinding, young int) error {
	coll := s.shopDatabase().Collection(outboxName)
	old := bson.D{{Key: "aggregateid", Value: bson.D{{Key: "$regex", Value: "^old-"}}}}
	unsent := append(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}}, old...)

	all, err1 := coll.CountDocuments(ctx, bson.D{})
	left, err2 := coll.CountDocuments(ctx, old)
	kept, err3 := coll.CountDocuments(ctx, unsent)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("counting the remaining envelopes: %w", err)
	}

	// kept counts the scheduled events, which a purge must never remove.
	f.Kept = int(kept)
	f.Overstayed = int(left - kept)
	f.Purged = s.options.Events/purgePairs*purgePairs - f.Overstayed
	if f.Kept != protected {
		s.recordBroken("%d of %d unsent envelopes are left", f.Kept, protected)
	}
	if f.Overstayed > 0 {
		s.recordBroken("%d delivered envelopes are old enough, but were not removed", f.Overstayed)
	}
	if n := int(all-left) - young; n != 0 {
		s.recordBroken("%d of the young envelopes are left, %d were appended", int(all-left), young)
	}
	return nil
}
