package fence

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// chaosRounds: `go test ./internal/kafka/fence -run Chaos -fault.long 16 -timeout 30m -v`; a round takes some 15 s.
var chaosRounds = flag.Int("fault.long", 0, "rounds of TestN04_Chaos: brokers are killed and a zombie is left behind in each")

const chaosParts = 12

// chaosDoc is the watcher document of the chaos test, and its books.
type chaosDoc struct {
	mu       sync.Mutex
	term     int
	senders  []record.Sender
	offsets  []int64
	next     []int           // first event of each partition that is not known to be in the log
	released []map[int]int64 // by partition and owner: below that offset all of the earlier owners stands
	found    int             // events found only by a read-back
}

// chaosOwner is an owner whose lanes never notice the loss of its lease: only Kafka stops them. Its transactions are gated,
// as in production: an owner that takes the next generation after it was deposed would only fence its successor, who
// would then take over once more.
type chaosOwner struct {
	k     int
	c     *Client
	tb    testing.TB
	topic string
	doc   *chaosDoc
	s     *Session

	root     context.Context    // of the owner
	ctx      context.Context    // of the lanes; replaced while none runs
	stop     context.CancelFunc // of the lanes
	lanes    sync.WaitGroup
	loop     sync.WaitGroup
	sent     [chaosParts]atomic.Int64
	fenced   [chaosParts]atomic.Bool
	pausing  atomic.Bool
	unacked  [chaosParts]atomic.Bool
	running  [chaosParts]atomic.Bool
	selfMove atomic.Int64
}

func (o *chaosOwner) isDeposed() bool {
	o.doc.mu.Lock()
	defer o.doc.mu.Unlock()
	return o.doc.term != o.k
}

// saveReleased saves the senders of a takeover or a release in one step, and starts the lanes of the released
// partitions.
func (o *chaosOwner) saveReleased(released map[record.TopicPartition]*Tail) bool {
	d := o.doc
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.term != o.k {
		return false
	}

	d.senders = o.s.Senders()
	for tp, tail := range released {
		p := int(tp.Partition)
		for {
			if _, ok := tail.Hits.Take(mustIdentity(p, d.next[p]), AnyTime); !ok {
				break
			}
			d.next[p]++
			d.found++
		}
		d.offsets[p] = max(d.offsets[p], tail.Next)
		d.released[p][o.k] = tail.Next
		o.startLane(p, d.next[p])
	}

	return true
}

func mustIdentity(p, n int) Identity {
	id, _ := IdentityOf([]record.Header{newHeader("id", fmt.Sprintf("%d-%d", p, n))})
	return id
}

// startLane sends the events of a partition from n on, with one frozen batch at a time.
func (o *chaosOwner) startLane(p, n int) {
	o.running[p].Store(true)
	id := o.s.Producer()

	o.lanes.Go(func() {
		defer o.running[p].Store(false)
		for seq := int32(0); o.ctx.Err() == nil && !o.pausing.Load(); {
			k := 1 + rand.IntN(3)
			var recs [][]record.Header
			for i := range k {
				recs = append(recs, []record.Header{newHeader("id", fmt.Sprintf("%d-%d", p, n+i)), newHeader("owner", strconv.Itoa(o.k))})
			}

			o.unacked[p].Store(true)
			base, ok := o.sendUntilDecided(p, encodeBatch(0, id, seq, recs...))
			if !ok {
				return
			}
			o.unacked[p].Store(false)

			n, seq = n+k, seq+int32(k)
			o.sent[p].Add(int64(k))
			o.doc.mu.Lock()
			// The document rejects the checkpoint of a zombie, and the zombie continues.
			if o.doc.term == o.k {
				o.doc.next[p], o.doc.offsets[p] = n, base+int64(k)
			}
			o.doc.mu.Unlock()

			pause(o.ctx, 6*time.Millisecond)
		}
	})
}

func (o *chaosOwner) sendUntilDecided(p int, b []byte) (base int64, ok bool) {
	for o.ctx.Err() == nil {
		code, base := sendOnce(o.ctx, o.c, at(o.topic, p), b)
		switch kafka.Error(code) {
		case 0:
			return base, true
		case kafka.InvalidProducerEpoch, kafka.ProducerFenced:
			o.fenced[p].Store(true)
			return 0, false
		case kafka.OutOfOrderSequenceNumber, kafka.UnknownProducerId:
			o.tb.Errorf("owner %d partition %d: %v", o.k, p, kafka.Error(code))
			return 0, false
		}
		pause(o.ctx, time.Duration(20+rand.IntN(60))*time.Millisecond)
		if rand.IntN(4) == 0 {
			refreshLayout(o.ctx, o.c)
		}
	}

	return 0, false
}

