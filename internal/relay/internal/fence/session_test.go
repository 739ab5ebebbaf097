package fence

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// deleteRecords moves the start of a partition's log, as retention does.
func deleteRecords(tb testing.TB, topic string, partition int32, before int64) {
	tb.Helper()
	admin, done := adminClient(tb)
	defer done()
	offsets := adminOffsets(topic, partition, before)
	if _, err := admin.DeleteRecords(tb.Context(), offsets); err != nil {
		tb.Fatal(err)
	}
}

// The keep-alive writes its marker with the epoch in use: sequences and duplicate detection of the data go on.
func TestN04_KeepAliveLeavesTheFlowAlone(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 3)
	o := newOwner(t, tp, 3)
	out := o.takeAll(t, c)
	me := out.Producer
	base := mustSend(t, c, at(tp, 0), encodeBatch(0, me, 0, newRecords("a")...))
	ctx := ctxOf(t, 2*time.Minute)
	for range 3 {
		if err := out.Session.KeepAlive(ctx, allOf(tp, 3), nil); err != nil {
			t.Fatal(err)
		}
	}

	if again := mustSend(t, c, at(tp, 0), encodeBatch(0, me, 0, newRecords("a")...)); again != base {
		t.Errorf("the same batch again stands at %d, want %d", again, base)
	}

	mustSend(t, c, at(tp, 0), encodeBatch(0, me, 1, newRecords("b")...))
	mustSend(t, c, at(tp, 1), encodeBatch(0, me, 0, newRecords("c")...))
	if got := out.Session.Producer(); got != me {
		t.Errorf("producer %v became %v", me, got)
	}

	// Without an idle partition, the session writes the marker to a spare partition that exists.
	if err := out.Session.KeepAlive(ctx, nil, []record.TopicPartition{at("no-"+tp, 0), at(tp, 1), at(tp, 2)}); err != nil {
		t.Fatal(err)
	}

	// One marker each is the barrier of the takeover.
	if got := markersOf(t, c, at(tp, 1), me.ID); got != 5 {
		t.Errorf("%d markers of ours in the spare partition that was chosen, want 5", got)
	}
	if got := markersOf(t, c, at(tp, 2), me.ID); got != 4 {
		t.Errorf("%d markers of ours in the other spare partition, want 4", got)
	}
	if err := out.Session.KeepAlive(ctx, nil, []record.TopicPartition{at("no-"+tp, 0)}); !errors.Is(err, errNoHealthy) {
		t.Errorf("keep-alive without a healthy partition: %v", err)
	}

	// The keep-alive of a deposed owner returns ErrFenced.
	o.takeAll(t, newClient(t))
	if err := out.Session.KeepAlive(ctx, allOf(tp, 1), nil); !errors.Is(err, ErrFenced) {
		t.Errorf("keep-alive of a deposed owner: %v", err)
	}
}

// The generation moves. The next takeover writes the marker of the old id where it is in doubt.
func TestN04_NextGeneration(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 3)
	o := newOwner(t, tp, 3)
	out := o.takeAll(t, c)
	before := out.Producer
	var ends []int64
	for p := range 3 {
		ends = append(ends, mustSend(t, c, at(tp, p), encodeBatch(0, before, 0, newRecords("a")...))+1)
	}
	ctx := ctxOf(t, 2*time.Minute)
	after, err := out.Session.NextGeneration(ctx, settledWith([]record.TopicPartition{at(tp, 2)}, map[string][]int64{tp: ends[:2]}))
	if err != nil {
		t.Fatal(err)
	}
	if after.ID == before.ID || out.Session.TransactionalID() != o.id+"#1" || out.Session.Producer() != after {
		t.Fatalf("%v after %v, id %s", after, before, out.Session.TransactionalID())
	}
	o.save(out.Session)
	mustSend(t, c, at(tp, 0), encodeBatch(0, after, 0, newRecords("b")...))
	// The fate of this batch is unknown at the move. The batch arrives after the move.
	mustSend(t, c, at(tp, 2), encodeBatch(0, before, 1, newRecords("frozen")...))

	// The next one deposes the new id, reads both back, and keeps the generation. Where the old id is in doubt, it writes the
	// marker of that id.
	o.offsets[tp] = []int64{0, 0, 0}
	next := o.take(t, newClient(t))
	// The session gives up an attempt after a second, so retry.
	maps.Copy(next.Released, retryAll(t, next.Session))
	if _, ok := next.Released[at(tp, 2)].Hits.Take(mustIdentify(t, newHeader("id", "frozen")), AnyTime); !ok {
		t.Error("the batch in doubt was not read back")
	}
	checkZombieRejected(t, c, at(tp, 2), before, 2)
	o.save(next.Session)
	if next.Session.Generation() != 1 || next.Producer.ID != after.ID {
		t.Errorf("successor has generation %d, %v", next.Session.Generation(), next.Producer)
	}
	if n := next.Released[at(tp, 0)].Hits.Len(); n != 2 {
		t.Errorf("%d hits in p0, want the hits of both generations", n)
	}
	for p := range 3 {
		checkZombieRejected(t, c, at(tp, p), after, 9)
	}
}

