package model

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/record"
)

var seedFlag = flag.Uint64("model.seed", 0, "seed of TestNothingIsLostRepeatedOrOvertaken; 0: new ones")

const (
	schedules  = 3000  // of one run without a fault
	maxFinding = 20000 // in which an undone rule is found
	steps      = 90
)

// newSchedule returns the seeds of the steps of a schedule.
func newSchedule(seed uint64) []uint64 {
	random := rand.New(rand.NewPCG(seed, 1))
	list := make([]uint64, steps)
	for i := range list {
		list[i] = random.Uint64()
	}
	return list
}

// runSchedule runs a schedule, and returns its world.
func runSchedule(schedule []uint64, undo undo) *world {
	w := newWorld(undo)
	w.adds = len(schedule) > 0 && schedule[0]%4 == 0 || undo == sendOwed || undo == waitedForAll
	for _, seed := range schedule {
		w.rand = rand.New(rand.NewPCG(seed, 2))
		w.step()
		if w.violation != "" {
			return w
		}
	}
	w.rand = rand.New(rand.NewPCG(7, uint64(len(schedule))))
	w.settle()
	return w
}

// step lets one thing happen.
func (w *world) step() {
	if w.owner == nil && w.rand.IntN(3) == 0 {
		w.takeOver()
		return
	}
	if w.adds && !w.named && w.rand.IntN(30) == 0 {
		w.nameLate()
		return
	}
	t := w.anyTerm()

	switch kind := w.rand.IntN(44); {
	case kind < 5:
		w.commitEvents()
		return
	case kind < 6:
		w.cleanOutbox()
		return
	case kind < 7:
		w.cancel()
		return
	case kind < 8:
		w.now++
		return
	case kind < 13:
		w.drift(6)
		return
	case kind < 15:
		w.changeLeader()
		return
	case t == nil:
		return
	case kind < 21:
		t.read(w.rand.IntN(5))
	case kind < 26:
		t.sink.transmit(t.sink.parts[w.anyPart()], 1+w.rand.IntN(3))
	case kind < 29:
		t.ledger.write(1 + w.rand.IntN(4))
	case kind < 32:
		t.round()
	case kind < 35:
		t.checkpoint()
	case kind < 37:
		t.scheduled.claimDue()
	case kind < 38:
		t.scheduled.sendDue()
	case kind < 40:
		t.adoptTopics()
	case kind < 41:
		for _, tp := range w.kafka.parts {
			t.sink.park(t.sink.parts[tp])
		}
	case kind < 42:
		t.die("is killed")
	case kind < 43:
		// The owner is frozen, another one takes over, and then the first one wakes up.
		w.takeOver()
	default:
		w.handOver()
	}
}

func (w *world) anyPart() (tp record.TopicPartition) {
	return w.kafka.parts[w.rand.IntN(len(w.kafka.parts))]
}

// changeLeader takes the leader from a partition, or returns it.
func (w *world) changeLeader() {
	l := w.kafka.logs[w.anyPart()]
	l.leader = !l.leader
	w.logf("%v has a leader: %t", l.tp, l.leader)
	if l.leader {
		w.recoverPartition(l.tp)
	}
}

// recoverPartition lets the owners use a partition again. An owner that has to read it back ends.
func (w *world) recoverPartition(tp record.TopicPartition) {
	for _, t := range slices.Clone(w.terms) {
		if !t.sink.recover(t.sink.parts[tp]) {
			t.die("ends for a read-back of " + fmt.Sprint(tp))
		}
	}
}

// adoptTopics adopts the topics whose records wait.
func (t *term) adoptTopics() {
	for _, topic := range []string{"a", "b"} {
		isWanted := slices.ContainsFunc(t.sink.waiting, func(x *sent) bool { return x.rec.Topic == topic })
		if isWanted && !t.sink.adopted[topic] && !t.dead {
			t.sink.adopt(topic)
		}
	}
}

// handOver stops the owner: it drains, saves its checkpoint and releases the lease. Then another one takes over.
func (w *world) handOver() {
	t := w.owner
	if t == nil {
		return
	}
	for range 6 {
		w.progress(t)
	}
	t.checkpoint()
	t.die("releases the lease")
	w.takeOver()
}

