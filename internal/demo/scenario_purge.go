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
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var purgeScenario = Scenario{
	Name:    "purge",
	Promise: "delivered envelopes go away by themselves under load, nothing unsent does, and publishing is hardly slower meanwhile",
	events:  purgePairs * 7_000, rate: 1000,
	set: map[string]any{
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

func (f *PurgeFinding) tell() []string {
	return []string{
		fmt.Sprintf("purged            %s envelopes, %s a second; %d unsent ones of the same age stayed", thousands(f.Purged), thousands(int(f.PurgeRate)), f.Kept),
		fmt.Sprintf("commit to Kafka   with a purge p50 %.1f ms p99 %.1f ms, without p50 %.1f ms p99 %.1f ms", f.WithP50MS, f.WithP99MS, f.NoneP50MS, f.NoneP99MS),
		fmt.Sprintf("p99 ratio         median %.2f of %v", f.Ratio, f.Ratios),
	}
}

const (
	purgePairs     = 7
	purgeRetention = 11 * time.Minute // above the margin that the purge keeps for transactions that are open for long
	purgeRate      = 5000             // envelopes a second at most: the default
	purgeLook      = 200 * time.Millisecond
	purgeRatio     = 1.25                   // what the median of the ratios may be
	purgeEdge      = 500 * time.Millisecond // around a purge, that belong to neither
	purgeWait      = 5 * time.Second        // without a purge, at most
	purgeLeast     = 200                    // records in each stretch, to speak of percentiles
	protected      = 200                    // unsent envelopes as old as the purged ones
)

func runPurge(ctx context.Context, s *stage) (Finding, error) {
	f := &PurgeFinding{}
	each := max(s.o.Events/purgePairs, 1)
	stamp := bson.Timestamp{T: uint32(time.Now().Add(-purgeRetention - time.Minute).Unix())}
	if err := s.insertOld(ctx, stamp, each); err != nil {
		return f, err
	}
	if _, err := s.start(ctx, "owner"); err != nil {
		return f, err
	}
	l, err := s.load(ctx, aggregate, "customer", s.o.Rate, 0, evenly)
	if err != nil {
		return f, err
	}
	if err := s.pass(ctx, warmUp); err != nil {
		return f, err
	}
	rounds, err := s.purgeRounds(ctx, stamp, each)
	if err = errors.Join(err, l.finish(true)); err != nil {
		return f, err
	}
	if err := s.arrive(ctx); err != nil {
		return f, err
	}
	rounds.figures(f, each)
	if f.Ratio > purgeRatio {
		s.broke("the median of the p99 ratios is %.2f, at most %.2f expected", f.Ratio, purgeRatio)
	}
	return f, s.countPurged(ctx, f, int(l.done.Load()))
}

// insertOld inserts envelopes that count as delivered, because the watcher begins behind them, and that are old enough to
// be purged. As they are scheduled for later, nothing of them is, until they are let go.
func (s *stage) insertOld(ctx context.Context, stamp bson.Timestamp, each int) error {
	began, later := time.Now(), time.Now().Add(time.Hour)
	docs := make([]any, 0, 1000)
	for i := range protected + purgePairs*each {
		id := uuid.Must(uuid.NewV7())
		stamp.I = uint32(i + 1)
		hold := bson.E{Key: "dueAt", Value: later}
		if i < protected/2 {
			hold = bson.E{Key: "state", Value: event.StateRetry}
		}
		docs = append(docs, bson.D{
			{Key: "_id", Value: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: id[:]}}, {Key: "aggregatetype", Value: aggregate},
			{Key: "aggregateid", Value: fmt.Sprint("old-", i)}, {Key: "type", Value: "OrderPlaced"}, {Key: "payload", Value: make([]byte, 200)},
			{Key: "ts", Value: stamp}, hold,
		})
		if len(docs) < cap(docs) && i+1 < protected+purgePairs*each {
			continue
		}
		if _, err := s.outbox().InsertMany(ctx, docs, options.InsertMany().SetOrdered(false)); err != nil {
			return fmt.Errorf("inserting old envelopes: %w", err)
		}
		docs = docs[:0]
	}
	s.say("%s old envelopes are inserted in %.1f s", thousands(protected+purgePairs*each), time.Since(began).Seconds())
	return nil
}

// between is the filter of the envelopes of one pair.
func between(stamp bson.Timestamp, pair, each int) bson.D {
	from := uint32(protected + pair*each)
	return bson.D{{Key: "ts", Value: bson.D{
		{Key: "$gt", Value: bson.Timestamp{T: stamp.T, I: from}}, {Key: "$lte", Value: bson.Timestamp{T: stamp.T, I: from + uint32(each)}},
	}}}
}

// purgeRound is one pair.
type purgeRound struct {
	with, without []time.Duration
	took          time.Duration // of the purge
}

type purgeRounds []purgeRound

// purgeRounds measures the pairs: in each, some envelopes are let go and purged, and then there is no purge for as long.
func (s *stage) purgeRounds(ctx context.Context, stamp bson.Timestamp, each int) (purgeRounds, error) {
	w := &delays{}
	hear := w.hear
	s.hear.Store(&hear)
	rounds := make(purgeRounds, purgePairs)
	for pair := range rounds {
		r, batch := &rounds[pair], between(stamp, pair, each)
		if _, err := s.outbox().UpdateMany(ctx, batch, bson.D{{Key: "$unset", Value: bson.D{{Key: "dueAt", Value: 1}}}}); err != nil {
			return rounds, fmt.Errorf("letting old envelopes go: %w", err)
		}
		if err := s.pass(ctx, purgeEdge); err != nil {
			return rounds, err
		}
		already, err := s.purged(ctx, batch, 1, each)
		if err != nil {
			return rounds, err
		}
		began := time.Now()
		w.take()
		if _, err := s.purged(ctx, batch, each, each); err != nil {
			return rounds, err
		}
		took := time.Since(began)
		r.with, r.took = w.take(), took*time.Duration(each)/time.Duration(max(each-already, 1))
		if err := s.pass(ctx, purgeEdge); err != nil {
			return rounds, err
		}
		w.take()
		if err := s.pass(ctx, min(took, purgeWait)); err != nil {
			return rounds, err
		}
		r.without = w.take()
		s.say("%s purged in %.1f s: p99 %.1f ms, without a purge %.1f ms", thousands(each), r.took.Seconds(), quantile(r.with, 0.99), quantile(r.without, 0.99))
	}
	return rounds, nil
}

// purged waits until so many envelopes of a batch are purged, and returns how many are.
func (s *stage) purged(ctx context.Context, batch bson.D, n, of int) (gone int, err error) {
	waited := s.await(ctx, fmt.Sprintf("%d of %d envelopes that are old enough are purged", n, of), patience, func() bool {
		gone, err = s.goneOf(ctx, batch, of)
		return err != nil || gone >= n
	})
	return gone, errors.Join(waited, err)
}

// goneOf is how many envelopes of a batch were purged, from the oldest that is left: a purge goes by stamp.
func (s *stage) goneOf(ctx context.Context, batch bson.D, each int) (int, error) {
	var oldest struct {
		TS bson.Timestamp `bson:"ts"`
	}
	err := s.outbox().FindOne(ctx, batch, options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}})).Decode(&oldest)
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return each, nil
	case err != nil:
		return 0, fmt.Errorf("looking for old envelopes: %w", err)
	}
	return int(oldest.TS.I-1-protected) % each, nil
}

