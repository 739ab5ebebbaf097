package process_test

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/offline"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// waitWatchers polls the documents of the watcher until ok returns true, and returns them.
func (b *bundle) waitWatchers(what string, ok func(map[string]admin.SlotStatus) bool) (now map[string]admin.SlotStatus) {
	b.t.Helper()
	// A node that was too slow for a slot waits until the node that took the slot gives it back, each time
	// longer.
	stacktest.EventuallyIn(b.t, 3*patience, what, func() bool {
		s, err := admin.ReadStatus(b.t.Context(), b.state)
		if err != nil {
			b.t.Fatal(err)
		}

		now = map[string]admin.SlotStatus{}
		for _, w := range s.Slots {
			now[w.Slot] = w
		}
		return ok(now)
	}, func() any { return fmt.Sprintf("%+v\n%s", now, b.log.wait(b.t, "")) })
	return now
}

// sharesAre returns a condition for waitWatchers: each node has that many slots.
func sharesAre(want map[string]int) func(map[string]admin.SlotStatus) bool {
	return func(now map[string]admin.SlotStatus) bool {
		got := map[string]int{}
		for _, w := range now {
			if w.Owner != "" && w.State == "live" {
				got[w.Node]++
			}
		}

		for n, k := range want {
			if got[n] != k {
				return false
			}
		}
		return len(got) == len(want)
	}
}

// checkExactly checks that the topic contains the appended events, once and in the order of each key.
func (b *bundle) checkExactly(n int) {
	b.t.Helper()
	last, ids := map[string]int{}, map[string]int{}

	for _, r := range b.consume(n) {
		at := 0
		if _, err := fmt.Sscan(string(r.Value), &at); err != nil {
			b.t.Fatal(err)
		}
		if prev, had := last[string(r.Key)]; had && at <= prev {
			b.t.Errorf("key %s: %d after %d", r.Key, at, prev)
		}
		last[string(r.Key)] = at
		ids[findID(r)]++
	}

	for x, k := range ids {
		if k != 1 {
			b.t.Errorf("%s came %d times", x, k)
		}
	}
}

func findID(r *kgo.Record) string {
	at := slices.IndexFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == "id" })
	if at < 0 {
		return ""
	}
	return string(r.Headers[at].Value)
}

// One process runs all slots of a watcher; each has envelopes, and all of them come once, in the order of their keys.
func TestN28_OneProcessRunsAllSlots(t *testing.T) {
	t.Parallel()
	b := setup(t)

	b.appendNumbered(0, 100)
	stop := b.start("slots=3", "node=a")
	b.waitWatchers("three slots of a", sharesAre(map[string]int{"a": 3}))
	b.appendNumbered(100, 300)
	b.checkExactly(300)

	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for s, w := range b.waitWatchers("released", func(map[string]admin.SlotStatus) bool { return true }) {
		if w.Owner != "" || !strings.HasSuffix(s, "of3") {
			t.Errorf("slot %s after a stop: %+v", s, w)
		}
	}

	// Again, from three positions.
	stop = b.start("slots=3", "node=a")
	b.appendNumbered(300, 400)
	b.checkExactly(400)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

// TestN28_AHandOverCanBeRequestedBeforeTheTermBegins: the balancer sees that another node has joined just after a slot was
// acquired. If the request were lost, the balancer would wait for the hand-over, and the slots would stay where they are.
func TestN28_AHandOverCanBeRequestedBeforeTheTermBegins(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var relay *process.Relay
	var once sync.Once
	b.log.seen = func(line string) {
		if strings.Contains(line, "lease acquired") && strings.Contains(line, "/1of2") {
			once.Do(func() { relay.RequestHandOver(1, "for the test") })
		}
	}

	b.startAs(func(r *process.Relay) { relay = r }, "slots=2", "node=a")
	b.log.wait(t, "for the test")
	b.waitWatchers("the slot is acquired again", sharesAre(map[string]int{"a": 2}))
}

// TestN28_ASlotWhoseAcquisitionSeemedToFailIsHandedOver: the server carries out the acquisitions of two slots and reports errors. The
// next attempts find the leases in the name of this process. If the balancer did not count these slots, it would never hand one over
// to a node that joins.
func TestN28_ASlotWhoseAcquisitionSeemedToFailIsHandedOver(t *testing.T) {
	t.Parallel()
	b := setup(t)
	node := stacktest.Name(t)
	off := stacktest.FailCommand(t, "outrelay state "+node, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"findAndModify"}},
		{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 64}, {Key: "errmsg", Value: "for the test"}}},
	})

	b.start("slots=2", "node="+node)
	b.log.wait(t, "/0of2: ")
	b.log.wait(t, "/1of2: ")
	off()
	b.waitWatchers("both slots of the first node", sharesAre(map[string]int{node: 2}))

	b.start("slots=2", "node=b")
	b.waitWatchers("one slot for each", sharesAre(map[string]int{node: 1, "b": 1}))
}

