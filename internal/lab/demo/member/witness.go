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

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

const (
	generationsColl = "member_generations"
	countsColl      = "member_counts"

	reportEvery  = 200 * time.Millisecond
	reportWithin = 2 * time.Second
)

// witness stores the counts and the generations of a member, next to its effects.
type witness struct {
	telemetry.Discard
	spec Spec
	db   *mongo.Database

	handled, rejected, failed, conflicts atomic.Int64
}

// Measure counts messages.
func (w *witness) Measure(measurement telemetry.Measurement) {
	switch measurement.Metric {
	case telemetry.Handled:
		w.handled.Add(measurement.N)
	case telemetry.Duplicates:
		w.rejected.Add(measurement.N)
	case telemetry.Failed:
		w.failed.Add(measurement.N)
	default:
		// The demonstration shows no other figure of a consumer.
	}
}

// Counts are the sums of the counts of all members.
type Counts struct {
	Handled   int `bson:"handled"`
	Rejected  int `bson:"rejected"`  // messages that had a mark in the inbox
	Failed    int `bson:"failed"`    // failed attempts that a policy decided about
	Conflicts int `bson:"conflicts"` // steps of a saga that conflicted with another step and were run again
}

// startReporting stores the counts every 200 ms, and once more when stop is called. stop blocks
// until that is done.
func (w *witness) startReporting(ctx context.Context) (stop func()) {
	// The drain still handles messages after the end of ctx.
	ctx = context.WithoutCancel(ctx)
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(reportEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				w.writeCounts(ctx)
			case <-ended:
				w.writeCounts(ctx)
				return
			}
		}
	})

	return func() {
		close(ended)
		wg.Wait()
	}
}

// writeCounts stores the counts. It ignores errors, because the next call stores them again.
func (w *witness) writeCounts(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, reportWithin)
	defer cancel()

	_, _ = w.db.Collection(countsColl).ReplaceOne(ctx, fieldEquals("_id", w.spec.Name), bson.D{
		{Key: "handled", Value: w.handled.Load()},
		{Key: "rejected", Value: w.rejected.Load()},
		{Key: "failed", Value: w.failed.Load()},
		{Key: "conflicts", Value: w.conflicts.Load()},
	}, options.Replace().SetUpsert(true))
}

// ReadCounts returns the sums of the counts of all members of a database.
func ReadCounts(ctx context.Context, db *mongo.Database) (Counts, error) {
	var sum Counts
	cur, err := db.Collection(countsColl).Find(ctx, bson.D{})
	if err != nil {
		return sum, fmt.Errorf("reading the counts of members: %w", err)
	}
	var all []Counts
	if err := cur.All(ctx, &all); err != nil {
		return sum, fmt.Errorf("reading the counts of members: %w", err)
	}

	for _, c := range all {
		sum.Handled += c.Handled
		sum.Rejected += c.Rejected
		sum.Failed += c.Failed
		sum.Conflicts += c.Conflicts
	}
	return sum, nil
}

// recordedTransport is a transport that stores the generations of the group.
type recordedTransport struct {
	transport.Transport
	w *witness
}

// Join calls Join of the transport.
func (t *recordedTransport) Join(ctx context.Context, group string, topics []string, session transport.Session) error {
	return t.Transport.Join(ctx, group, topics, &recordedSession{session, t.w})
}

type recordedSession struct {
	transport.Session
	w *witness
}

// generation is the assignment of one member in one generation of the group.
type generation struct {
	ID struct {
		Generation int32  `bson:"g"`
		Member     string `bson:"m"`
	} `bson:"_id"`
	Partitions int `bson:"partitions"`
}

// Serve stores the generation and then calls Serve of the session.
func (s *recordedSession) Serve(ctx context.Context, served transport.Generation) error {
	doc := generation{Partitions: len(served.Partitions())}
	doc.ID.Generation = served.ID()
	doc.ID.Member = s.w.spec.Name

	writeCtx, cancel := context.WithTimeout(ctx, reportWithin)
	_, err := s.w.db.Collection(generationsColl).InsertOne(writeCtx, doc)
	cancel()
	if err != nil && ctx.Err() == nil {
		s.Fault(fmt.Errorf("storing a generation: %w", err))
	}
	return s.Session.Serve(ctx, served)
}

// Generations returns the number of generations that at least one member served.
func Generations(ctx context.Context, db *mongo.Database) (int, error) {
	ids, err := cursor.Distinct[int32]("reading the generations of the group", db.Collection(generationsColl).Distinct(ctx, "_id.g", bson.D{}))
	return len(ids), err
}

// Serving reports whether there is a generation in which all the named members have partitions.
func Serving(ctx context.Context, db *mongo.Database, names ...string) (bool, error) {
	cur, err := db.Collection(generationsColl).Find(ctx, bson.D{
		{Key: "_id.m", Value: bson.D{{Key: "$in", Value: names}}},
		{Key: "partitions", Value: bson.D{{Key: "$gt", Value: 0}}},
	})
	if err != nil {
		return false, fmt.Errorf("reading the generations of the group: %w", err)
	}
	var all []generation
	if err := cur.All(ctx, &all); err != nil {
		return false, fmt.Errorf("reading the generations of the group: %w", err)
	}

	members := map[int32]int{} // by generation
	for _, g := range all {
		members[g.ID.Generation]++
		if members[g.ID.Generation] == len(names) {
			return true, nil
		}
	}
	return false, nil
}
