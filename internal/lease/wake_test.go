package lease

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/retry"
)

func TestAStandbyThatWatchesIsWokenByTheReleaseAlone(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")

	// The timer and the poll come after the end of the test.
	cfg.TTL, cfg.Renew = 4*patient, time.Second
	h := mustAcquire(t, newLease(t, cfg))
	startRun(t, h)
	waiting := make(chan struct{}, 100)
	c := stacktest.Client(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context,
		e *event.CommandStartedEvent,
	) {
		if e.CommandName == "getMore" {
			retry.Signal(waiting)
		}
	}}))

	cfg.Collection, cfg.Node = c.Database(coll.Database().Name()).Collection(coll.Name()), "b"
	b := newLease(t, cfg)
	got, _ := startAcquire(t, b)

	// The first call returns at once, the second one waits.
	for range 2 {
		receiveWithin(t, waiting, "the standby watches")
	}

	stacktest.Eventually(t, "the standby has looked", func() bool { return *b.reason.Load() == "owned by "+h.Document().Node })
	start := time.Now()
	if err := h.Release(t.Context()); err != nil {
		t.Fatal(err)
	}

	held := receiveWithin(t, got, "takeover")
	t.Logf("release to takeover: %v", time.Since(start))
	_ = held.Release(t.Context())
}

func TestAStandbyThatMayNotWatchLooksOftener(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	l := newLease(t, shortConfig(coll, "a"))
	off := failCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"aggregate"}},
		{Key: "errorCode", Value: mongodb.CodeUnauthorized},
	})
	w := l.newWatch()
	w.arm()
	receiveWithin(t, w.forbidden, "giving up to watch")
	off()
	start := time.Now()
	w.waitForChange(t.Context(), 2*patient)
	if d := time.Since(start); d > patient {
		t.Errorf("it waited %v", d)
	}

	w.stop()
	l.watches.Wait()
}

func TestClientOptionsSuitALease(t *testing.T) {
	t.Parallel()
	o := Tune(options.Client().ApplyURI(stacktest.MongoURI(t)))
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	if *o.RetryWrites || *o.ServerSelectionTimeout > 5*time.Second || *o.HeartbeatInterval > 2*time.Second ||
		o.Timeout != nil {
		t.Errorf("%+v", o)
	}
}
