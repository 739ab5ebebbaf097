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
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var purgeScenario = Scenario{
	Name:    "purge",
	Promise: "delivered envelopes go away by themselves under load, nothing unsent does, and publishing is hardly slower meanwhile",
	events:  purgePairs * 7_000, rate: 1000,
	ownServers: true,
	relayConfig: map[string]any{
		"start":     "now",
		"retention": purgeRetention.String(),
		"purge":     map[string]any{"interval": purgeLook.String(), "rate": purgeRate},
	},
	run: runPurge,
}

// PurgeFinding is what scenario purge found: pairs of stretches of time, one with and one without a purge, in turn.
type PurgeFinding struct {
	Outcome
	Purged     int       `json:"purged"`     // envelopes that were removed
	PurgeRate  float64   `json:"purge_rate"` // envelopes a second while it purged
	WithP50MS  float64   `json:"with_p50_ms"`
	WithP99MS  float64   `json:"with_p99_ms"` // medians over the stretches: from commit to the consumer
	NoneP50MS  float64   `json:"without_p50_ms"`
	NoneP99MS  float64   `json:"without_p99_ms"`
	Ratios     []float64 `json:"p99_ratios"` // with ÷ without, of each pair
	Ratio      float64   `json:"p99_ratio"`  // their median
	Kept       int       `json:"kept"`       // envelopes as old as the purged ones that are not sent yet: all have to stay
	Overstayed int       `json:"overstayed"` // envelopes that should have been removed
}

func (f *PurgeFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("purged            %s envelopes, %s a second; %d unsent ones of the same age stayed", formatThousands(f.Purged), formatThousands(int(f.PurgeRate)), f.Kept),
		fmt.Sprintf("commit to Kafka   with a purge p50 %.1f ms p99 %.1f ms, without p50 %.1f ms p99 %.1f ms", f.WithP50MS, f.WithP99MS, f.NoneP50MS, f.NoneP99MS),
		fmt.Sprintf("p99 ratio         median %.2f of %v", f.Ratio, f.Ratios),
	}
}

const (
	purgePairs     = 11
	purgeRetention = 11 * time.Minute // above the margin that the purge keeps for transactions that are open for long
	purgeRate      = 40_000           // the limit; a purge begins at a sixteenth of it, which is more than twice what is appended
	purgeLook      = 200 * time.Millisecond
	purgeRatio     = 1.25                   // what the median of the ratios may be
	purgeEdge      = 500 * time.Millisecond // around a purge, that belong to neither
	purgeWait      = 5 * time.Second        // without a purge, at most
	purgeLeast     = 200                    // records in each stretch, to speak of percentiles
	protected      = 200                    // unsent envelopes as old as the purged ones
)

