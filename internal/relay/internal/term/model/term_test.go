package model

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/reconciler"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/internal/relay/tracing"
	"github.com/outrelay/outrelay/resume"
)

// term is one owner. The order of its takeover is that of package term.
type term struct {
	w        *world
	epoch    int64
	producer int16 // epoch of the producer
	began    bool  // the takeover is done
	dead     bool

	resolver   *pipeline.Resolver
	dispatcher *pipeline.Dispatcher
	pump       *pipeline.Pump
	outlet     *pipeline.Outlet
	sender     *reconciler.Sender
	ledger     *book
	sink       *sink
	scheduled  *scheduled
	entered    *mailbox.Box[*waiting.Entry]
	ready      *mailbox.Box[string]
	swept      *pipeline.Swept
	cursor     int     // next event of the stream
	named      bool    // its stream contains the late outbox
	sweeps     bool    // the late outbox has to be swept
	toSweep    []*spec // that are left
}

func (t *term) String() string { return fmt.Sprintf("owner %d", t.epoch) }

// die ends a term without a checkpoint. Its requests stay on their way.
func (t *term) die(why string) {
	if t.dead {
		return
	}
	t.w.logf("%s %s", t, why)
	t.dead, t.sink.dead = true, true
	t.w.terms = slices.DeleteFunc(t.w.terms, func(other *term) bool { return other == t })
	if t.w.owner == t {
		t.w.owner = nil
	}
}

// build holds what all terms share. None of it has state that matters.
var build = func() pipeline.BuildConfig {
	router, err := routing.New(routing.Config{Template: "{aggregatetype}", Rules: []routing.Rule{{AggregateType: "ab", To: []string{"a", "b"}}}})
	if err != nil {
		panic(err)
	}
	preset, err := routing.NewPreset(routing.PresetConfig{Name: routing.Debezium})
	if err != nil {
		panic(err)
	}
	scope, err := changes.ParseScope(append(namespaces[:2:2], lateNS))
	if err != nil {
		panic(err)
	}
	return pipeline.BuildConfig{Router: router, Preset: preset, Scope: scope, Tap: tracing.NewTap(nil, nil, time.Now)}
}()

// newTerm acquires the lease.
func (w *world) newTerm() *term {
	w.doc.epoch++
	t := &term{w: w, epoch: w.doc.epoch, named: w.named, entered: mailbox.New[*waiting.Entry](), ready: mailbox.New[string]()}
	w.logf("%s acquires the lease", t)

	build := build
	build.Now = w.clock
	recording := ledger.RecordPosition
	if w.isRecorded() {
		recording = ledger.RecordDelete
	}
	t.ledger = &book{w: w, term: t, Ledger: ledger.New(ledger.Config{MaxAttempts: maxAttempts, Recording: recording})}
	t.resolver = pipeline.NewResolver(pipeline.Config{
		Pool: pipeline.NewPool(1<<30, 1<<20), Ledger: t.ledger, Ready: t.ready, Now: w.clock,
		Metrics: pipeline.Metrics{Acked: func(*record.AckedBatch) {}, Dead: func(string, record.Class) {}, Held: func(string, int) {}},
	})
	t.sink = &sink{w: w, term: t, parts: map[record.TopicPartition]*partition{}, adopted: map[string]bool{}}
	for _, tp := range w.kafka.parts {
		t.sink.parts[tp] = &partition{tp: tp, hits: &fence.Known{}, parked: !w.kafka.logs[tp].leader}
	}
	t.dispatcher = pipeline.NewDispatcher(t.resolver, t.sink)
	t.outlet = pipeline.NewOutlet(build, t.dispatcher)
	t.sender = reconciler.New(reconciler.Config{
		Store: &storeReader{w}, Ledger: t.ledger, Outlet: t.outlet, Now: w.clock, Log: slog.New(slog.DiscardHandler),
		OnRetry: func(error) {}, OnRecovered: func() {}, Compacted: func(string) bool { return false }, Entered: t.entered, Ready: t.ready,
	})
	t.scheduled = &scheduled{w: w, term: t}
	return t
}