// progress lets everything happen that can happen without a fault, except that nothing is read.
func (w *world) progress(t *term) {
	t.adoptTopics()
	for _, tp := range w.kafka.parts {
		t.sink.transmit(t.sink.parts[tp], 8)
	}
	for _, r := range slices.Clone(w.kafka.requests) {
		w.arrive(r)
		w.response(r)
	}
	for len(w.kafka.markers) > 0 {
		before := len(w.kafka.markers)
		w.land(before - 1)
		if len(w.kafka.markers) == before {
			break
		}
	}
	t.ledger.write(100)
}

// maxSettling bounds the rounds after which nothing may wait any more.
const maxSettling = 200

// settle repairs everything, and checks that all events arrive.
func (w *world) settle() {
	for _, t := range slices.Clone(w.terms) {
		if t != w.owner {
			t.die("ends")
		}
	}
	for _, tp := range w.kafka.parts {
		if !w.kafka.logs[tp].leader {
			w.kafka.logs[tp].leader = true
			w.recoverPartition(tp)
		}
	}

	if w.adds && !w.named {
		w.nameLate()
	}
	for range maxSettling {
		if w.violation != "" {
			return
		}
		t := w.owner
		if t == nil {
			w.takeOver()
			continue
		}
		w.now++
		t.read(8)
		w.progress(t)
		t.sender.Wake("")
		t.round()
		t.scheduled.claimDue()
		t.scheduled.sendDue()
		t.checkpoint()
		if !t.dead && w.isQuiet(t) {
			w.checkEnd()
			return
		}
	}
	w.fail("it is stuck: %d envelopes wait, %d claims are open (I6)", len(w.store), len(w.claims))
}

// isQuiet reports whether nothing is left to do.
func (w *world) isQuiet(t *term) bool {
	unresolved, _ := t.resolver.Unresolved()
	if unresolved > 0 || t.sweeps || t.cursor < len(w.stream) || len(w.store)+len(w.claims)+len(t.ledger.queue)+len(t.scheduled.held)+len(w.kafka.requests) > 0 {
		return false
	}
	for _, part := range t.sink.parts {
		if len(part.queue) > 0 {
			return false
		}
	}
	for _, s := range w.stream {
		if s.due != 0 && w.outboxes[s.ns][s.id] == s {
			return false
		}
	}
	return true
}

// shorten removes steps from a schedule as long as it breaks the same promise.
func shorten(schedule []uint64, undo undo, kind string) []uint64 {
	for size := len(schedule) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(schedule); {
			shorter := slices.Delete(slices.Clone(schedule), at, at+size)
			if w := runSchedule(shorter, undo); w.violation != "" && kindOf(w.violation) == kind {
				schedule = shorter
				continue
			}
			at += size
		}
	}
	return schedule
}

// kindOf returns the promise that a violation names.
func kindOf(violation string) string {
	return violation[strings.LastIndexByte(violation, '(')+1:]
}

// TestNothingIsLostRepeatedOrOvertaken runs random schedules. `-model.seed N` repeats one.
func TestNothingIsLostRepeatedOrOvertaken(t *testing.T) {
	t.Parallel()
	first, count := rand.Uint64()>>1, uint64(schedules)
	if *seedFlag != 0 {
		first, count = *seedFlag, 1
	}
	events := 0
	for seed := first; seed < first+count; seed++ {
		schedule := newSchedule(seed)
		w := runSchedule(schedule, nothing)
		events += len(w.stream)
		if w.violation == "" {
			continue
		}
		short := shorten(schedule, nothing, kindOf(w.violation))
		w = runSchedule(short, nothing)
		t.Fatalf("-model.seed %d, shortened to %d steps: %s\n%s", seed, len(short), w.violation, strings.Join(w.trace, "\n"))
	}
	t.Logf("%d schedules from seed %d with %d events", count, first, events)
}

// TestEachUndoneRuleIsFound removes one rule after the other: the schedules must find what that breaks.
func TestEachUndoneRuleIsFound(t *testing.T) {
	t.Parallel()
	for rule := nothing + 1; rule < undoCount; rule++ {
		t.Run(undone[rule].name, func(t *testing.T) {
			t.Parallel()
			// The same schedules in each run: with random ones, a rare violation would be missed now and then.
			for seed := uint64(1); seed <= maxFinding; seed++ {
				w := runSchedule(newSchedule(seed), rule)
				if w.violation != "" && strings.Contains(w.violation, undone[rule].finds) {
					t.Logf("found in schedule %d: %s", seed, w.violation)
					return
				}
			}
			t.Errorf("%d schedules do not find it", maxFinding)
		})
	}
}
