//go:build unix

package fault

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/demo/member"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

// `go test ./test/fault -run TestSoak -timeout 0 -v -args -fault.soak 8h` goes on for that long. The log has the seed. -fault.seed
// repeats the faults and the writers of each era, but not the order of the goroutines.
var (
	soakTime = flag.Duration("fault.soak", 0, "how long TestSoak runs; 0: one era of a few faults")
	soakSeed = flag.Uint64("fault.seed", 0, "seed of TestSoak; 0: a new one")
	soakSite = flag.String("fault.site", "", "servers of the eras of a long TestSoak: shared, cluster or small; empty: all in turn")
)

const (
	shortFaults = 3  // of the era that always runs
	longFaults  = 12 // of each era of a long run

	// calmDown bounds the time from the end of a fault until events take no longer than usual. A partition that was in quarantine
	// may need half of it (docs/rules.md).
	calmDown = 60 * time.Second
	usual    = time.Second
)

// TestSoak runs eras of random faults. Each has new databases, topics, relays and consumers, writers of all kinds, and a
// comparison after each fault and at its end. One more relay runs through all eras: its memory, goroutines and connections stay flat.
func TestSoak(t *testing.T) {
	t.Parallel()
	seed := *soakSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-fault.seed %d", seed)

	faults, sites := shortFaults, []*site{newSharedSite(t)}
	if *soakTime > 0 {
		faults, sites = longFaults, newSites(t)
	}
	// If there is a cluster, its servers are killed and replaced under this relay too.
	lasting := newLasting(t, sites[len(sites)-1].stack)

	began, total := time.Now(), tally{}
	for number := 0; number == 0 || time.Since(began) < *soakTime; number++ {
		at := sites[number%len(sites)]
		t.Run(fmt.Sprintf("era %d, %s", number, at.name), func(t *testing.T) {
			newEra(t, rand.New(rand.NewPCG(seed, uint64(number))), at).makeFaults(faults, &total)
		})
		if t.Failed() {
			break
		}
		lasting.measure()
	}

	lasting.finish()
	t.Logf("-fault.seed %d: %s, %d eras, %d faults, %d events, %d flagged repeats, slowest recovery %s (%s)",
		seed, time.Since(began).Round(time.Second), total.eras, total.faults, total.events, total.repeats, total.slowest.Round(time.Millisecond), total.slowestFault)
}

// tally adds up the eras.
type tally struct {
	eras, faults, events, repeats int
	slowest                       time.Duration
	slowestFault                  string
}

// era is one scene under faults.
type era struct {
	*kit.Scene
	*tally
	t      *testing.T
	random *rand.Rand
	site   *site

	slots   int
	topics  *kit.Topics
	history *kit.History // nil with slots: it follows one document
	box     *outbox.Box
	loads   []*kit.RunningLoad
	relays  []*kit.Process
	types   []string // aggregate types whose topics exist

	role   member.Role
	orders *shop
	crew   *kit.Crew // of the orders
	hands  []*kit.Process
	sagas  *kit.Crew
	steps  int // the steps that were requested from each saga
	wanted int // the steps until a saga is complete

	keys    int // that no other event has
	cleaned int // entries of the ledger that the cleaning job has seen
}

// soakSagas is the number of sagas of an era.
const soakSagas = 5

func newEra(t *testing.T, random *rand.Rand, at *site) *era {
	t.Helper()
	// The topic "late" does not exist at first. "grown" gets partitions, so its events have one key each.
	types := []string{"item", "timer", "grown", "tenant", "narrow", member.Asked}
	given := kit.Options{Stack: at.stack, MongoURI: at.mongoURI(), Types: append(types, "order", member.Taken), Partitions: 3, Replicas: at.replicas}
	e := &era{Scene: kit.New(t, given), t: t, random: random, site: at, types: types}
	e.SetTopicConfig("narrow", "max.message.bytes", narrowBytes)
	e.SetConfig("watch", []string{e.DB.Name() + ".outbox", e.Prefix + "-tenant*.outbox"})
	e.chooseSettings()
	e.topics = e.ReadTopics(append(types, "late")...)

	var err error
	e.box, err = outbox.New(e.DB)
	mustSucceed(t, err)
	e.relays = []*kit.Process{e.StartRelay()}
	e.relays[0].WaitTookOver()
	e.relays = append(e.relays, e.StartRelay())
	return e
}

// chooseSettings chooses the settings that differ between eras.
func (e *era) chooseSettings() {
	e.t.Helper()
	e.slots = 1 + e.random.IntN(2)
	e.role = []member.Role{member.Effects, member.Stumbling}[e.random.IntN(2)]
	recording := []string{"position", "mark"}[e.random.IntN(2)]
	e.SetConfig("slots", e.slots)
	e.SetConfig("recording", recording)
	e.t.Logf("slots: %d, recording: %s, consumers: %s", e.slots, recording, e.role)
	if e.slots == 1 {
		e.history = e.FollowWatcher()
	}
}

// startWriters starts the writers that go on during the faults, and the consumers of their events.
func (e *era) startWriters(rounds int) {
	e.t.Helper()
	e.expireOld()
	e.loads = []*kit.RunningLoad{
		e.StartLoad(kit.Load{Type: "item", Rate: 20, Tolerant: true}), e.StartLoad(kit.Load{Type: "late", Rate: 5, Tolerant: true}),
	}

	e.crew = e.NewCrew(e.role, "order")
	e.sagas = e.NewCrew(member.Saga, member.Asked)
	e.wanted = rounds
	e.sagas.Spec.Steps = rounds
	e.hands = []*kit.Process{e.crew.StartMember(), e.crew.StartMember(), e.sagas.StartMember()}
	e.crew.WaitServing(e.hands[:2]...)
	e.sagas.WaitServing(e.hands[2])
	e.orders = openTolerantShop(e.t, e.Scene, 30)
}

