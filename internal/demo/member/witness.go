package member

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/consumer"
)

const (
	generationsColl = "member_generations"
	countsColl      = "member_counts"

	reportEvery  = 200 * time.Millisecond
	reportWithin = 2 * time.Second
)

// witness writes down what a member does beside its effects.
type witness struct {
	consumer.Unobserved
	spec Spec
	db   *mongo.Database

	handled, refused, failed, conflicts atomic.Int64
}

// Handled counts messages.
func (w *witness) Handled(_ string, n int, _ time.Duration) { w.handled.Add(int64(n)) }

// Duplicates counts messages that the inbox knew.
func (w *witness) Duplicates(_ string, n int) { w.refused.Add(int64(n)) }

// Failed counts attempts that a policy had to decide about.
func (w *witness) Failed(string, consumer.Action) { w.failed.Add(1) }

// Counts are what members counted, all of them together.
type Counts struct {
	Handled   int `bson:"handled"`
	Refused   int `bson:"refused"`   // messages that the inbox knew
	Failed    int `bson:"failed"`    // attempts that a policy decided about
	Conflicts int `bson:"conflicts"` // steps of a saga that met another one and were run again
}

// report writes the counts down now and then, and once more when it is stopped.
func (w *witness) report(ctx context.Context) (stop func()) {
	ctx = context.WithoutCancel(ctx)
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(reportEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				w.write(ctx)
			case <-ended:
				w.write(ctx)
				return
			}
		}
	})
	return func() { close(ended); wg.Wait() }
}

// write misses a turn when the database is away: the next one brings it.
func (w *witness) write(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, reportWithin)
	defer cancel()
	_, _ = w.db.Collection(countsColl).ReplaceOne(ctx, eq("_id", w.spec.Name), bson.D{
		{Key: "handled", Value: w.handled.Load()}, {Key: "refused", Value: w.refused.Load()},
		{Key: "failed", Value: w.failed.Load()}, {Key: "conflicts", Value: w.conflicts.Load()},
	}, options.Replace().SetUpsert(true))
}

// ReadCounts adds up what the members of a database counted.
func ReadCounts(ctx context.Context, db *mongo.Database) (Counts, error) {
	var sum Counts
	cur, err := db.Collection(countsColl).Find(ctx, bson.D{})
	if err != nil {
		return sum, fmt.Errorf("reading what members counted: %w", err)
	}
	var all []Counts
	if err := cur.All(ctx, &all); err != nil {
		return sum, fmt.Errorf("reading what members counted: %w", err)
	}
	for _, c := range all {
		sum.Handled += c.Handled
		sum.Refused += c.Refused
		sum.Failed += c.Failed
		sum.Conflicts += c.Conflicts
	}
	return sum, nil
}

// watched is a transport whose generations are written down.
type watched struct {
	consumer.Transport
	w *witness
}

// Join is that of the transport.
func (t *watched) Join(ctx context.Context, group string, topics []string, s consumer.Session) error {
	return t.Transport.Join(ctx, group, topics, &session{s, t.w})
}

type session struct {
	consumer.Session
	w *witness
}

// generation is one member's part in one generation of the group.
type generation struct {
	ID struct {
		Generation int32  `bson:"g"`
		Member     string `bson:"m"`
	} `bson:"_id"`
	Partitions int `bson:"partitions"`
}

// Serve writes the generation down before it serves it.
func (s *session) Serve(ctx context.Context, g consumer.Generation) error {
	doc := generation{Partitions: len(g.Partitions())}
	doc.ID.Generation, doc.ID.Member = g.ID(), s.w.spec.Name
	within, cancel := context.WithTimeout(ctx, reportWithin)
	_, err := s.w.db.Collection(generationsColl).InsertOne(within, doc)
	cancel()
	if err != nil && ctx.Err() == nil {
		s.Fault(fmt.Errorf("writing a generation down: %w", err))
	}
	return s.Session.Serve(ctx, g)
}

// Generations is how many generations of the group had members that got as far as to serve them.
func Generations(ctx context.Context, db *mongo.Database) (int, error) {
	var ids []int32
	if err := db.Collection(generationsColl).Distinct(ctx, "_id.g", bson.D{}).Decode(&ids); err != nil {
		return 0, fmt.Errorf("reading the generations of the group: %w", err)
	}
	return len(ids), nil
}

// Serving reports whether all these members have partitions in one generation of the group.
func Serving(ctx context.Context, db *mongo.Database, names ...string) (bool, error) {
	cur, err := db.Collection(generationsColl).Find(ctx, bson.D{
		{Key: "_id.m", Value: bson.D{{Key: "$in", Value: names}}}, {Key: "partitions", Value: bson.D{{Key: "$gt", Value: 0}}},
	})
	if err != nil {
		return false, fmt.Errorf("reading the generations of the group: %w", err)
	}
	var all []generation
	if err := cur.All(ctx, &all); err != nil {
		return false, fmt.Errorf("reading the generations of the group: %w", err)
	}
	serve := map[int32]int{}
	for _, g := range all {
		if serve[g.ID.Generation]++; serve[g.ID.Generation] == len(names) {
			return true, nil
		}
	}
	return false, nil
}