// N5: the coordinator gave out another producer id, so the old one cannot be fenced. That is an event, and an alarm if
// it was not expected.
func TestN05_ChangedProducerIDIsAnAlarm(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 2)

	for name, alive := range map[string]struct {
		at    time.Time
		alarm bool
	}{
		"unknown":  {time.Time{}, true},
		"recently": {time.Now().Add(-time.Hour), true},
		"long ago": {time.Now().Add(-365 * 24 * time.Hour), false},
	} {
		o := newOwner(t, tp, 2)
		o.takeAll(t, c)

		// The former sender had another id: as if the id had expired and come back.
		was := record.Sender{ID: 987_654_321, Epoch: 3}
		o.senders = []record.Sender{was}
		out := o.take(t, c, func(in *In) { in.Alive = alive.at })
		if len(out.Released) != 2 {
			t.Errorf("%s: quarantined %v", name, out.Quarantined)
		}
		if len(o.events) != 1 || o.events[0].Kind != ProducerIDChanged || o.events[0].Alarm != alive.alarm {
			t.Errorf("%s: events %+v", name, o.events)
		}
		if alive.alarm && !strings.Contains(o.events[0].Text, fmt.Sprint("it had ", producerOf(was))) {
			t.Errorf("%s: the event does not name the earlier producer: %s", name, o.events[0].Text)
		}
		if len(out.Senders) != 2 || out.Senders[0].ID != was.ID || len(out.Senders[0].Open) != 0 {
			t.Errorf("%s: senders %+v", name, out.Senders)
		}
	}
}

// N4: producer ids are small numbers, so a new cluster may return the id of a sender of the old cluster. It is another
// producer: its epochs are unrelated to the epochs of the new owner. The successor of the new owner has to fence it. A move is one event,
// for any number of partitions.
func TestN04_SendersOfAnotherClusterAreOtherProducers(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 2)
	o := newOwner(t, tp, 2)
	first := o.takeAll(t, c)
	if last := o.senders[len(o.senders)-1]; last.Cluster == "" {
		t.Fatalf("sender %+v has no cluster", last)
	}

	// As if the first owner had sent to another cluster, with a later epoch and more records.
	o.senders = []record.Sender{{ID: first.Producer.ID, Epoch: 100, Cluster: "another"}}
	o.offsets[tp] = []int64{500, 500}
	second := o.takeAll(t, c)
	if len(o.events) != 1 || o.events[0].Kind != ClusterChanged {
		t.Errorf("events %+v, want the change of the cluster alone", o.events)
	}
	if len(o.senders) != 1 || o.senders[0].ID != second.Producer.ID {
		t.Errorf("senders %+v, want the new owner alone", o.senders)
	}

	o.events = nil
	o.offsets[tp] = []int64{0, 0}
	o.takeAll(t, c)
	if len(o.events) != 0 {
		t.Errorf("a takeover on the same cluster: events %+v", o.events)
	}
	for p := range 2 {
		checkZombieRejected(t, c, at(tp, p), second.Producer, 0)
	}
}

// An expected change needs no attention.
func TestEventsAreLoggedByTheirLevel(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	log := LogEvents(slog.New(slog.NewTextHandler(&b, nil)), nil)

	log(Event{Kind: ProducerIDChanged, Alarm: true})
	log(Event{Kind: ProducerIDChanged})
	log(Event{Kind: OutOfRange})

	var levels []string
	for line := range strings.Lines(b.String()) {
		levels = append(levels, strings.Fields(line)[1])
	}

	if want := []string{"level=WARN", "level=INFO", "level=WARN"}; !slices.Equal(levels, want) {
		t.Errorf("levels %q, want %q", levels, want)
	}
}

