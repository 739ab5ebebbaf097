//go:build unix

package fault

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/demo/member"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

// shop appends orders until it is closed. Each order and its event are one transaction. One worker appends all
// orders of a key.
type shop struct {
	t    *testing.T
	s    *kit.Scene
	box  *outbox.Box
	stop context.CancelFunc
	wg   sync.WaitGroup
	n    atomic.Int64

	tolerant bool // appends may fail, because the test breaks the servers
	paused   atomic.Bool
}

const shopWorkers = 3

func openShop(t *testing.T, s *kit.Scene, rate int) *shop { return startShop(t, s, rate, false) }

// openTolerantShop opens a shop whose appends may fail. CountDocuments of member.OrdersColl has the number of its orders.
func openTolerantShop(t *testing.T, s *kit.Scene, rate int) *shop { return startShop(t, s, rate, true) }

func startShop(t *testing.T, s *kit.Scene, rate int, tolerant bool) *shop {
	t.Helper()
	box, err := outbox.New(s.DB)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	x := &shop{t: t, s: s, box: box, stop: stop, tolerant: tolerant}
	for w := range shopWorkers {
		x.wg.Go(func() { x.runWorker(ctx, w, rate) })
	}
	t.Cleanup(func() { x.closeShop() })
	return x
}

// closeShop stops the workers and returns the number of orders.
func (x *shop) closeShop() int {
	x.stop()
	x.wg.Wait()
	return int(x.n.Load())
}

func (x *shop) runWorker(ctx context.Context, worker, rate int) {
	const together = 5
	tick := time.NewTicker(time.Duration(together*shopWorkers) * time.Second / time.Duration(rate))
	defer tick.Stop()
	failed := 0
	for number := int64(0); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if x.paused.Load() {
			continue
		}

		var orders []any
		var events []event.Event
		for i := range together {
			number++
			key := fmt.Sprintf("c%d-%d-after-%d", worker, (int(number)/together+i)%7, failed)
			e := event.New(event.Aggregate{Type: "order", ID: key}, "OrderPlaced", event.Bytes("", fmt.Appendf(nil, `{"n":%d}`, number)), event.WithHeader(member.NumberHeader, strconv.AppendInt(nil, number, 10)))
			events = append(events, e)
			orders = append(orders, member.Order{Event: e.ID().String(), Key: key, Number: number})
		}

		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), kit.Patience)
		err := x.box.Transaction(within, func(ctx context.Context) error {
			if _, err := x.s.DB.Collection(member.OrdersColl).InsertMany(ctx, orders); err != nil {
				return err
			}
			return x.box.Append(ctx, events...)
		})

		cancel()
		if err != nil && !x.tolerant {
			x.t.Errorf("appending: %v", err)
			return
		}
		if err != nil {
			// The append may still be committed, even after the following ones. These use other keys.
			failed++
			continue
		}

		x.n.Add(together)
	}
}

// newShopScene starts a scene with a relay that has taken over, and two consumers of a role that share the partitions.
func newShopScene(t *testing.T, role member.Role) (*kit.Scene, *kit.Crew, []*kit.Process) {
	t.Helper()
	// A killed consumer leaves its transaction open. MongoDB keeps the locks of the transaction for this time, by default a minute.
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{
		Parameters: map[string]string{"transactionLifetimeLimitSeconds": "10"},
	}})
	s := kit.New(t, kit.Options{Stack: stack})
	c := s.NewCrew(role, "order")
	s.StartRelay().WaitTookOver()
	hands := []*kit.Process{c.StartMember(), c.StartMember()}
	c.WaitServing(hands...)
	return s, c, hands
}

// checkEffects waits for the effects of all orders, stops the consumers, and checks the effects and the
// dead letters.
func checkEffects(t *testing.T, s *kit.Scene, c *kit.Crew, orders int, hands []*kit.Process) {
	t.Helper()
	c.WaitEffects(orders)
	c.StopMembers(hands...)
	r, err := member.JudgeEffects(t.Context(), s.DB)
	if err != nil {
		t.Fatal(err)
	}

	counts, err := member.ReadCounts(t.Context(), s.DB)
	if err != nil {
		t.Fatal(err)
	}

	generations, err := member.Generations(t.Context(), s.DB)
	if err != nil {
		t.Fatal(err)
	}

	t.Logf("%d effects, %d generations of the group, %d messages rejected by the inbox", r.Effects, generations, counts.Rejected)
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	if r.Orders != orders || orders == 0 {
		t.Errorf("%d orders exist, want %d", r.Orders, orders)
	}

	c.CheckNothingDead()
}

// One of two consumers after the other is killed with SIGKILL under load, and replaced. Each order has its
// effect once, in the order of its key.
func TestConsumersDie(t *testing.T) {
	t.Parallel()
	s, c, hands := newShopScene(t, member.Effects)
	load := openShop(t, s, 300)
	for i := range chooseRounds(2, 30) {
		// Other consumers handle the messages of the killed one before the next kill, so that each kill hits
		// a working consumer.
		before, err := member.CountEffects(t.Context(), s.DB)
		if err != nil {
			t.Fatal(err)
		}
		c.WaitEffects(before + 100)
		hands[i%2].Kill()
		hands[i%2] = c.StartMember()
		c.WaitServing(hands...)
	}

	checkEffects(t, s, c, load.closeShop(), hands)
}