// takeOver lets another owner take over. It may die at each step.
func (w *world) takeOver() {
	ctx := context.Background()
	// The process dies at this step, or at none.
	dies := w.rand.IntN(30)
	t := w.newTerm()
	w.drift(4)

	// Fence and read back (N4).
	if !t.fence() || dies == 0 {
		w.logf("%s dies before its claim", t)
		return
	}

	// The owner saves the offsets before it sends. It lost the lease if another one acquired it.
	offsets := map[string][]int64{}
	for topic, list := range w.doc.offsets {
		offsets[topic] = slices.Clone(list)
		t.sink.adopted[topic] = true
		for p, offset := range list {
			t.resolver.Restore(record.TopicPartition{Topic: topic, Partition: int32(p)}, max(offset, 0))
		}
	}
	t.resolver.Start(w.doc.position)
	t.planSweep()

	// Finish what earlier owners have sent outside of the order (N8).
	finished := 0
	if w.undo != skipFinishSent {
		stored, err := t.sender.FinishSent(ctx)
		if err != nil || dies == 1 {
			w.logf("%s dies in its takeover", t)
			return
		}
		finished = stored
	}
	claimed := t.scheduled.recover()
	finished += claimed
	if t.dead || dies == 2 {
		w.logf("%s dies after it has finished the deliveries", t)
		return
	}

	previous := t.load(ctx)
	beside := t.sweeps || finished > 0 || !previous.IsEmpty() || w.doc.beside > outboxes.PosOf(w.doc.position)
	t.resolver.BeginReread(beside)

	until := bson.Timestamp{T: w.now, I: 1 << 20}
	if w.undo == endRereadEarly {
		t.dispatcher.EndReread()
	}
	build := build
	build.Now = w.clock
	feed := pipeline.FeedConfig{Dispatcher: t.dispatcher, Notes: &notes{}, StampMargin: 60, RecordDeliveries: w.isRecorded()}
	t.swept = pipeline.NewSwept(build, feed, &knownTopics{w: w})
	t.pump = pipeline.NewPump(build, feed, pipeline.PumpConfig{
		Term: &notes{}, Collections: map[[16]byte]bool{}, Swept: sweep.NewSkip(1 << 10), RereadUntil: until, Previous: previous,
	})
	position := outboxes.PosOf(w.doc.position)
	t.cursor = len(w.stream)
	for i, s := range w.stream {
		if s.pos > position {
			t.cursor = i
			break
		}
	}
	t.began = true
	w.owner = t
	w.terms = append(w.terms, t)
	w.logf("%s took over at event %d", t, t.cursor)
}

// fence fences earlier senders in the partitions that have a leader, and reads their records. It reports false if another owner took
// the lease.
func (t *term) fence() bool {
	w := t.w
	w.kafka.epoch++
	barrier := w.kafka.epoch
	var targets []*log
	for _, tp := range w.kafka.parts {
		l := w.kafka.logs[tp]
		if _, known := w.doc.offsets[tp.Topic]; !known {
			continue
		}
		if !l.leader {
			t.sink.parts[tp].quarantine = true
			w.logf("%s quarantines %v", t, tp)
			continue
		}
		targets = append(targets, l)
		w.kafka.markers = append(w.kafka.markers, marker{l, barrier})
	}

	for _, l := range targets {
		// The markers may be slow, and requests of earlier owners arrive before them.
		for w.undo != readBeforeMarker && l.fence < barrier {
			w.drift(3)
			for i, m := range w.kafka.markers {
				if m.log == l && m.epoch == barrier && w.rand.IntN(2) == 0 {
					w.land(i)
					break
				}
			}
		}
	}
	w.kafka.epoch++
	t.producer = w.kafka.epoch
	if t.epoch != w.doc.epoch {
		return false
	}

	for _, l := range targets {
		part := t.sink.parts[l.tp]
		from := max(w.doc.offsets[l.tp.Topic][l.tp.Partition], 0)
		for offset := from; offset < l.end(); offset++ {
			if e := l.entries[offset]; !e.marker && w.undo != skipReadBack {
				part.hits.Add(t.sink.identify(&e.rec), offset, e.rec.TimeMS)
			}
		}
		l.claimed = t.producer
		w.logf("%s reads back %d records of %v from %d", t, part.hits.Len(), l.tp, from)
	}
	return true
}