// appendOne appends one event with that key.
func (b *bundle) appendOne(key string, n int) {
	if err := b.box.Append(b.t.Context(), event.New(event.Aggregate{Type: "order", ID: key}, "Placed", event.Bytes("", []byte(fmt.Sprint(n))))); err != nil {
		b.t.Error(err)
	}
}

// appendNumbered appends events of 40 keys with a number that grows.
func (b *bundle) appendNumbered(from, to int) {
	b.t.Helper()
	for i := from; i < to; i++ {
		b.appendOne(fmt.Sprintf("k%d", i%40), i)
	}
}

// startLoad appends events as appendNumbered does, one after the other, until stop. stop returns their number.
func (b *bundle) startLoad() (stop func() int) {
	ended, n := make(chan struct{}), 0
	quit := make(chan struct{})

	go func() {
		defer close(ended)
		for {
			select {
			case <-quit:
				return
			default:
			}
			b.appendOne(fmt.Sprintf("k%d", n%40), n)
			n++
		}
	}()

	return func() int {
		close(quit)
		<-ended
		return n
	}
}

// Nodes that join and leave get their share within a few renewals, and nothing is lost, repeated or out of order.
func TestN28_NodesShareTheSlots(t *testing.T) {
	t.Parallel()
	b := setup(t)

	quiet := b.startLoad()
	first := b.start("slots=4", "node=a")
	b.waitWatchers("all four of a", sharesAre(map[string]int{"a": 4}))

	b.start("slots=4", "node=b")
	b.waitWatchers("two each", sharesAre(map[string]int{"a": 2, "b": 2}))
	third := b.start("slots=4", "node=c")
	b.waitWatchers("two, one, one", func(now map[string]admin.SlotStatus) bool {
		return sharesAre(map[string]int{"a": 2, "b": 1, "c": 1})(now) || sharesAre(map[string]int{"a": 1, "b": 2, "c": 1})(now)
	})

	if err := first(); err != nil {
		t.Error(err)
	}
	b.waitWatchers("two each without a", sharesAre(map[string]int{"b": 2, "c": 2}))

	if err := third(); err != nil {
		t.Error(err)
	}
	b.waitWatchers("all four of b", sharesAre(map[string]int{"b": 4}))
	b.checkExactly(quiet())
}

// A process that is configured for another number of slots does nothing and logs the reason.
func TestN28_AnotherNumberOfSlotsIsRejected(t *testing.T) {
	t.Parallel()
	b := setup(t)

	stop := b.start("slots=2", "node=a")
	b.waitWatchers("both of a", sharesAre(map[string]int{"a": 2}))
	b.start("node=b")
	b.log.wait(t, "has 2 slots, and this process is configured for 1")

	if err := stop(); err != nil {
		t.Fatal(err)
	}
	now := b.waitWatchers("released", func(now map[string]admin.SlotStatus) bool { return now["0of2"].Owner == "" })
	if _, made := now["0of1"]; made {
		t.Errorf("it created a document: %+v", now)
	}
}