// makeFaults makes the faults, each with some writers before it and a comparison after it.
func (e *era) makeFaults(faults int, total *tally) {
	e.t.Helper()
	e.tally = total
	e.startWriters(faults)
	for range faults {
		e.askSagas()
		e.writeSome()

		next := e.site.nextFault(e.random)
		e.t.Logf("%s: %s", time.Now().UTC().Format(time.StampMilli), next.name)
		next.do(e)
		e.faults++

		e.awaitCalm(next.name)
		e.checkNow()
		if e.t.Failed() {
			return
		}
	}
	e.finish()
}

// newKey returns a key that no other event has.
func (e *era) newKey(kind string) string {
	e.keys++
	return kind + strconv.Itoa(e.keys)
}

// wait lets a fault last for some time.
func (e *era) wait(least, most time.Duration) {
	waitFor(e.t, least+time.Duration(e.random.Int64N(int64(most-least))))
}

// awaitCalm waits until events take no longer than usual.
func (e *era) awaitCalm(fault string) {
	e.t.Helper()
	began := time.Now()
	for {
		took := e.probe()
		calm := time.Since(began)

		if took <= usual {
			if calm-took > e.slowest {
				e.slowest, e.slowestFault = calm-took, fault
			}
			return
		}
		if calm > calmDown {
			e.t.Errorf("%s after the fault %q was over, events still took %s", calm.Round(time.Second), fault, took)
			return
		}
	}
}

// probe returns how long one transaction with events for all partitions takes, from its commit to the last record.
func (e *era) probe() time.Duration {
	e.t.Helper()
	var sent []event.Event
	for range 8 {
		sent = append(sent, kit.NewEvent("item", e.newKey("probe-"), 1, 60))
	}
	e.AppendEvents(e.Outbox(), sent...)

	begin := time.Now()
	for _, one := range sent {
		e.awaitRecord(e.topics, one)
	}
	return time.Since(begin)
}

func (e *era) awaitRecord(topics *kit.Topics, sent event.Event) *kit.Record {
	e.t.Helper()
	id := sent.ID().String()
	return topics.WaitForRecord("the record of "+sent.Key(), func(r *kit.Record) bool { return r.Header("id") == id })
}

// checkNow checks everything that was committed until now: it arrives, in order and unchanged, and has its effects. Commits go on,
// so records of which the ledger has no entry yet do not count.
func (e *era) checkNow() {
	e.t.Helper()
	for _, p := range e.relays {
		select {
		case <-p.Done():
			e.t.Errorf("the relay %s has ended", p.Node)
		default:
		}
	}

	// On a busy machine, orders may come faster than consumers can handle them.
	e.orders.paused.Store(true)
	defer e.orders.paused.Store(false)
	orders := e.countOrders()

	e.WaitDelivered(e.topics, e.types...)
	verdict := e.Ledger.Compare(e.topics.AllRecords())
	verdict.Lost, verdict.Phantoms = nil, nil
	e.judge(verdict)
	e.crew.WaitEffects(orders)
	e.sagas.WaitSteps(soakSagas * e.steps)
}

// judge fails the test if a comparison has found a violation. After lost history, repeats are flagged.
func (e *era) judge(verdict kit.Verdict) {
	e.t.Helper()
	if e.site.forgets {
		verdict.Duplicates = nil
		checkRepeatsFlagged(e.t, e.topics)
	}
	if !verdict.OK() {
		e.t.Errorf("promises are violated: %s", verdict)
	}
}

func (e *era) countOrders() int {
	e.t.Helper()
	n, err := e.DB.Collection(member.OrdersColl).CountDocuments(e.t.Context(), bson.D{})
	mustSucceed(e.t, err)
	return int(n)
}

// finish stops the writers and compares everything.
func (e *era) finish() {
	e.t.Helper()
	for _, load := range e.loads {
		load.Stop()
	}
	e.orders.closeShop()
	e.createLate()
	verdict := e.CompareAtEnd(e.topics)
	e.eras++
	e.events += verdict.Events
	e.repeats += len(verdict.Duplicates)
	e.judge(verdict)
	e.WaitNoneHeld()
	e.CheckDead()
	if e.history != nil {
		e.history.CheckHistory()
	}

	orders := e.countOrders()
	e.sagas.WaitSteps(soakSagas * e.steps)
	e.crew.WaitEffects(orders)
	r, err := member.JudgeSteps(e.t.Context(), e.DB, "outbox", soakSagas, e.wanted)
	mustSucceed(e.t, err)
	if err := r.Err(); err != nil {
		e.t.Error(err)
	}
	checkEffects(e.t, e.Scene, e.crew, orders, e.hands)
	e.t.Logf("%s; %d orders, %d steps of sagas", verdict, orders, r.Steps)
}

// owner returns the relay that owns the watcher, or one at random if none does or the watcher is divided into slots.
func (e *era) owner() *kit.Process {
	if e.slots > 1 {
		return e.anyRelay()
	}
	node, _ := e.WatcherDocument().Lookup("node").StringValueOK()
	if i := slices.IndexFunc(e.relays, func(p *kit.Process) bool { return p.Node == node }); i >= 0 {
		return e.relays[i]
	}
	return e.anyRelay()
}

func (e *era) anyRelay() *kit.Process { return e.relays[e.random.IntN(len(e.relays))] }

// eventually is stacktest.EventuallyIn with the time limit of the other waits.
func (e *era) eventually(condition string, ok func() bool) {
	e.t.Helper()
	stacktest.EventuallyIn(e.t, kit.Patience, condition, ok)
}