// retryQuarantine is the owner's loop over its quarantine, with keep-alives in between.
func (o *chaosOwner) retryQuarantine() {
	for turn := 0; o.root.Err() == nil && !o.isDeposed(); turn++ {
		released, err := o.s.Retry(o.root)
		if len(released) > 0 && !o.saveReleased(released) {
			return
		}

		if err == nil && turn%20 == 19 {
			err = o.s.KeepAlive(o.root, allOf(o.topic, chaosParts), nil)
		}

		switch {
		case errors.Is(err, ErrSelfMove):
			o.moveGeneration()
		case errors.Is(err, errNoHealthy):
		case err != nil:
			if o.root.Err() == nil && !o.isDeposed() {
				o.tb.Errorf("owner %d: %v", o.k, err)
			}
			return
		}

		pause(o.root, 100*time.Millisecond)
	}
}

// moveGeneration drains, takes the next generation of the id, saves it, and takes over again.
func (o *chaosOwner) moveGeneration() {
	o.selfMove.Add(1)
	o.pausing.Store(true)
	drained, cancel := context.WithTimeout(o.root, 3*time.Second)
	for p := 0; p < chaosParts && drained.Err() == nil; {
		if o.running[p].Load() {
			pause(drained, 5*time.Millisecond)
			continue
		}
		p++
	}

	cancel()
	// The batches of lanes that did not drain are in doubt.
	o.stop()
	o.lanes.Wait()
	o.ctx, o.stop = context.WithCancel(o.root)
	var unsure []record.TopicPartition
	held := o.s.Quarantined()
	for p := range chaosParts {
		if held[at(o.topic, p)] == healthy && !o.fenced[p].Load() && o.unacked[p].Load() {
			unsure = append(unsure, at(o.topic, p))
		}
	}

	o.doc.mu.Lock()
	ends := append([]int64(nil), o.doc.offsets...)
	o.doc.mu.Unlock()
	if _, err := o.s.NextGeneration(o.root, settledWith(unsure, map[string][]int64{o.topic: ends})); err != nil {
		if !o.isDeposed() {
			o.tb.Errorf("owner %d, next generation: %v", o.k, err)
		}
		return
	}

	o.pausing.Store(false)
	if o.saveReleased(nil) {
		o.takeOver()
	}
}

// takeOver opens a session and sends to the partitions that it releases, unless another owner took
// over.
func (o *chaosOwner) takeOver() {
	d, begin := o.doc, time.Now()
	for {
		d.mu.Lock()
		in := In{TransactionalID: "tx-" + o.topic, Offsets: map[string][]int64{o.topic: slices.Clone(d.offsets)}, Senders: d.senders}
		d.mu.Unlock()
		in.Gate = func() bool { return !o.isDeposed() }
		in.Event = func(e Event) { o.tb.Logf("owner %d: %s: %s", o.k, e.Kind, e.Text) }

		out, err := o.c.Take(o.root, in)
		if errors.Is(err, ErrFenced) && !o.isDeposed() {
			// The owner is a zombie that moves to its next generation.
			continue
		}

		if err != nil {
			if !o.isDeposed() && o.root.Err() == nil {
				o.tb.Errorf("owner %d: %v", o.k, err)
			}
			return
		}

		o.s = out.Session
		o.tb.Logf("owner %d in after %s: %v, generation %d, released %d, quarantined %d", o.k, time.Since(begin).Round(time.Millisecond), out.Producer, out.Session.Generation(), len(out.Released), len(out.Quarantined))
		o.saveReleased(out.Released)
		return
	}
}

func chaosTakeOver(tb testing.TB, k cluster, d *chaosDoc, topic string, term int) *chaosOwner {
	tb.Helper()
	o := &chaosOwner{k: term, c: k.newClient(tb), tb: tb, topic: topic, doc: d}
	root, end := context.WithCancel(tb.Context())
	o.root = root
	o.ctx, o.stop = context.WithCancel(root)
	tb.Cleanup(func() { end(); o.loop.Wait(); o.lanes.Wait() })
	d.mu.Lock()
	d.term = term
	d.mu.Unlock()
	o.takeOver()
	if o.s == nil {
		tb.FailNow()
	}

	o.loop.Go(o.retryQuarantine)
	return o
}

// waitMoving waits until each partition has taken some events of the owner.
func (o *chaosOwner) waitMoving(tb testing.TB, events int64) {
	tb.Helper()
	ctx := ctxOf(tb, 2*time.Minute)
	defer func() {
		if ctx.Err() != nil {
			tb.Logf("quarantined %v", o.s.Quarantined())
		}
	}()

	stacktest.Eventually(tb, fmt.Sprintf("owner %d moves everywhere", o.k), func() bool {
		for p := range chaosParts {
			if o.sent[p].Load() < events {
				return false
			}
		}
		return true
	})
}

