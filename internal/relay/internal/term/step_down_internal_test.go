package term

import (
	"log/slog"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// stalledOwner is a monitor in a takeover of node "owner", which counts as pending work. The node does not reach Kafka.
type stalledOwner struct {
	*testing.T
	*monitor
	nodes *nodes.Nodes
	now   time.Time
}

func newStalledOwner(t *testing.T) *stalledOwner {
	db := stacktest.Database(t, stacktest.Client(t))
	registry := nodes.NewNodes(db.Collection("nodes"))
	shared := &Shared{Nodes: registry}
	held := lease.New(lease.Config{Collection: db.Collection("watchers"), Log: slog.New(slog.DiscardHandler)})
	return &stalledOwner{t, &monitor{
		slot:     &Runner{shared: shared, cfg: config.Config{Node: "owner"}, lease: held},
		progress: &progress{},
		meter:    &meter{shared: shared},
		resolver: pipeline.NewResolver(pipeline.Config{Pool: pipeline.NewPool(1<<20, 100)}),
	}, registry, time.Now()}
}

// setStandby stores a heartbeat of another node.
func (o *stalledOwner) setStandby(reachesKafka bool) {
	o.Helper()
	sign := nodes.Sign{Node: "standby", KafkaReachable: reachesKafka, Facts: nodes.Facts{Tasks: []string{string(nodes.Relay)}}}
	if _, err := o.nodes.Heartbeat(o.Context(), sign); err != nil {
		o.Fatal(err)
	}
}

// expectAfter moves the clock and compares the decision of the monitor.
func (o *stalledOwner) expectAfter(passed time.Duration, want bool) {
	o.Helper()
	o.now = o.now.Add(passed)
	if got := o.shouldStepDown(o.Context(), o.now); got != want {
		o.Fatalf("steps down: %v, want %v", got, want)
	}
}

// TestN06_AfterAnOutageOfAllNodesTheOwnerStays: the standby reaches Kafka again a moment before the owner.
func TestN06_AfterAnOutageOfAllNodesTheOwnerStays(t *testing.T) {
	t.Parallel()
	owner := newStalledOwner(t)
	const outage = 10 * stalledAfter
	owner.setStandby(false)
	owner.expectAfter(0, false)
	owner.expectAfter(outage, false)

	owner.setStandby(true)
	owner.expectAfter(time.Second, false)
	owner.expectAfter(stalledAfter-time.Second, false)
	owner.slot.shared.KafkaReachable.Store(true)
	owner.expectAfter(time.Second, false)

	// Another outage does not continue the first one.
	owner.slot.shared.KafkaReachable.Store(false)
	owner.expectAfter(time.Second, false)
	owner.expectAfter(stalledAfter-time.Second, false)
	owner.meter.acked.Add(1)
	owner.expectAfter(stalledAfter, false)
}

// TestN06_AnOwnerThatAloneLosesKafkaStepsDown: 30 s after that, and at most once in five minutes.
func TestN06_AnOwnerThatAloneLosesKafkaStepsDown(t *testing.T) {
	t.Parallel()
	owner := newStalledOwner(t)
	owner.setStandby(true)
	owner.expectAfter(0, false)
	owner.expectAfter(stalledAfter-time.Second, false)
	owner.expectAfter(time.Second, true)

	owner.expectAfter(stepDownEvery-time.Second, false)
	owner.expectAfter(time.Second, true)
}