// The handler fails for every tenth order, three times each, after its writes. So there are always messages that are
// set aside, their followers, and retries. Again and again, one of two consumers is killed with SIGKILL. Each order has
// its effect once, in the order of its key, and at the end no message is set aside.
func TestConsumersDieWhileTheyRetry(t *testing.T) {
	stacktest.OnlyWith(t, "it takes a minute of both cores", "slow")
	t.Parallel()
	s, c, hands := newShopScene(t, member.Stumbling)
	aside := func(what string, enough func(n int64) bool) {
		t.Helper()
		stacktest.Eventually(t, what, func() bool {
			n, err := s.DB.Collection(setaside.DefaultCollection).CountDocuments(t.Context(), bson.D{})
			return err == nil && enough(n)
		})
	}

	load := openShop(t, s, 150)
	for i := range chooseRounds(3, 30) {
		before, err := member.CountEffects(t.Context(), s.DB)
		if err != nil {
			t.Fatal(err)
		}
		c.WaitEffects(before + 50)
		aside("messages that are set aside", func(n int64) bool { return n >= 5 })
		hands[i%2].Kill()
		hands[i%2] = c.StartMember()
		c.WaitServing(hands...)
	}

	orders := load.closeShop()
	c.WaitEffects(orders)
	aside("the end of the messages that are set aside", func(n int64) bool { return n == 0 })
	checkEffects(t, s, c, orders, hands)
}

// A third consumer joins and leaves every second, under load.
func TestRebalanceEverySecond(t *testing.T) {
	t.Parallel()
	s, c, hands := newShopScene(t, member.Effects)
	load := openShop(t, s, 300)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for range chooseRounds(2, 15) {
		third := c.StartMember()
		<-tick.C
		c.WaitServing(third)
		c.StopMembers(third)
		<-tick.C
	}

	checkEffects(t, s, c, load.closeShop(), hands)
}

// Two nodes take the steps of sagas. The messages arrive with many keys, each twice. One of the nodes is
// killed.
func TestSagaNodesDie(t *testing.T) {
	t.Parallel()
	sagas, steps := 20, chooseRounds(15, 100)
	s := kit.New(t, kit.Options{Types: []string{member.Asked, member.Taken}, Set: map[string]any{"record.preset": "plain"}})
	c := s.NewCrew(member.Saga, member.Asked)
	c.Spec.Steps = steps
	s.StartRelay().WaitTookOver()
	hands := []*kit.Process{c.StartMember(), c.StartMember()}
	c.WaitServing(hands...)
	box, err := outbox.New(s.DB)
	if err != nil {
		t.Fatal(err)
	}

	requestSteps(t, s, box, sagas, steps)
	for i := range chooseRounds(1, 4) {
		c.WaitSteps(sagas * steps * (i + 1) / chooseRounds(2, 5))
		hands[i%2].Kill()
		hands[i%2] = c.StartMember()
	}

	c.WaitServing(hands...)
	c.WaitSteps(sagas * steps)
	c.StopMembers(hands...)
	r, err := member.JudgeSteps(t.Context(), s.DB, "outbox", sagas, steps)
	if err != nil {
		t.Fatal(err)
	}

	counts, err := member.ReadCounts(t.Context(), s.DB)
	if err != nil {
		t.Fatal(err)
	}

	t.Logf("%d steps of %d sagas, %d run again after a conflict, %d messages rejected by the inbox", r.Steps, r.Sagas, counts.Conflicts, counts.Rejected)
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	if counts.Rejected == 0 {
		t.Error("the inbox rejected no message, although every fifth one arrived twice")
	}

	c.CheckNothingDead()
}

// requestSteps requests all steps through the outbox. It also writes some messages to the topic again, like a
// producer without the outcome of its write: with the namespace of the outbox, which belongs to the identity of a message.
func requestSteps(t *testing.T, s *kit.Scene, box *outbox.Box, sagas, steps int) {
	t.Helper()
	publisher, err := kafkago.New(transport.Config{Brokers: s.Brokers})
	if err != nil {
		t.Fatal(err)
	}
	defer publisher.Close()
	ns := routing.NamespaceHash(s.DB.Name() + "." + s.Outbox().Name())
	for n := 1; n <= steps; n++ {
		var events []event.Event
		var again []transport.Record
		for id := range sagas {
			e := member.Ask(int32(id), n, fmt.Sprintf("k%d", (id+n*7)%13))
			events = append(events, e)
			if (id+n)%5 == 0 {
				again = append(again, transport.Record{Key: []byte(e.Key()), Value: payloadOf(t, e), Headers: []event.Header{
					{Key: "id", Value: []byte(e.ID().String())},
					{Key: "type", Value: []byte(e.Name())},
					{Key: record.HeaderNamespace, Value: ns[:]},
				}})
			}
		}

		if err := box.Transaction(t.Context(), func(ctx context.Context) error { return box.Append(ctx, events...) }); err != nil {
			t.Fatal(err)
		}
		if err := publisher.Publish(t.Context(), s.TopicOf(member.Asked), again); err != nil {
			t.Fatal(err)
		}
	}
}

func payloadOf(t *testing.T, e event.Event) []byte {
	t.Helper()
	payload, err := e.Payload()
	if err != nil {
		t.Fatal(err)
	}
	return payload
}