func runPurge(ctx context.Context, s *stage) (Finding, error) {
	f := &PurgeFinding{}
	each := max(s.options.Events/purgePairs, 1)
	old := &oldEnvelopes{stamp: uint32(time.Now().Add(-purgeRetention - time.Minute).Unix()), perPair: each}
	if err := s.insertOld(ctx, old); err != nil {
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
	rounds, err := s.purgeRounds(ctx, old)
	if err = errors.Join(err, l.finishLoad(true)); err != nil {
		return f, err
	}
	if err := s.awaitArrival(ctx); err != nil {
		return f, err
	}
	rounds.computeFigures(f, each)
	if f.Ratio > purgeRatio {
		s.recordBroken("the median of the p99 ratios is %.2f, at most %.2f expected", f.Ratio, purgeRatio)
	}
	return f, s.countPurged(ctx, f, int(l.done.Load()))
}

// oldEnvelopes count as delivered, because the watcher begins behind them. Those of a pair are too young to be purged
// until they are let go; a few that are not sent yet are old enough from the start.
type oldEnvelopes struct {
	stamp   uint32 // seconds, of those that are old enough
	perPair int    // of a pair
	ids     []bson.Binary
}

func (s *stage) insertOld(ctx context.Context, old *oldEnvelopes) error {
	began, later := time.Now(), time.Now().Add(time.Hour)
	seal, err := store.NewRegistry(s.stateDatabase().Collection("collections")).Seal(ctx)
	if err != nil {
		return err
	}
	n := protected + purgePairs*old.perPair
	docs := make([]any, 0, 1000)
	for i := range n {
		id := uuid.Must(uuid.NewV7())
		old.ids = append(old.ids, bson.Binary{Subtype: bson.TypeBinaryUUID, Data: id[:]})
		doc := bson.D{
			{Key: "_id", Value: old.ids[i]},
			{Key: "aggregatetype", Value: aggregate},
			{Key: "aggregateid", Value: fmt.Sprint("old-", i)},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: make([]byte, 200)},
		}
		switch {
		case i >= protected:
			doc = append(doc, bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(began.Unix()), I: uint32(i + 1)}})
		case i%2 == 0:
			doc = append(doc, bson.E{Key: "ts", Value: old.stampOf(i)}, bson.E{Key: "dueAt", Value: later})
		default:
			doc = append(doc, bson.E{Key: "ts", Value: old.stampOf(i)}, bson.E{Key: "state", Value: event.StateRetry}, bson.E{Key: "nextAt", Value: later}, bson.E{Key: "seal", Value: seal})
		}
		if docs = append(docs, doc); len(docs) < cap(docs) && i+1 < n {
			continue
		}
		if _, err := s.outboxCollection().InsertMany(ctx, docs, options.InsertMany().SetOrdered(false)); err != nil {
			return fmt.Errorf("inserting old envelopes: %w", err)
		}
		docs = docs[:0]
	}
	s.printEvent("%s old envelopes are inserted in %.1f s", formatThousands(n), time.Since(began).Seconds())
	return nil
}

// stampOf is the stamp of the i-th when it is old enough.
func (o *oldEnvelopes) stampOf(i int) bson.Timestamp {
	return bson.Timestamp{T: o.stamp, I: uint32(i + 1)}
}

// ageEnvelopes makes the envelopes of a pair old enough to be purged: a watcher sees inserts, and no updates.
func (s *stage) ageEnvelopes(ctx context.Context, old *oldEnvelopes, pair int) error {
	var models []mongo.WriteModel
	for k := range old.perPair {
		i := protected + pair*old.perPair + k
		models = append(models, mongo.NewUpdateOneModel().SetFilter(bson.D{{Key: "_id", Value: old.ids[i]}}).
			SetUpdate(bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: old.stampOf(i)}}}}))
	}
	_, err := s.outboxCollection().BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	if err != nil {
		return fmt.Errorf("letting old envelopes go: %w", err)
	}
	return nil
}

// purgeRound is one pair.
type purgeRound struct {
	with, without []time.Duration
	took          time.Duration // of the purge
}

type purgeRounds []purgeRound

// purgeRounds measures the pairs: in each, some envelopes are let go and purged, and then there is no purge for as long.
func (s *stage) purgeRounds(ctx context.Context, old *oldEnvelopes) (purgeRounds, error) {
	w := &delays{}
	hear := w.recordDelay
	s.onRecord.Store(&hear)
	rounds := make(purgeRounds, purgePairs)
	for pair := range rounds {
		r, each := &rounds[pair], old.perPair
		if err := s.ageEnvelopes(ctx, old, pair); err != nil {
			return rounds, err
		}
		if err := s.runFor(ctx, purgeEdge); err != nil {
			return rounds, err
		}
		already, err := s.awaitPurged(ctx, old, pair, 1)
		if err != nil {
			return rounds, err
		}
		began := time.Now()
		w.takeSorted()
		if _, err := s.awaitPurged(ctx, old, pair, each); err != nil {
			return rounds, err
		}
		took := time.Since(began)
		r.with, r.took = w.takeSorted(), took*time.Duration(each)/time.Duration(max(each-already, 1))
		if err := s.runFor(ctx, purgeEdge); err != nil {
			return rounds, err
		}
		w.takeSorted()
		if err := s.runFor(ctx, min(took, purgeWait)); err != nil {
			return rounds, err
		}
		r.without = w.takeSorted()
		s.printEvent("%s purged in %.1f s: p99 %.1f ms, without a purge %.1f ms", formatThousands(each), r.took.Seconds(), quantile(r.with, 0.99), quantile(r.without, 0.99))
	}
	return rounds, nil
}