// reslice divides the watcher into a number of slots that no configuration has.
func (b *bundle) reslice(n int) (offline.ResliceReport, error) {
	cfg, _, err := config.Load("", b.env, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return offline.Reslice(b.t.Context(), cfg, slog.New(slog.NewTextHandler(b.log, nil)), offline.ResliceOptions{Slots: n, Wait: 40 * time.Second, Actor: "test"})
}

// From one slot to two, to three, and back to one, while events are appended and processes with the old configuration
// run: nothing is lost, repeated or out of order.
func TestN28_ResliceUnderLoad(t *testing.T) {
	t.Parallel()

	b := setup(t)
	quiet := b.startLoad()
	stop := b.start("node=a")
	b.waitWatchers("one slot", sharesAre(map[string]int{"a": 1}))

	for i, slots := range []int{2, 3, 1} {
		rep, err := b.reslice(slots)
		if err != nil || !rep.Done {
			t.Fatalf("%+v, %v", rep, err)
		}
		node := fmt.Sprintf("n%d", i)
		next := b.start(fmt.Sprintf("slots=%d", slots), "node="+node)
		b.waitWatchers("the new division", func(now map[string]admin.SlotStatus) bool {
			return len(now) == slots && sharesAre(map[string]int{node: slots})(now)
		})
		if err := stop(); err != nil {
			t.Error(err)
		}
		stop = next
	}

	b.checkExactly(quiet())
	if rep, err := b.reslice(1); err != nil || !rep.Done || rep.From != 1 {
		t.Errorf("one slot again: %+v, %v", rep, err)
	}
}

// A slot that is far ahead of the others at a reslice has delivered events that the new stream repeats, at offsets that
// no read-back reaches, because the other slots have passed them.
func TestN28_EventsThatASlotHadPassedAreNotSentAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)

	stop := b.start("slots=2", "node=a")
	b.waitWatchers("both of a", sharesAre(map[string]int{"a": 2}))
	b.appendNumbered(0, 100)
	b.checkExactly(100)

	first := admin.Operator{State: b.state, Watcher: "default", Actor: "test", Slot: "0of2"}
	if err := first.Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.waitWatchers("slot 0 is paused", func(now map[string]admin.SlotStatus) bool { return now["0of2"].Owner == "" })

	b.appendNumbered(100, 300)
	other := 0
	for i := range 40 {
		if keyhash.Slot(fmt.Appendf(nil, "k%d", i)) >= keyhash.Slots/2 {
			other += 5
		}
	}
	b.checkExactly(100 + other)

	if err := stop(); err != nil {
		t.Fatal(err)
	}

	docs := b.state.Collection("watchers")
	ahead, _, err := lease.Read(t.Context(), docs, "default/1of2")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := docs.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "default/0of2"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "offsets", Value: ahead.Offsets}}}}); err != nil {
		t.Fatal(err)
	}
	// No node is there to run the slot.
	if err := first.Lease().Resume(t.Context()); err != nil {
		t.Fatal(err)
	}

	if rep, err := b.reslice(1); err != nil || !rep.Done {
		t.Fatalf("%+v, %v", rep, err)
	}
	b.start("node=b")
	now := b.waitWatchers("one slot", sharesAre(map[string]int{"b": 1}))
	if len(now) != 1 {
		t.Errorf("documents: %+v", now)
	}

	b.appendNumbered(300, 400)
	b.checkExactly(400)
	kept, _, err := lease.Read(t.Context(), docs, "default/0of1")
	if err != nil || len(kept.Passed) > 1 {
		t.Errorf("it has passed %+v, %v", kept.Passed, err)
	}
	b.waitWatchers("the places are taken off the document", func(map[string]admin.SlotStatus) bool {
		d, _, err := lease.Read(t.Context(), docs, "default/0of1")
		return err == nil && len(d.Passed) == 0
	})
}

// Each slot sweeps its own envelopes: none is left out, and none is sent by two slots.
func TestN28_EachSlotSweepsItsOwn(t *testing.T) {
	t.Parallel()
	b := setup(t)

	b.start("slots=3", "node=a")
	b.waitWatchers("three slots of a", sharesAre(map[string]int{"a": 3}))
	b.appendNumbered(0, 120)
	b.checkExactly(120)

	if err := (admin.Operator{State: b.state, Watcher: "default", Actor: "test"}).Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
		t.Fatal(err)
	}
	ids := map[string]int{}
	for _, r := range b.consume(240) {
		ids[findID(r)]++
	}

	b.appendNumbered(120, 160)
	b.waitWatchers("all is swept", func(now map[string]admin.SlotStatus) bool {
		docs := b.state.Collection("watchers")
		n, err := docs.CountDocuments(t.Context(), bson.D{{Key: "gap", Value: bson.D{{Key: "$exists", Value: true}}}})
		return err == nil && n == 0 && sharesAre(map[string]int{"a": 3})(now)
	})

	clear(ids)
	for _, r := range b.consume(280) {
		ids[findID(r)]++
	}
	for x, n := range ids {
		if n > 2 {
			t.Errorf("%s came %d times", x, n)
		}
	}

	if len(ids) != 160 {
		t.Errorf("%d envelopes arrived", len(ids))
	}
}

