package stacktest

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gofrs/flock"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// failPointWait is how long a test waits for others that use the fail point.
const failPointWait = 8 * time.Minute

// FailCommand sets the fail point failCommand of the shared server for clients with the app name, until off
// is called or the test ends. mode is "alwaysOn" or {times: n}. A server has only one such fail point, and a
// second setting replaces the first, also for another app name. So the test holds a lock, and other tests wait.
// A test that needs the fail point for many seconds uses FailCommandOn.
func FailCommand(tb testing.TB, app string, mode any, data bson.D) (off func()) {
	tb.Helper()
	point := takeFailPoint(tb, Client(tb), app)
	point.configure(mode, data)
	return point.off
}

// FailCommandOn is FailCommand for the server of client, which only this test uses. So it needs no lock, and no other test waits.
func FailCommandOn(tb testing.TB, client *mongo.Client, app string, mode any, data bson.D) (off func()) {
	tb.Helper()
	point := newFailPoint(tb, client, app, func() error { return nil })
	point.configure(mode, data)
	return point.off
}

// FailTimes makes the next commands of clients with the app name fail, and blocks until they have failed.
func FailTimes(tb testing.TB, client *mongo.Client, app string, times int, data bson.D) {
	tb.Helper()
	point := takeFailPoint(tb, client, app)
	defer point.off()
	mode := bson.D{{Key: "times", Value: times}}
	// The server counts how often the fail point was entered.
	before := point.configure(mode, data)
	point.awaitEntered(before + int64(times))
}

// FailAlways is FailCommand for all commands. reached blocks until the first of them has failed.
func FailAlways(tb testing.TB, app string, data bson.D) (reached, off func()) {
	tb.Helper()
	point := takeFailPoint(tb, Client(tb), app)
	before := point.configure("alwaysOn", data)
	return func() { tb.Helper(); point.awaitEntered(before + 1) }, point.off
}

// awaitEntered blocks until the fail point has been entered that often since the start of the server.
func (p *failPoint) awaitEntered(times int64) {
	p.tb.Helper()
	wait := bson.D{
		{Key: "waitForFailPoint", Value: "failCommand"}, {Key: "timesEntered", Value: times}, {Key: "maxTimeMS", Value: 90_000},
	}
	if err := p.client.Database("admin").RunCommand(p.tb.Context(), wait).Err(); err != nil {
		p.tb.Fatalf("the fail point was not reached: %v", err)
	}
}

// failPoint is the fail point of a server. One test holds it.
type failPoint struct {
	tb     testing.TB
	client *mongo.Client
	app    string
	off    func()
}

func takeFailPoint(tb testing.TB, client *mongo.Client, app string) *failPoint {
	tb.Helper()
	lock := flock.New(filepath.Join(devstack.CacheDir(), fmt.Sprintf("failcommand%d.lock", sharedSet)))
	ctx, cancel := context.WithTimeout(tb.Context(), failPointWait)
	defer cancel()
	if _, err := lock.TryLockContext(ctx, 10*time.Millisecond); err != nil {
		tb.Fatalf("waiting for the fail point: %v", err)
	}

	return newFailPoint(tb, client, app, lock.Unlock)
}

// newFailPoint returns the fail point of the server of client. off ends it and calls release.
func newFailPoint(tb testing.TB, client *mongo.Client, app string, release func() error) *failPoint {
	tb.Helper()
	point := &failPoint{tb: tb, client: client, app: app}
	point.off = sync.OnceFunc(func() {
		point.configure("off", nil)
		if err := release(); err != nil {
			tb.Error(err)
		}
	})
	tb.Cleanup(point.off)
	return point
}

// configure sets the fail point, and returns how often it has been entered since the start of the server.
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