// Near the end of its epochs the id is left, after its own barrier: the markers of the old id fence the old owner.
func TestN05_GenerationMovesBeforeEpochsRunOut(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 2)
	o := newOwner(t, tp, 2)
	first := o.takeAll(t, c)
	mustSend(t, c, at(tp, 0), encodeBatch(0, first.Producer, 0, newRecords("a")...))

	out := o.take(t, c, func(in *In) { in.epochs = 2 })
	if out.Session.Generation() != 1 || out.Producer.ID == first.Producer.ID || len(out.Released) != 2 || !o.hasEvent(GenerationMoved) {
		t.Fatalf("generation %d, %v, released %d, events %+v", out.Session.Generation(), out.Producer, len(out.Released), o.events)
	}
	for p := range 2 {
		checkZombieRejected(t, c, at(tp, p), first.Producer, 1)
		mustSend(t, c, at(tp, p), encodeBatch(0, out.Producer, 0, newRecords("b")...))
	}

	next := o.takeAll(t, newClient(t))
	if next.Session.Generation() != 1 || next.Released[at(tp, 0)].Hits.Len() != 2 {
		t.Errorf("successor: generation %d, %d hits", next.Session.Generation(), next.Released[at(tp, 0)].Hits.Len())
	}
	checkZombieRejected(t, c, at(tp, 0), out.Producer, 1)
}

func TestExpiryIsRead(t *testing.T) {
	t.Parallel()
	e := newClient(t).Expiry(ctxOf(t, 2*time.Minute))
	if e.Assumed || e.TransactionalID <= 0 || e.ProducerID <= 0 {
		t.Errorf("%+v", e)
	}
	if d := (Expiry{TransactionalID: assumedTxnExpiry, ProducerID: assumedPIDExpiry}); d.Every() != time.Hour || d.IdleAfter() != 12*time.Hour {
		t.Errorf("defaults: every %s, idle after %s", d.Every(), d.IdleAfter())
	}
}

func TestHealthNamesMissingConditions(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 2)
	h, err := c.Health(ctxOf(t, 2*time.Minute), []string{tp, "no-" + tp})
	if err != nil {
		t.Fatal(err)
	}

	if len(h.layout.Topics[tp].Partitions) != 2 || len(h.Healthy(append(allOf(tp, 3), at("no-"+tp, 0)))) != 2 || !errors.Is(h.layout.Topics["no-"+tp].Err, kafka.UnknownTopicOrPartition) {
		t.Errorf("%+v", h)
	}
	if h.Reason(at(tp, 2)).Kind != kafkawire.TopicTooSmall || h.Reason(at("no-"+tp, 0)).Kind != kafkawire.TopicMissing {
		t.Error("no reason for a missing partition")
	}
}

// markersOf counts the control batches of a producer id.
func markersOf(tb testing.TB, c *Client, tp record.TopicPartition, id int64) int {
	tb.Helper()
	ctx := ctxOf(tb, 2*time.Minute)
	h, err := c.Health(ctx, []string{tp.Topic})
	if err != nil {
		tb.Fatal(err)
	}

	leader := h.layout.LeaderAddr(tp)
	end, err := c.kafka.LeaderOffset(ctx, leader, tp, kafkawire.LogEnd)
	if err != nil {
		tb.Fatal(err)
	}

	n, tail := 0, newTail(0)
	for tail.Next < end.Offset {
		got, err := c.kafka.Fetch(ctx, leader, []kafkawire.FetchFrom{{TopicPartition: tp, Offset: tail.Next}},
			kafkawire.FetchLimits{MaxBytes: fetchBytes, MaxPartitionBytes: partitionBytes, MaxWait: fetchWait})
		if err != nil {
			tb.Fatal(err)
		}
		for b, err := range fetched.Batches(got.Partitions[0].Set) {
			if err != nil {
				tb.Fatal(err)
			}
			if b.Control && b.Producer == id {
				n++
			}
		}
		if err := tail.readSet(got.Partitions[0].Set, nil); err != nil {
			tb.Fatal(err)
		}
	}

	return n
}