// An envelope that an operator requeues is published by the slot of its key, once.
func TestN28_WaitingEnvelopesOfOthersHaveOneSlot(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("slots=3", "node=a")
	b.waitWatchers("three slots of a", sharesAre(map[string]int{"a": 3}))

	var list []waiting.Entry
	for i := range 60 {
		key := fmt.Sprintf("k%d", i)
		doc := bson.D{
			{Key: "_id", Value: fmt.Sprintf("requeued-%d", i)},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: key},
			{Key: "type", Value: "Placed"},
			{Key: "payload", Value: bson.Binary{Data: fmt.Append(nil, i)}},
		}
		// Envelopes without a slot belong to slot 0.
		if i%4 != 0 {
			doc = append(doc, bson.E{Key: "slot", Value: keyhash.Slot([]byte(key))})
		}
		raw, err := bson.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, waiting.Entry{
			Watcher: "default", NS: b.db.Name() + ".outbox", Raw: raw, Key: key, Slot: waiting.SlotOf(raw), Pos: "82", Delivery: 1,
			Reason: waiting.Queued, Origin: waiting.OriginRequeue, NextAt: time.Now(),
		})
	}
	if err := waiting.Enter(t.Context(), b.state.Collection("waiting"), list); err != nil {
		t.Fatal(err)
	}

	b.consume(60)
	b.waitWatchers("nothing waits", func(map[string]admin.SlotStatus) bool {
		return b.countWaiting(bson.D{}) == 0
	})

	b.appendNumbered(100, 110)
	ids := map[string]int{}
	for _, r := range b.consume(70) {
		ids[findID(r)]++
	}

	for x, n := range ids {
		if n != 1 {
			t.Errorf("%s came %d times", x, n)
		}
	}
}

// oneAndTwo reports whether a and b share three slots; who of them has two is decided by who came first.
func oneAndTwo(now map[string]admin.SlotStatus) bool {
	return sharesAre(map[string]int{"a": 1, "b": 2})(now) || sharesAre(map[string]int{"a": 2, "b": 1})(now)
}

// A slot goes where it is pinned, and counts there; one that is paused runs nowhere, at once, and anywhere when it goes on, also
// when the node that had it is gone.
func TestN28_PinAndPauseASlot(t *testing.T) {
	t.Parallel()
	b := setup(t)

	stopA := b.start("slots=3", "node=a")
	b.waitWatchers("all of a", sharesAre(map[string]int{"a": 3}))
	b.start("slots=3", "node=b")
	b.waitWatchers("two of one", oneAndTwo)

	b.appendNumbered(0, 60)
	op := func(slot string) admin.Operator {
		return admin.Operator{State: b.state, Watcher: "default", Actor: "test", Slot: slot}
	}

	for _, s := range []string{"0of3", "1of3", "2of3"} {
		if err := op(s).Lease().PinAhead(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
	}
	b.waitWatchers("all where they are pinned", sharesAre(map[string]int{"b": 3}))
	b.appendNumbered(60, 120)

	if err := op("").Lease().Pin(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	now := b.waitWatchers("shared again", oneAndTwo)

	of := ""
	for s, w := range now {
		if w.Node == "a" {
			of = s
		}
	}

	if err := op(of).Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.waitWatchers("paused, and the others are shared", func(now map[string]admin.SlotStatus) bool {
		return now[of].State == "paused" && now[of].Owner == "" && sharesAre(map[string]int{"a": 1, "b": 1})(now)
	})

	b.appendNumbered(120, 180)
	if err := stopA(); err != nil {
		t.Fatal(err)
	}
	b.waitWatchers("b has the slots that are not paused", sharesAre(map[string]int{"b": 2}))

	if err := op(of).Lease().Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.waitWatchers("b has all", sharesAre(map[string]int{"b": 3}))
	b.checkExactly(180)
}