// load closes the gates of the keys that wait, and returns the events after the position that are stored (N15).
func (t *term) load(ctx context.Context) *pipeline.PreviousOwner {
	w := t.w
	previous := pipeline.NewPreviousOwner()
	after := outboxes.PosOf(w.doc.position)
	_, err := t.sender.Load(ctx, func(pos string) bool { return pos > after },
		func(ns, topic, key string) {
			if w.undo != openGates {
				t.resolver.CloseGate(t.outlet.RecordNamespace(ns), topic, key)
			}
		},
		func(ns string, id bson.RawValue, pos string, topics []string) {
			if w.undo != forgetWaiting {
				previous.AddWaiting(ns, id, pos, topics)
			}
		})
	if err != nil {
		panic(err)
	}

	for _, dead := range w.letters {
		if dead.mark.Pos > after && w.undo != forgetLetters {
			previous.AddDeadLetter(dead.mark)
		}
	}
	return previous
}

// read pumps the next events of the stream.
func (t *term) read(n int) {
	if t.dead {
		return
	}
	if t.sweeps {
		t.sweep()
		return
	}
	batch := changes.NewBatch()
	n = min(n, len(t.w.stream)-t.cursor)
	for _, s := range t.w.stream[t.cursor : t.cursor+n] {
		if t.isRead(s) {
			batch.Docs = append(batch.Docs, s.event)
		}
		batch.Position = resume.Position{Token: s.token, ClusterTime: s.clusterTime}
	}
	t.cursor += n
	if n == 0 && t.cursor < len(t.w.stream) {
		return
	}
	// The position of an idle stream moves too.
	if n == 0 {
		t.w.now++
		batch.Position = t.w.positionNow()
	}
	t.w.logf("%s reads %d events", t, n)

	batches := make(chan *changes.Batch, 1)
	batches <- batch
	close(batches)
	if err := t.pump.Run(context.Background(), batches); err != nil {
		t.die("ends: " + err.Error())
	}
}

// round lets the sender of waiting envelopes look once.
func (t *term) round() {
	if t.dead {
		return
	}
	t.w.logf("%s looks for waiting envelopes", t)
	if err := t.sender.RunRound(context.Background(), true); err != nil {
		t.die("ends: " + err.Error())
	}
}

// checkpoint saves the position and the offsets in one fenced write (W, N8).
func (t *term) checkpoint() {
	if t.dead {
		return
	}
	position, reached, offsets := t.resolver.Snapshot()
	if !reached {
		return
	}
	if t.w.undo == offsetsOfAcks {
		offsets = t.ackedEnds(offsets)
	}
	if !t.w.saveOffsets(t, offsets) {
		return
	}
	if outboxes.PosOf(position) < outboxes.PosOf(t.w.doc.position) {
		t.w.fail("%s moves the watcher document back (I5)", t)
	}
	t.w.doc.described = t.w.doc.described || t.named && outboxes.PosOf(position) > outboxes.PosOf(t.w.doc.position)
	t.w.doc.position = position
	t.w.logf("%s saves the position %s and the offsets %v", t, outboxes.PosOf(position)[2:18], offsets)
}

// ackedEnds returns the offsets after the last acked record of each partition.
func (t *term) ackedEnds(offsets map[string][]int64) map[string][]int64 {
	ends := map[string][]int64{}
	for topic, list := range offsets {
		ends[topic] = slices.Clone(list)
		for p := range list {
			tp := record.TopicPartition{Topic: topic, Partition: int32(p)}
			l := t.w.kafka.logs[tp]
			for offset, e := range l.entries {
				part := t.sink.parts[tp]
				isOpen := part.inFlight != nil && slices.Contains(part.inFlight.records, e.sent)
				if !e.marker && !isOpen && !part.quarantine {
					ends[topic][p] = int64(offset) + 1
				}
			}
		}
	}
	return ends
}

// notes implements pipeline.Notes and pipeline.Term.
type notes struct{}

func (*notes) NoteIrregularID(context.Context, [16]byte) error        { return nil }
func (*notes) NoteScheduled(context.Context, string, time.Time) error { return nil }
func (*notes) CountDropped(record.Class)                              {}
func (*notes) HandleDDL(context.Context, *changes.Event) error        { return nil }
func (*notes) AdoptCollection(context.Context, *changes.Event) error  { return nil }
func (*notes) NoteProgress()                                          {}