// awaitPurged waits until so many envelopes of a pair are purged, and returns how many are.
func (s *stage) awaitPurged(ctx context.Context, old *oldEnvelopes, pair, n int) (gone int, err error) {
	waited := s.awaitCondition(ctx, fmt.Sprintf("%d of %d envelopes that are old enough are purged", n, old.perPair), patience, func() bool {
		gone, err = s.countGone(ctx, old, pair)
		return err != nil || gone >= n
	})
	return gone, errors.Join(waited, err)
}

// countGone is how many envelopes of a pair were purged, from the oldest that is left: a purge goes by stamp.
func (s *stage) countGone(ctx context.Context, old *oldEnvelopes, pair int) (int, error) {
	from := protected + pair*old.perPair
	var oldest struct {
		TS bson.Timestamp `bson:"ts"`
	}
	err := s.outboxCollection().FindOne(ctx, bson.D{{Key: "ts", Value: bson.D{
		{Key: "$gte", Value: old.stampOf(from)}, {Key: "$lt", Value: old.stampOf(from + old.perPair)},
	}}}, options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}})).Decode(&oldest)
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return old.perPair, nil
	case err != nil:
		return 0, fmt.Errorf("looking for old envelopes: %w", err)
	}
	return int(oldest.TS.I) - 1 - from, nil
}

// delays collects how long records took from their commit.
type delays struct {
	mu   sync.Mutex
	list []time.Duration
}

func (d *delays) recordDelay(m devstack.Message) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, m.Seen.Sub(m.Time))
}

// takeSorted returns what was collected since the last call, sorted.
func (d *delays) takeSorted() []time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.list
	d.list = nil
	slices.Sort(list)
	return list
}

func (rs purgeRounds) computeFigures(f *PurgeFinding, each int) {
	var with50, with99, none50, none99 []float64
	var took time.Duration
	for i, r := range rs {
		if n := min(len(r.with), len(r.without)); n < purgeLeast {
			f.Broken = append(f.Broken, fmt.Sprintf("pair %d has a stretch of %d records, too few to compare", i+1, n))
		}
		w99, n99 := quantile(r.with, 0.99), quantile(r.without, 0.99)
		with50, with99 = append(with50, quantile(r.with, 0.5)), append(with99, w99)
		none50, none99 = append(none50, quantile(r.without, 0.5)), append(none99, n99)
		f.Ratios = append(f.Ratios, float64(int(100*w99/max(n99, 0.001)))/100)
		took += r.took
	}
	f.WithP50MS, f.WithP99MS, f.NoneP50MS, f.NoneP99MS = median(with50), median(with99), median(none50), median(none99)
	f.Ratio = median(f.Ratios)
	f.PurgeRate = float64(int(float64(each*len(rs)) / max(took.Seconds(), 0.001)))
}

// median of the values, which stay in their order.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// countPurged holds what is left in the outbox against what should be.
func (s *stage) countPurged(ctx context.Context, f *PurgeFinding, young int) error {
	coll := s.shopDatabase().Collection(outbox.DefaultCollection)
	old := bson.D{{Key: "aggregateid", Value: bson.D{{Key: "$regex", Value: "^old-"}}}}
	unsent := append(bson.D{{Key: "$or", Value: bson.A{anyState(), bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}}}}}, old...)
	all, err1 := coll.CountDocuments(ctx, bson.D{})
	left, err2 := coll.CountDocuments(ctx, old)
	kept, err3 := coll.CountDocuments(ctx, unsent)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("counting what is left: %w", err)
	}
	f.Kept, f.Overstayed = int(kept), int(left-kept)
	f.Purged = s.options.Events/purgePairs*purgePairs - f.Overstayed
	if f.Kept != protected {
		s.recordBroken("%d of %d unsent envelopes are left", f.Kept, protected)
	}
	if f.Overstayed > 0 {
		s.recordBroken("%d envelopes that were delivered and are old enough are still there", f.Overstayed)
	}
	if n := int(all-left) - young; n != 0 {
		s.recordBroken("%d of the young envelopes are left, %d were appended", int(all-left), young)
	}
	return nil
}
