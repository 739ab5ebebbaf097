//go:build unix

package fault

import (
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/test/kit"
)

var (
	scaleWaiting     = flag.Int("scale.waiting", 20_000, "how many envelopes wait in TestRestartWithManyWaiting")
	scaleCollections = flag.Int("scale.collections", 100, "how many outboxes there are in TestManyOutboxes")
)

// sharedCollections is the largest number of outboxes for the shared mongod: it opens three files for each, and machines often allow
// 20,000. A mongod for more outboxes closes the files of collections that it has not used for a second.
const sharedCollections = 5000

// A relay starts while many envelopes wait for a topic that does not exist. An event for another topic is delivered soon, and the memory does
// not grow with their number. The limits are for two cores that the servers share.
func TestRestartWithManyWaiting(t *testing.T) {
	stacktest.OnlyWith(t, "only rare installations have such sizes", "slow", "scale.waiting")
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Set: map[string]any{"log.level": "info"}})
	topics := s.ReadTopics("order")
	s.StartRelay().WaitTookOver()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 1, 60))
	stacktest.Eventually(t, "a record", func() bool { return len(topics.AllRecords()) == 1 })
	for _, p := range s.Processes() {
		p.Kill()
	}

	n := *scaleWaiting
	enterMany(t, s, n)
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 2, 60))
	before := s.StartRelay()
	stacktest.EventuallyIn(t, kit.Patience, "the delivery by an earlier owner", func() bool { return len(topics.AllRecords()) == 2 })
	// It stores its position, so the stream of the next owner does not read the writes again that made the envelopes wait.
	before.Terminate()
	before.WaitExit()

	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 3, 60))
	begin := time.Now()
	p := s.StartRelay()
	stacktest.EventuallyIn(t, kit.Patience, "the first delivery", func() bool { return len(topics.AllRecords()) == 3 })
	first, memory := time.Since(begin), p.PeakMemory()>>20
	t.Logf("%d envelopes wait: first delivery %v after the start of the process; peak memory %d MiB",
		n, first.Round(time.Millisecond), memory)
	if first > 20*time.Second || memory > 128 {
		t.Errorf("first delivery after %v, peak memory %d MiB", first, memory)
	}

	begin = time.Now()
	code, out, errOut := s.RunCommand("status")
	if took := time.Since(begin); code != 0 || took > 20*time.Second {
		t.Errorf("status after %v: %d\n%s%s", took, code, out, errOut)
	} else {
		t.Logf("status took %v", took.Round(time.Millisecond))
	}
	t.Logf("peak memory at the end: %d MiB", p.PeakMemory()>>20)
}

// enterMany stores n envelopes that wait for the topic late, with nine keys for ten of them.
func enterMany(t *testing.T, s *kit.Scene, n int) {
	t.Helper()
	coll, ns := s.State.Collection("waiting"), s.DB.Name()+".outbox"
	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(4)
	for from := 0; from < n; from += 1000 {
		g.Go(func() error {
			var entries []waiting.Entry
			for i := from; i < min(from+1000, n); i++ {
				key := fmt.Sprintf("many-%d", i%(n*9/10))
				raw, err := kit.NewEvent("late", key, i, 60).MarshalBSON()
				if err != nil {
					return err
				}
				entries = append(entries, waiting.Entry{
					Watcher: "w", NS: ns, Raw: raw, Key: key, Slot: waiting.SlotOf(raw), Pos: fmt.Sprintf("82%030d", i),
					Pending: []string{s.TopicOf("late")}, Reason: waiting.Parked, Origin: waiting.OriginStream,
				})
			}
			return waiting.Enter(ctx, coll, entries)
		})
	}
	mustSucceed(t, g.Wait())
}

// A relay watches many outboxes by a pattern. Its takeover, its status and the latency of an event do not depend on their number.
func TestManyOutboxes(t *testing.T) {
	stacktest.OnlyWith(t, "only rare installations have such sizes", "slow", "scale.collections")
	t.Parallel()
	n := *scaleCollections
	var stack *devstack.Stack
	if n > sharedCollections {
		stack = stacktest.Own(t, devstack.Options{Mongods: 1, Mongo: devstack.MongoOptions{
			CacheMB: 4096, Parameters: map[string]string{"wiredTigerCursorCacheSize": "0"}, Args: []string{
				"--syncdelay", "5",
				"--wiredTigerEngineConfigString", "file_manager=(close_scan_interval=1,close_idle_time=1,close_handle_minimum=500)",
			},
		}})
	}
	s := kit.New(t, kit.Options{Stack: stack, Types: []string{"order"}, Set: map[string]any{"log.level": "info"}})
	topics := s.ReadTopics("order")
	s.StartRelay().WaitTookOver()
	alone := measureLatency(t, s, topics)
	for _, p := range s.Processes() {
		p.Kill()
	}

	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(4)
	for i := range n {
		g.Go(func() error {
			doc, err := kit.NewEvent("order", "other", i, 60).MarshalBSON()
			if err != nil {
				return err
			}
			_, err = s.DB.Collection(fmt.Sprintf("outbox_%d", i)).InsertOne(ctx, doc)
			return err
		})
	}
	mustSucceed(t, g.Wait())

	s.SetConfig("watch", []string{s.DB.Name() + ".outbox*"})
	begin := time.Now()
	s.StartRelay().WaitTookOver()
	first := time.Since(begin)
	// The indexes for the purge are made meanwhile.
	busy := measureLatency(t, s, topics)
	for _, p := range s.Processes() {
		p.Kill()
	}

	begin = time.Now()
	p := s.StartRelay()
	p.WaitTookOver()
	second := time.Since(begin)
	begin = time.Now()
	code, out, errOut := s.RunCommand("status")
	status := time.Since(begin)
	if code != 0 {
		t.Errorf("status: %d\n%s%s", code, out, errOut)
	}
	after := measureLatency(t, s, topics)
	t.Logf("%d outboxes: taken over %v after the first start of the process and %v after the second (the old lease lasts for 2 s); status %v; peak memory %d MiB",
		n, first.Round(time.Millisecond), second.Round(time.Millisecond), status.Round(time.Millisecond), p.PeakMemory()>>20)
	t.Logf("p50 and p99 of an event: %v with one outbox, %v with all, %v after the restart", alone, busy, after)
	if second > 20*time.Second || status > 20*time.Second {
		t.Errorf("a takeover took %v, the status %v", second, status)
	}
}

// measureLatency returns p50 and p99 of 1,000 events at 100 per second, from the commit of each to its arrival at a consumer.
func measureLatency(t *testing.T, s *kit.Scene, topics *kit.Topics) (quantiles [2]time.Duration) {
	t.Helper()
	const n = 1000
	committed := map[string]time.Time{}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for i := range n {
		<-tick.C
		e := kit.NewEvent("order", fmt.Sprint("k", i%50), i, 60)
		doc, err := e.MarshalBSON()
		mustSucceed(t, err)
		_, err = s.DB.Collection("outbox").InsertOne(t.Context(), doc)
		mustSucceed(t, err)
		committed[e.ID().String()] = time.Now()
	}

	var late []time.Duration
	stacktest.EventuallyIn(t, kit.Patience, "a thousand records", func() bool {
		late = late[:0]
		for _, r := range topics.AllRecords() {
			if at, ok := committed[r.Header("id")]; ok {
				late = append(late, r.Seen.Sub(at))
			}
		}
		return len(late) >= n
	})
	slices.Sort(late)
	return [2]time.Duration{late[n/2].Round(100 * time.Microsecond), late[n*99/100].Round(100 * time.Microsecond)}
}