// delays collects how long records took from their commit.
type delays struct {
	mu   sync.Mutex
	list []time.Duration
}

func (d *delays) hear(m devstack.Message) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, m.Seen.Sub(m.Time))
}

// take returns what was collected since the last call, sorted.
func (d *delays) take() []time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.list
	d.list = nil
	slices.Sort(list)
	return list
}

func (rs purgeRounds) figures(f *PurgeFinding, each int) {
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
	coll := s.client.Database(database).Collection(outbox.DefaultCollection)
	old := bson.D{{Key: "aggregateid", Value: bson.D{{Key: "$regex", Value: "^old-"}}}}
	unsent := append(bson.D{{Key: "$or", Value: bson.A{anyState(), bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}}}}}, old...)
	all, err1 := coll.CountDocuments(ctx, bson.D{})
	left, err2 := coll.CountDocuments(ctx, old)
	kept, err3 := coll.CountDocuments(ctx, unsent)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("counting what is left: %w", err)
	}
	f.Kept, f.Overstayed = int(kept), int(left-kept)
	f.Purged = s.o.Events/purgePairs*purgePairs - f.Overstayed
	if f.Kept != protected {
		s.broke("%d of %d unsent envelopes are left", f.Kept, protected)
	}
	if f.Overstayed > 0 {
		s.broke("%d envelopes that were delivered and are old enough are still there", f.Overstayed)
	}
	if n := int(all-left) - young; n != 0 {
		s.broke("%d of the young envelopes are left, %d were appended", int(all-left), young)
	}
	return nil
}