// TestN04_Chaos kills brokers and leaves a zombie behind in every round, and then counts: nothing lost, nothing twice,
// nothing out of order, and nothing of an earlier owner above the offset at which its partition was released.
func TestN04_Chaos(t *testing.T) {
	stacktest.OnlyWith(t, "it takes minutes; TestN04_SickPartitions has its cases one by one", "fault.long")
	k := newCluster(t)
	topic := k.placeTopic(t, "2", [][]int{{1, 2, 3}, {2, 3, 1}, {3, 1, 2}, {1, 3, 2}, {2, 1, 3}, {3, 2, 1}, {1, 2, 3}, {2, 3, 1}, {1, 2}, {2, 3}, {3, 1}, {2, 1}})
	d := &chaosDoc{offsets: make([]int64, chaosParts), next: make([]int, chaosParts)}
	for range chaosParts {
		d.released = append(d.released, map[int]int64{})
	}

	owners := []*chaosOwner{chaosTakeOver(t, k, d, topic, 1)}
	owners[0].waitMoving(t, 30)
	for round := range *chaosRounds {
		a := 1 + rand.IntN(3)
		b := 1 + (a+rand.IntN(2))%3
		// 0: one broker dies. 1: a second one dies before the takeover. 2: a second one dies during the takeover.
		mode := rand.IntN(3)
		k.killBroker(t, a)
		pause(t.Context(), time.Duration(rand.IntN(4500))*time.Millisecond)
		if mode == 1 {
			k.killBroker(t, b)
			pause(t.Context(), time.Duration(rand.IntN(4500))*time.Millisecond)
		}
		var back sync.WaitGroup
		back.Go(func() {
			if mode == 2 {
				pause(t.Context(), time.Duration(rand.IntN(1500))*time.Millisecond)
				k.killBroker(t, b)
			}
			pause(t.Context(), time.Duration(3000+rand.IntN(5000))*time.Millisecond)
			k.startBroker(t, a)
			if mode > 0 {
				pause(t.Context(), 500*time.Millisecond)
				k.startBroker(t, b)
			}
		})
		begin := time.Now()
		o := chaosTakeOver(t, k, d, topic, round+2)
		back.Wait()
		o.waitMoving(t, 20)
		t.Logf("round %d mode %d brokers %d, %d: moving everywhere after %s", round+1, mode, a, b, time.Since(begin).Round(time.Millisecond))
		owners = append(owners, o)
	}

	k.waitSick(t, k.newClient(t), allOf(topic, chaosParts), 0)
	moves := int64(0)
	for i, o := range owners {
		// The frozen batches of the zombies must get their responses.
		if i < len(owners)-1 {
			stacktest.Eventually(t, fmt.Sprintf("owner %d is fenced", o.k), o.lanesEnded)
		}
		moves += o.selfMove.Load()
	}

	last := owners[len(owners)-1]
	last.pausing.Store(true)
	last.lanes.Wait()
	d.checkRecords(t, k, topic)
	t.Logf("found only by a read-back %d, self-moves %d, senders %+v", d.found, moves, d.senders)
}

// lanesEnded reports whether all lanes have ended.
func (o *chaosOwner) lanesEnded() bool {
	for p := range chaosParts {
		if o.running[p].Load() {
			return false
		}
	}
	return true
}

// checkRecords reads all records and compares them with the sent ones.
func (d *chaosDoc) checkRecords(t *testing.T, k cluster, topic string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	cl, err := kgo.NewClient(kgo.SeedBrokers(k.Brokers()...), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	var seen [chaosParts]map[int]int
	var top [chaosParts]int
	total, lost, twice, unordered, zombie := 0, 0, 0, 0, 0
	for p := range seen {
		seen[p], top[p] = map[int]int{}, -1
	}

	done := func() bool {
		for p := range seen {
			if top[p] < d.next[p]-1 {
				return false
			}
		}
		return true
	}

	for ctx := ctxOf(t, time.Minute); !done(); {
		fetches := cl.PollFetches(ctx)
		if ctx.Err() != nil {
			break
		}
		fetches.EachRecord(func(r *kgo.Record) {
			total++
			_, number, _ := strings.Cut(string(r.Headers[0].Value), "-")
			n, _ := strconv.Atoi(number)
			by, _ := strconv.Atoi(string(r.Headers[1].Value))
			p := r.Partition
			if seen[p][n]++; seen[p][n] > 1 {
				twice++
			}
			if n <= top[p] {
				unordered++
			}
			top[p] = max(top[p], n)
			for owner, from := range d.released[p] {
				if by < owner && r.Offset >= from {
					zombie++
				}
			}
		})
	}

	for p := range seen {
		for n := range d.next[p] {
			if seen[p][n] == 0 {
				lost++
			}
		}
	}

	t.Logf("%d records: %d lost, %d twice, %d out of order, %d by a zombie after its fence", total, lost, twice, unordered, zombie)
	if lost+twice+unordered+zombie > 0 || total == 0 {
		t.Fail()
	}
}
