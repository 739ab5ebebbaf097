package stacktest

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gofrs/flock"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack"
)

// failPointWait is how long a test waits for others that use the fail point.
const failPointWait = 8 * time.Minute

// FailCommand sets the shared server's fail point failCommand for the clients called app alone, until off or the end of the
// test. mode is "alwaysOn" or {times: n}. A server has one such fail point, and a second setting replaces the first whatever
// its appName: whoever uses it holds a lock of the whole machine.
func FailCommand(tb testing.TB, app string, mode any, data bson.D) (off func()) {
	tb.Helper()
	p := takeFailPoint(tb, Client(tb), app)
	p.configure(mode, data)
	return p.off
}

// FailTimes makes the next commands of the clients called app fail, so many, and returns when they have failed.
func FailTimes(tb testing.TB, client *mongo.Client, app string, times int, data bson.D) {
	tb.Helper()
	p := takeFailPoint(tb, client, app)
	defer p.off()
	mode := bson.D{{Key: "times", Value: times}}
	// Counted by the server: how often it was entered so far.
	before := p.configure(mode, data)
	p.awaitEntered(before + int64(times))
}

// FailAlways is FailCommand for all commands, and waits with reached until the first of them has failed.
func FailAlways(tb testing.TB, app string, data bson.D) (reached, off func()) {
	tb.Helper()
	p := takeFailPoint(tb, Client(tb), app)
	before := p.configure("alwaysOn", data)
	return func() { tb.Helper(); p.awaitEntered(before + 1) }, p.off
}

// awaitEntered waits until the point has been entered so often since the server started.
func (p *failPoint) awaitEntered(times int64) {
	p.tb.Helper()
	wait := bson.D{{Key: "waitForFailPoint", Value: "failCommand"}, {Key: "timesEntered", Value: times}, {Key: "maxTimeMS", Value: 90_000}}
	if err := p.client.Database("admin").RunCommand(p.tb.Context(), wait).Err(); err != nil {
		p.tb.Fatalf("the fail point was not reached: %v", err)
	}
}

// failPoint is a server's, held for one test.
type failPoint struct {
	tb     testing.TB
	client *mongo.Client
	app    string
	off    func()
}

func takeFailPoint(tb testing.TB, client *mongo.Client, app string) *failPoint {
	tb.Helper()
	lock := flock.New(filepath.Join(devstack.CacheDir(), "failcommand.lock"))
	ctx, cancel := context.WithTimeout(tb.Context(), failPointWait)
	defer cancel()
	if _, err := lock.TryLockContext(ctx, 10*time.Millisecond); err != nil {
		tb.Fatalf("waiting for the fail point: %v", err)
	}
	p := &failPoint{tb: tb, client: client, app: app}
	p.off = sync.OnceFunc(func() {
		p.configure("off", nil)
		if err := lock.Unlock(); err != nil {
			tb.Error(err)
		}
	})
	tb.Cleanup(p.off)
	return p
}

// configure returns how often the point has been entered since the server started.
func (p *failPoint) configure(mode any, data bson.D) (entered int64) {
	p.tb.Helper()
	cmd := bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: mode}}
	if data != nil {
		cmd = append(cmd, bson.E{Key: "data", Value: append(bson.D{{Key: "appName", Value: p.app}}, data...)})
	}
	var res struct {
		Count int64 `bson:"count"`
	}
	if err := p.client.Database("admin").RunCommand(context.WithoutCancel(p.tb.Context()), cmd).Decode(&res); err != nil {
		p.tb.Error(err)
	}
	return res.Count
}
