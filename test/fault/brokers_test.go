//go:build unix

package fault

import (
	"testing"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// TestBrokerKilledUnderLoad kills a broker of a cluster of three under load and starts it again. The effect
// depends on the topic, so four scenes share one cluster, which is started once. Each step is taken for one
// scene after the other, while all scenes continue.
func TestBrokerKilledUnderLoad(t *testing.T) {
	stacktest.OnlyWith(t, "it starts a cluster of three brokers", "slow")
	t.Parallel()
	// The controller detects a dead broker within 3 s.
	stack := stacktest.Own(t, devstack.Options{Brokers: 3, Quick: true, Kafka: devstack.KafkaOptions{
		Props: map[string]string{"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"},
	}})

	scenes := []onBrokers{
		&leaderless{zombie{witness: newWitness(t, stack, kit.Options{})}},
		&zombie{witness: newWitness(t, stack, kit.Options{Replicas: 3, Partitions: 3, Topic: minISR("3")})},
		&replicated{witness: newWitness(t, stack, kit.Options{Replicas: 3, Topic: minISR("2")})},
		&mixed{witness: newWitness(t, stack, kit.Options{
			Assigned: [][]int{{1}, {2}, {3}, {1, 2}, {2, 3}, {3, 1}}, Topic: minISR("2"), Set: map[string]any{"limits.tickets": 1000},
		})},
	}

	for _, s := range scenes {
		s.startLoad()
	}

	for round := range chooseRounds(1, 12) {
		for _, s := range scenes {
			s.beforeKill(t)
		}

		// Each broker leads a third of the partitions of each topic.
		broker, err := stack.Leader(t.Context(), scenes[0].topic(), round%6)
		mustSucceed(t, err)
		mustSucceed(t, broker.Kill())
		for _, s := range scenes {
			s.afterKill(t)
		}

		for _, s := range scenes {
			s.afterOwnersLost(t, round)
		}

		mustSucceed(t, broker.Restart(t.Context()))
		for _, s := range scenes {
			s.brokerReturns(t, stack, broker, round)
		}
	}

	for _, s := range scenes {
		s.checkResult(t)
	}
}

func minISR(n string) []kafka.ConfigEntry {
	return []kafka.ConfigEntry{{ConfigName: "min.insync.replicas", ConfigValue: n}}
}

// onBrokers is a scene on a cluster of which a broker dies.
type onBrokers interface {
	topic() string
	startLoad()
	beforeKill(t *testing.T)
	afterKill(t *testing.T)
	afterOwnersLost(t *testing.T, round int) // after other owners were killed as well
	brokerReturns(t *testing.T, stack *devstack.Stack, broker *devstack.Member, round int)
	checkResult(t *testing.T)
}

// witness is a scene under load, with the topics and the history that it is checked by.
type witness struct {
	s       *kit.Scene
	history *kit.History
	topics  *kit.Topics
	owner   *kit.Process
	load    *kit.RunningLoad
}

func newWitness(t *testing.T, stack *devstack.Stack, o kit.Options) witness {
	t.Helper()
	o.Stack = stack
	s := kit.New(t, o)
	s.SetConfig("kafka.request_timeout", "2s")
	return witness{s: s, history: s.FollowWatcher(), topics: s.ReadTopics(), owner: s.StartRelay()}
}

func (w *witness) startLoad() {
	w.owner.WaitTookOver()
	w.load = w.s.StartLoad(kit.Load{Rate: steadyRate()})
}

func (w *witness) topic() string { return w.s.TopicOf("order") }

// waitMore waits until n more events than are committed now have been delivered.
func (w *witness) waitMore(n int) { w.topics.WaitDistinct(w.s.Ledger.CountCommitted() + n) }

// startReplacement starts another owner in place of a killed one.
func (w *witness) startReplacement() {
	w.owner = w.s.StartRelay()
	w.owner.WaitTookOver()
}

func (w *witness) checkResult(t *testing.T) {
	t.Helper()
	w.load.Stop()
	t.Logf("%s: %s", w.topic(), w.s.CheckDelivery(w.topics))
	w.s.WaitNoneHeld()
	w.history.CheckHistory()
	checkEpochs(t, w.topics)
}

// replicated tests partitions that get another leader: the delivery continues.
type replicated struct{ witness }

func (r *replicated) beforeKill(t *testing.T) {
	t.Helper()
	r.waitMore(100)
}

func (r *replicated) afterKill(t *testing.T) {
	t.Helper()
	r.waitMore(200)
}

func (r *replicated) afterOwnersLost(*testing.T, int) {}

// brokerReturns moves a leader to the broker, and kills the owner while the cluster settles.
func (r *replicated) brokerReturns(t *testing.T, stack *devstack.Stack, broker *devstack.Member, round int) {
	t.Helper()
	r.waitMore(100)
	mustSucceed(t, stack.MoveLeader(t.Context(), r.topic(), (round+1)%6, broker.ID()))
	r.waitMore(100)
	r.owner.Kill()
	r.startReplacement()
}

// zombie tests partitions that cannot be written while the broker is away. The owner is frozen, and a standby
// takes over without waiting for these partitions. The frozen owner continues when the partitions are back, and
// must not write to them.
type zombie struct {
	witness
	standby *kit.Process
}

func (z *zombie) beforeKill(t *testing.T) {
	t.Helper()
	z.owner, z.standby = z.s.StartStandby(z.owner)
	z.waitMore(100)
}

func (z *zombie) afterKill(t *testing.T) {
	t.Helper()
	z.s.WaitForStatus("an unwritable target", func(st kit.Status) bool { return len(st.Unwritable) > 0 })
	z.owner.Freeze()
}

func (z *zombie) afterOwnersLost(t *testing.T, _ int) {
	t.Helper()
	z.standby.WaitTookOver()
	z.s.WaitForStatus("an unwritable target of the successor", func(st kit.Status) bool {
		return st.Node == z.standby.Node && len(st.Unwritable) > 0
	})
}

func (z *zombie) brokerReturns(t *testing.T, _ *devstack.Stack, _ *devstack.Member, _ int) {
	t.Helper()
	z.owner.Continue()
	z.owner.WaitForLog("lease lost")
	z.topics.WaitDistinct(z.s.Ledger.CountCommitted())
	z.s.WaitForStatus("nothing blocked", func(st kit.Status) bool { return len(st.Unwritable) == 0 })
	z.owner.Kill()
	z.owner = z.standby
}

// leaderless tests partitions with one replica. They are away for longer than the wait for a target, so their
// events are parked. One batch has an unknown fate. Owners die in the meantime and while the broker comes back.
type leaderless struct{ zombie }

func (l *leaderless) afterKill(t *testing.T) {
	t.Helper()
	l.waitParked(t, "something is parked", func(n int) bool { return n > 50 })
	l.zombie.afterKill(t)
}

func (l *leaderless) afterOwnersLost(t *testing.T, round int) {
	t.Helper()
	l.zombie.afterOwnersLost(t, round)
	if round%2 == 1 {
		l.standby.Kill()
		l.standby = l.s.StartRelay()
		l.standby.WaitTookOver()
	}
}

func (l *leaderless) brokerReturns(t *testing.T, stack *devstack.Stack, broker *devstack.Member, round int) {
	t.Helper()
	switch round % 3 {
	case 0:
		l.owner.Continue()
		l.owner.WaitForLog("lease lost")
		l.owner.Kill()
		l.standby.Kill()
		killOwners(t, l.s, "mid-waiting-write", "after-produce-before-ack:6")
		l.startReplacement()
	case 1:
		l.waitParked(t, "some of it was delivered", func(n int) bool { return n < 50 })
		fallthrough
	default:
		l.zombie.brokerReturns(t, stack, broker, round)
	}

	l.waitParked(t, "nothing is parked", func(n int) bool { return n == 0 })
}

// mixed tests a topic whose partitions fail in different ways while one broker is away: one has no leader, two have too few
// in-sync replicas, and the others are healthy. The first is parked soon, and the two when the window, which is small, is nearly
// full. The short run waits for the first only. Owners are killed while they are parked, and while they return.
type mixed struct{ witness }

func (m *mixed) startLoad() {
	m.owner.WaitTookOver()
	m.load = m.s.StartLoad(kit.Load{Rate: float64(chooseRounds(40, 120))})
}

func (m *mixed) beforeKill(t *testing.T) {
	t.Helper()
	m.waitMore(100)
}

func (m *mixed) afterKill(t *testing.T) {
	t.Helper()
	m.waitSickParked("the sick partitions are parked")
	m.owner.Kill()
}

func (m *mixed) waitSickParked(what string) {
	m.s.WaitForStatus(what, func(st kit.Status) bool {
		parked := 0
		for _, b := range st.Unwritable {
			if b.Parked {
				parked++
			}
		}
		return st.Node == m.owner.Node && parked >= chooseRounds(1, 3)
	})
}

func (m *mixed) afterOwnersLost(t *testing.T, _ int) {
	t.Helper()
	m.startReplacement()
	m.waitSickParked("the sick partitions are parked by the successor")
}

func (m *mixed) brokerReturns(t *testing.T, _ *devstack.Stack, _ *devstack.Member, round int) {
	t.Helper()
	m.owner.Kill()
	killOwners(t, m.s, []string{"after-produce-before-ack:6", "mid-waiting-write"}[round%2])
	m.startReplacement()
	m.topics.WaitDistinct(m.s.Ledger.CountCommitted())
	stacktest.Eventually(t, "nothing is parked", func() bool { return m.s.CountHeld("parked") == 0 })
}

func (l *leaderless) waitParked(t *testing.T, what string, ok func(n int) bool) {
	t.Helper()
	stacktest.Eventually(t, what, func() bool { return ok(l.s.CountHeld("parked", "blocked")) })
}
