package telemetry_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	driver "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// figures is a sink that keeps the last value of each gauge, and counts.
type figures struct {
	telemetry.Discard
	mu     sync.Mutex
	gauges map[string]int64
	counts map[string]int64
	most   map[string]int64 // the greatest value of each gauge
}

func (f *figures) Measure(m telemetry.Measurement) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m.Metric == telemetry.Connections {
		f.gauges[m.Reason] = m.N
		f.most[m.Reason] = max(f.most[m.Reason], m.N)
		return
	}
	f.counts[string(m.Metric)+" "+m.Reason] += m.N
}

func (f *figures) read(from map[string]int64, name string) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return from[name]
}

// A call that waits for the only connection of a pool is counted, and so is its failure. Afterwards nothing is in use.
func TestAPoolThatIsTooSmallIsMeasured(t *testing.T) {
	t.Parallel()
	sink := &figures{gauges: map[string]int64{}, counts: map[string]int64{}, most: map[string]int64{}}
	var seen []string
	var mu sync.Mutex
	other := &driver.PoolMonitor{Event: func(occurred *driver.PoolEvent) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, occurred.Type)
	}}
	app := stacktest.Name(t)
	client := stacktest.Client(t, options.Client().SetAppName(app).SetMaxPoolSize(1).SetPoolMonitor(telemetry.MonitorPool(sink, other)))
	coll := stacktest.Database(t, client).Collection("things")
	if err := coll.FindOne(t.Context(), bson.D{}).Err(); !errors.Is(err, mongo.ErrNoDocuments) {
		t.Fatal(err)
	}

	// The server keeps one call, so the next one finds no connection.
	stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"insert"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 3000},
	})
	kept := make(chan error, 1)
	go func() {
		_, err := coll.InsertOne(t.Context(), bson.D{})
		kept <- err
	}()
	stacktest.Eventually(t, "a connection is in use", func() bool { return sink.read(sink.gauges, "in_use") == 1 })
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := coll.FindOne(short, bson.D{}).Err(); err == nil {
		t.Error("a call got a connection of a full pool")
	}
	if err := <-kept; err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "no connection is in use", func() bool {
		return sink.read(sink.gauges, "in_use") == 0 && sink.read(sink.gauges, "waiting") == 0
	})
	if open, most := sink.read(sink.gauges, "open"), sink.read(sink.most, "waiting"); open < 1 || most < 1 {
		t.Errorf("open connections: got %d; most waiting calls: got %d", open, most)
	}
	if failed, got := sink.read(sink.counts, "checkout failed timeout"), sink.read(sink.counts, "checkout "); failed != 1 || got < 2 {
		t.Errorf("failed checkouts: got %d, want 1; checkouts: got %d, want at least 2", failed, got)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Contains(seen, driver.ConnectionCheckedOut) {
		t.Errorf("the other monitor has seen only %v", seen)
	}
}
