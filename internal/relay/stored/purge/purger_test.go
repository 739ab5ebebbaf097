package purge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// bench is one watcher of one slot with a purger that keeps only the margin.
type bench struct {
	*Purger
	coll   *mongo.Collection
	log    *bytes.Buffer
	purged int
}

func newBench(t testing.TB) *bench {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	b := &bench{coll: db.Collection("outbox"), log: new(bytes.Buffer)}
	o := outboxes.Outbox{DB: db.Name(), Coll: "outbox", UUID: register(t, db, b.coll, "w")}
	b.Purger = New(Config{
		Client: db.Client(), State: state.Of(db), Watcher: "w", Collections: func() []outboxes.Outbox { return []outboxes.Outbox{o} },
		Retention: time.Minute, Margin: -1, Interval: time.Hour, Batch: 500, Valid: func() bool { return true },
		OnPurged: func(n int) { b.purged += n }, Log: slog.New(slog.NewTextHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	return b
}

func (b *bench) setPosition(t testing.TB, slot string, set bson.D) {
	t.Helper()
	if _, err := b.config.State.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: slot}}, bson.D{{Key: "$set", Value: set}}, options.UpdateOne().SetUpsert(true)); err != nil {
		t.Fatal(err)
	}
}

func at(second uint32) bson.D { return bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: second}}} }

// insert writes n envelopes with stamps of that second.
func (b *bench) insert(t testing.TB, n int, second uint32, more ...bson.E) {
	t.Helper()
	docs := make([]any, n)
	for i := range docs {
		docs[i] = append(bson.D{{Key: "ts", Value: bson.Timestamp{T: second, I: uint32(i + 1)}}, {Key: "payload", Value: strings.Repeat("x", 300)}}, more...)
	}
	for part := range slices.Chunk(docs, 20_000) {
		if _, err := b.coll.InsertMany(t.Context(), part); err != nil {
			t.Fatal(err)
		}
	}
}

func (b *bench) countLeft(t *testing.T) int {
	t.Helper()
	n, err := b.coll.CountDocuments(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}

func (b *bench) mustPass(t *testing.T) {
	t.Helper()
	clear(b.idle)
	if _, err := b.purgeCollections(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestPurgeRemovesOldHealthyEnvelopesInBatches(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.pace.batch = 7
	b.setPosition(t, "w/0of1", at(10_000))
	b.insert(t, 50, 9_000)
	b.insert(t, 5, 9_001, bson.E{Key: "state", Value: "retry"}) // a field of the service
	b.insert(t, 5, 9_002, bson.E{Key: "dueAt", Value: time.Now()})
	b.insert(t, 30, 9_003)
	b.insert(t, 4, 9_941) // younger than the retention
	calls := 0
	b.config.OnPurged = func(n int) {
		calls++
		if n > 7 {
			t.Errorf("%d in one statement", n)
		}
		b.purged += n
	}

	b.mustPass(t)
	if b.purged != 85 || b.countLeft(t) != 9 || calls < 85/7 {
		t.Errorf("purged %d in %d statements, left %d", b.purged, calls, b.countLeft(t))
	}

	b.runPass(t.Context())
	// These envelopes are after all purged ones.
	b.insert(t, 3, 9_000)
	clear(b.idle)
	b.runPass(t.Context())
	if got := b.log.String(); b.countLeft(t) != 9 || strings.Count(got, "purged") != 1 || !strings.Contains(got, "count=3") {
		t.Errorf("left %d, log %s", b.countLeft(t), got)
	}
}

// insertUnstamped inserts an envelope without a stamp, in each form that an unstamped envelope may have.
func (b *bench) insertUnstamped(t *testing.T, id func() any, more ...bson.E) (ids bson.A) {
	t.Helper()
	stamps := []any{nil, bson.Timestamp{}, "text", int64(7), time.Now(), bson.A{bson.Timestamp{T: 1}, bson.Timestamp{T: 1 << 31}}, bson.D{{Key: "x", Value: 1}}}
	for _, ts := range stamps {
		d := append(bson.D{{Key: "_id", Value: id()}}, more...)
		if ts != nil {
			d = append(d, bson.E{Key: "ts", Value: "set below"})
		}
		insertAs(t, b.coll, d, ts)
		ids = append(ids, d[0].Value)
	}
	return ids
}

// objectIDOf returns a new ObjectId of that time.
func objectIDOf(at time.Time) bson.ObjectID {
	id, fresh := outboxes.FirstObjectID(at), bson.NewObjectID()
	copy(id[4:], fresh[4:])
	return id
}

// N25: nothing in an envelope without a stamp shows that it was delivered. It goes once every position has passed the time at
// which it was read, and not before.
func TestN25_UnstampedEnvelopesGoOncePositionsHavePassedTheirReading(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	now := time.Now()
	old := func() any { return objectIDOf(now.Add(-2 * time.Hour)) }
	goes := b.insertUnstamped(t, old)
	goes = append(goes, b.insertUnstamped(t, func() any {
		u := outboxes.FirstUUID(now.Add(-2 * time.Hour))
		fresh := bson.NewObjectID()
		copy(u.Data[9:], fresh[5:])
		u.Data[6], u.Data[8] = 0x70, 0x80
		return u
	})...)
	stays := b.insertUnstamped(t, func() any { return objectIDOf(now.Add(-time.Second)) }) // younger than the retention
	stays = append(stays, b.insertUnstamped(t, old, bson.E{Key: "dueAt", Value: "soon"})...)
	stays = append(stays, b.insertUnstamped(t, old, bson.E{Key: "dueAt", Value: now})...)
	all := len(goes) + len(stays)

	purgedIDs := func() bson.Timestamp {
		t.Helper()
		claims, err := outboxes.NewRegistry(b.config.State.Collection("collections")).Registrations(t.Context(), "w")
		if err != nil || len(claims) != 1 {
			t.Fatal(claims, err)
		}
		return claims[0].PurgedIDs
	}

	// The position of one slot is where the envelopes could be read before they are delivered.
	passed := func() { b.setPosition(t, "w/0of2", bson.D{{Key: "clusterTime", Value: clusterTime(t, b.coll)}}) }
	passed()
	b.setPosition(t, "w/1of2", bson.D{{Key: "clusterTime", Value: clusterTime(t, b.coll)}})
	b.mustPass(t)
	b.mustPass(t)
	if b.countLeft(t) != all {
		t.Fatalf("%d of %d left before any position has passed their reading", b.countLeft(t), all)
	}
	passed()
	b.mustPass(t)
	if b.countLeft(t) != all {
		t.Fatalf("%d of %d left before every position has passed their reading", b.countLeft(t), all)
	}

	if at := purgedIDs(); !at.IsZero() {
		t.Errorf("early ids count as purged up to %d before they are removed", at.T)
	}

	// Another one is inserted after the reading, with an id of before. Its event is not after the positions.
	late := b.insertUnstamped(t, old)
	if _, err := b.coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: goes[0]}}, bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: now}}}}); err != nil {
		t.Fatal(err)
	}
	b.setPosition(t, "w/1of2", bson.D{{Key: "clusterTime", Value: clusterTime(t, b.coll)}})
	b.mustPass(t)
	stays = append(stays, goes[0])
	stays = append(stays, late...)
	if missing := b.findMissing(t, stays); len(missing) > 0 || b.countLeft(t) != len(stays) || b.purged != len(goes)-1 {
		t.Fatalf("%d left instead of %d, %d removed; missing: %v", b.countLeft(t), len(stays), b.purged, missing)
	}
	if age := now.Unix() - int64(purgedIDs().T); age < 30 || age > 120 {
		t.Errorf("the ids are purged up to %d s ago, want about the retention of a minute", age)
	}

	passed()
	b.setPosition(t, "w/1of2", bson.D{{Key: "clusterTime", Value: clusterTime(t, b.coll)}})
	b.mustPass(t)
	if b.countLeft(t) != len(stays)-len(late) {
		t.Errorf("%d left instead of %d once the late ones are delivered", b.countLeft(t), len(stays)-len(late))
	}
}

// N25: where an id shows no time, or a wrong one, the purge gives the envelope a stamp after its delivery.
func TestN25_UnstampedEnvelopesWithoutATimeGetAStamp(t *testing.T) {
	t.Parallel()
	for _, irregular := range []bool{false, true} {
		t.Run(fmt.Sprintf("irregular ids %v", irregular), func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			n := 0
			id := func() any { n++; return fmt.Sprint("id-", n) }
			if irregular {
				id = func() any { return objectIDOf(time.Now().Add(-1000 * time.Hour)) }
				if err := outboxes.NewRegistry(b.config.State.Collection("collections")).MarkIrregularIDs(t.Context(), b.config.Collections()[0].UUID, "w"); err != nil {
					t.Fatal(err)
				}
			}
			ids := b.insertUnstamped(t, id)
			due := b.insertUnstamped(t, id, bson.E{Key: "dueAt", Value: time.Now()})
			stamped := func() int64 {
				t.Helper()
				n, err := b.coll.CountDocuments(t.Context(), bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: bson.Timestamp{T: 1000}}, {Key: "$not", Value: bson.D{{Key: "$type", Value: "array"}}}}}})
				if err != nil {
					t.Fatal(err)
				}
				return n
			}

			b.setPosition(t, "w/0of1", bson.D{{Key: "clusterTime", Value: clusterTime(t, b.coll)}})
			b.mustPass(t)
			b.mustPass(t)
			if stamped() != 0 {
				t.Fatal("an envelope has a stamp before its delivery")
			}
			b.setPosition(t, "w/0of1", bson.D{{Key: "clusterTime", Value: clusterTime(t, b.coll)}})
			b.mustPass(t)
			if int(stamped()) != len(ids) || b.countLeft(t) != len(ids)+len(due) {
				t.Fatalf("%d of %d have a stamp, %d left", stamped(), len(ids), b.countLeft(t))
			}

			later := clusterTime(t, b.coll)
			// The retention is a minute.
			later.T += 100
			b.setPosition(t, "w/0of1", bson.D{{Key: "clusterTime", Value: later}})
			b.mustPass(t)
			if b.countLeft(t) != len(due) {
				t.Errorf("%d left instead of %d after the retention", b.countLeft(t), len(due))
			}
		})
	}
}

// clusterTime returns a time after everything that was committed before.
func clusterTime(t *testing.T, coll *mongo.Collection) bson.Timestamp {
	t.Helper()
	if _, err := coll.Database().Collection("other").InsertOne(t.Context(), bson.D{}); err != nil { // a new time
		t.Fatal(err)
	}
	at, err := mongodb.ClusterTime(t.Context(), coll.Database().Client())
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// insertAs inserts d with a ts that the server would have stamped.
func insertAs(t *testing.T, coll *mongo.Collection, d bson.D, ts any) {
	t.Helper()
	res, err := coll.InsertOne(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	update := bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: ts}}}}
	if ts == nil {
		update = bson.D{{Key: "$unset", Value: bson.D{{Key: "ts", Value: 1}}}}
	}
	if _, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: res.InsertedID}}, update); err != nil {
		t.Fatal(err)
	}
}

// N25: the cut is that of the slot and of the watcher that is furthest behind, whether or not it is owned. A slot
// whose position cannot be judged, or that has a gap, stops the purge.
func TestN25_EverySlotAndWatcherHoldsThePurge(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	o := b.config.Collections()[0]
	b.insert(t, 10, 1_000)
	b.insert(t, 10, 2_000)
	b.insert(t, 10, 3_000)
	holds := func(want Block, left int) {
		t.Helper()
		b.log.Reset()
		b.mustPass(t)
		b.mustPass(t)
		if b.countLeft(t) != left || want != "" && strings.Count(b.log.String(), "reason="+string(want)) != 1 {
			t.Fatalf("left %d instead of %d, log %s", b.countLeft(t), left, b.log.String())
		}
	}

	holds(HoldVanished, 30)
	b.setPosition(t, "w/0of2", at(2_500))
	holds(HoldVanished, 30) // 1of2 is missing
	b.setPosition(t, "w/1of2", bson.D{{Key: "owner", Value: nil}})
	holds(HoldNoPosition, 30)
	b.setPosition(t, "w/1of2", at(1_500))
	b.setPosition(t, "wide/0of1", at(1)) // another watcher's
	holds("", 20)
	b.setPosition(t, "w/1of2", append(at(4_000), bson.E{Key: "gap", Value: bson.D{{Key: "reason", Value: "286"}}}))
	holds(HoldGap, 20)
	b.setPosition(t, "w/1of2", bson.D{{Key: "gap", Value: nil}})
	holds("", 10)
	// Another watcher's claim on the same collection, as the registry of two state databases merged.
	b.setPosition(t, "w/0of2", at(5_000))
	b.setPosition(t, "w/1of2", at(5_000))
	registry := b.config.State.Collection("collections")
	if _, err := registry.UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "watcher", Value: "wide"}}}}); err != nil {
		t.Fatal(err)
	}

	holds("", 10)
	if _, err := registry.DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}

	holds(HoldUnclaimed, 10)
	if _, err := outboxes.NewRegistry(registry).Register(t.Context(), o.UUID, o.NS(), "w", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	holds("", 0)
}

// N2: nothing is removed past the local deadline, also where it passes within a pass.
func TestN02_NothingIsPurgedPastTheDeadline(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.pace.batch = 10
	b.setPosition(t, "w/0of1", at(10_000))
	b.insert(t, 100, 1_000)
	b.config.Valid = func() bool { return b.purged < 30 }
	b.mustPass(t)
	if b.purged != 30 {
		t.Errorf("%d purged, the lease was valid for 30", b.purged)
	}

	b.mustPass(t)
	if b.purged != 30 || b.log.Len() != 0 {
		t.Errorf("%d purged while suspended, log %s", b.purged, b.log)
	}

	b.config.Valid = func() bool { return true }
	b.mustPass(t)
	if b.countLeft(t) != 0 {
		t.Errorf("%d left", b.countLeft(t))
	}
}

func TestRunWaitsForItsEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		slot      int
		retention time.Duration
		passes    int
	}{
		"another slot": {1, time.Minute, 0},
		"kept forever": {0, 0, 0},
		"at work":      {0, time.Minute, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				passes := 0
				list := func() []outboxes.Outbox {
					passes++
					return nil
				}
				p := New(Config{Slot: c.slot, Retention: c.retention, Margin: -1, Interval: time.Hour, Collections: list, Log: slog.New(slog.DiscardHandler)})
				ctx, cancel := context.WithCancelCause(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- p.Run(ctx) }()
				synctest.Wait()
				if passes != c.passes {
					t.Errorf("%d passes, want %d", passes, c.passes)
				}

				why := errors.New("the end")
				cancel(why)
				if err := <-ended; !errors.Is(err, why) {
					t.Errorf("ended with %v", err)
				}
			})
		})
	}
}

func TestTheBacklogOfOneCollectionDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	second := b.config.State.Mongo().Collection("second")
	both := append(b.config.Collections(), outboxes.Outbox{DB: b.config.State.Name(), Coll: "second", UUID: register(t, b.config.State.Mongo(), second, "w")})
	b.config.Collections = func() []outboxes.Outbox { return both }
	b.setPosition(t, "w/0of1", at(10_000))
	b.insert(t, 60, 1_000)
	if _, err := second.InsertOne(t.Context(), bson.D{{Key: "ts", Value: bson.Timestamp{T: 1_000, I: 1}}}); err != nil {
		t.Fatal(err)
	}

	// A turn is one statement.
	b.pace.batch, b.turn = 10, 0
	var order []int
	b.config.OnPurged = func(n int) { order = append(order, n) }
	b.mustPass(t)
	if want := []int{10, 1, 10, 10, 10, 10, 10}; !slices.Equal(order, want) {
		t.Errorf("removed %v, want %v", order, want)
	}
}

// Scheduled envelopes that are older than the retention stay. Each turn of a pass continues after them.
func TestManyOldScheduledEnvelopesCostOneLook(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.setPosition(t, "w/0of1", at(10_000))
	const scheduled, delivered = 5_000, 1_000
	b.insert(t, scheduled, 1_000, bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)})
	b.insert(t, delivered, 2_000)

	b.pace.batch, b.turn = 50, time.Nanosecond
	var commands atomic.Int32
	b.config.Client = stacktest.Client(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if e.CommandName == "delete" {
			commands.Add(1)
		}
	}}))
	b.mustPass(t)
	if b.purged != delivered || b.countLeft(t) != scheduled {
		t.Errorf("purged %d, left %d", b.purged, b.countLeft(t))
	}
	if n, want := int(commands.Load()), (scheduled+delivered)/b.pace.batch; n > want+10 {
		t.Errorf("%d commands, want about %d", n, want)
	}
}

// The purge removes the old envelopes when it starts, and after a wait the envelopes that have become old
// enough.
func TestRunPurgesAtStartAndAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.config.Interval, b.pace.batch = 20*time.Millisecond, 4
	b.setPosition(t, "w/0of1", at(10_000))
	b.insert(t, 21, 1_000)
	b.insert(t, 5, 9_990)
	// The longer the purge has nothing to do, the longer it waits.
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	gone := make(chan int, 100)
	b.config.OnPurged = func(n int) { gone <- n }
	ended := make(chan error)
	go func() { ended <- b.Run(ctx) }()
	wait := func(n int) {
		t.Helper()
		for n > 0 {
			select {
			case one := <-gone:
				n -= one
			case <-ctx.Done():
				t.Fatalf("%d more are waited for", n)
			}
		}
	}

	wait(21)
	// The watcher has moved its position.
	b.setPosition(t, "w/0of1", at(11_000))
	wait(5)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || b.countLeft(t) != 0 {
		t.Errorf("%v, %d left", err, b.countLeft(t))
	}
}

func TestAFaultIsLoggedAndPasses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.setPosition(t, "w/0of1", at(10_000))
	b.insert(t, 5, 1_000)
	app := stacktest.Name(t)
	client := stacktest.Client(t, options.Client().SetAppName(app))
	b.config.Client = client
	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"delete"}}, {Key: "errorCode", Value: 13}})
	var reports []string
	b.config.OnFailing = func(object, cause string) { reports = append(reports, object+": "+cause) }

	// Each attempt waits longer than the attempt before, and only the first one is logged.
	o := b.config.Collections()[0]
	b.config.Interval = time.Second
	for range 3 {
		b.idle[o.UUID] = idleTime{next: b.idle[o.UUID].next}
		b.runPass(t.Context())
	}
	b.runPass(t.Context())
	if got := b.log.String(); strings.Count(got, "cannot purge") != 1 || !strings.Contains(got, "grant the action remove") {
		t.Errorf("log %s", got)
	}
	if next := b.idle[o.UUID].next; next != 4*time.Second || len(reports) != 3 || !strings.HasPrefix(reports[2], o.NS()+": ") {
		t.Errorf("the pause after three attempts is %s, reports %q", next, reports)
	}

	off()
	clear(b.idle)
	b.runPass(t.Context())
	if b.countLeft(t) != 0 || reports[3] != o.NS()+": " {
		t.Errorf("%d left, reports %q", b.countLeft(t), reports)
	}
}

// Without the positions, nothing shows which envelopes of any collection are delivered.
func TestN25_UnreadPositionsStopThePurgeOfAllCollections(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.setPosition(t, "w/0of1", at(10_000))
	b.insert(t, 5, 1_000)
	app := stacktest.Name(t)
	b.config.State = state.Of(stacktest.Client(t, options.Client().SetAppName(app)).Database(b.config.State.Name()))
	var reports []string
	b.config.OnFailing = func(object, cause string) { reports = append(reports, object+": "+cause) }

	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"find", "aggregate"}}, {Key: "errorCode", Value: 13}})
	b.runPass(t.Context())
	if len(reports) != 1 || !strings.HasPrefix(reports[0], "w: ") || b.countLeft(t) != 5 {
		t.Errorf("%d left, reports %q", b.countLeft(t), reports)
	}

	off()
	b.runPass(t.Context())
	if len(reports) != 2 || reports[1] != "w: " || b.countLeft(t) != 0 {
		t.Errorf("%d left, reports %q", b.countLeft(t), reports)
	}
}

// The stamps and positions of this test are the server's: writers with transactions that commit late, a stream, and a
// purger that follows it as closely as possible.
func TestN25_RealStampsBehindARealStream(t *testing.T) {
	t.Parallel()
	followStream(t, func(id string) bson.D { return bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: bson.Timestamp{}}} }, false)
}

// N25: without stamps, nothing is removed before its delivery, for transactions of any length and any clocks of the
// writers.
func TestN25_UnstampedBehindARealStream(t *testing.T) {
	t.Parallel()
	n := atomic.Int64{}
	followStream(t, func(id string) bson.D {
		// Clocks that are hours behind, days behind, and ahead by a second.
		behind := []time.Duration{2 * time.Hour, 100 * time.Hour, -time.Second}
		if i := int(n.Add(1)) % 4; i < len(behind) {
			return bson.D{{Key: "_id", Value: objectIDOf(time.Now().Add(-behind[i]))}}
		}
		return bson.D{{Key: "_id", Value: id}}
	}, true)
}

// followStream runs writers, a stream and a purger. strict means that no transaction is excused for the time that it was open.
func followStream(t *testing.T, envelope func(id string) bson.D, strict bool) {
	t.Helper()
	b := newBench(t)
	// The margin is for transactions that live two seconds.
	b.config.Retention, b.margin = 0, 4*time.Second
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	b.config.OnPurged = func(n int) {
		if b.purged += n; b.purged > 30 {
			cancel()
		}
	}
	stream, err := b.coll.Watch(t.Context(), mongo.Pipeline{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close(context.WithoutCancel(t.Context()))
	// The server does not stamp this envelope: its ts is 0,1.
	b.insert(t, 1, 0)

	var writers sync.WaitGroup
	// slow contains the ids of transactions that lived longer than the margin allows.
	var slow sync.Map
	// committed receives a signal after the commit of a long transaction.
	committed := make(chan struct{}, 1)
	for i := range 4 {
		writers.Go(func() { slowWriter(ctx, b.coll, i, envelope, &slow, committed) })
	}
	defer func() { cancel(); writers.Wait() }()
	// early contains the envelopes that were removed before they were delivered.
	var early []any
	deliver := func(ctx context.Context, most int) {
		var came []any
		var last bson.Timestamp
		for n := 0; n < most && stream.TryNext(ctx); n++ {
			var e struct {
				Type string         `bson:"operationType"`
				At   bson.Timestamp `bson:"clusterTime"`
				Key  bson.M         `bson:"documentKey"`
			}
			if err := stream.Decode(&e); err != nil {
				t.Fatal(err)
			}
			if last = e.At; e.Type == "insert" {
				came = append(came, e.Key["_id"])
			}
		}
		early = append(early, b.findMissing(t, came)...)
		// The envelopes count as delivered now.
		if !last.IsZero() {
			b.setPosition(t, "w/0of1", bson.D{{Key: "clusterTime", Value: last}})
		}
	}
	for ctx.Err() == nil {
		deliver(ctx, 100)
		select {
		// The signal may be from before the delivery.
		case <-committed:
		default:
		}
		// When the purge runs, there must be undelivered envelopes.
		select {
		case <-committed:
		case <-ctx.Done():
		}
		clear(b.idle)
		if _, err := b.purgeCollections(ctx); err != nil && ctx.Err() == nil {
			t.Fatal(err)
		}
	}
	writers.Wait()
	deliver(t.Context(), math.MaxInt)
	for _, id := range early {
		if _, excused := slow.Load(id); strict || !excused {
			t.Errorf("%v was removed before it was delivered", id)
		}
	}
	if b.purged <= 30 {
		t.Errorf("%d purged", b.purged)
	}
}

// findMissing returns the ids that are not in the outbox.
func (b *bench) findMissing(t *testing.T, ids []any) (out []any) {
	t.Helper()
	var found []struct {
		ID any `bson:"_id"`
	}

	cur, err := b.coll.Find(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: append(bson.A{}, ids...)}}}})
	if err == nil {
		err = cur.All(t.Context(), &found)
	}
	if err != nil {
		t.Fatal(err)
	}

	here := map[any]bool{}
	for _, f := range found {
		here[f.ID] = true
	}

	for _, id := range ids {
		if !here[id] {
			out = append(out, id)
		}
	}

	return out
}

// slowWriter inserts within transactions that commit up to 400 ms later, and records transactions that took two seconds
// anyway.
func slowWriter(ctx context.Context, coll *mongo.Collection, i int, envelope func(id string) bson.D, slow *sync.Map, committed chan<- struct{}) {
	client := coll.Database().Client()
	for n := 0; ctx.Err() == nil; n++ {
		_ = client.UseSession(ctx, func(ctx context.Context) error {
			s, begun := mongo.SessionFromContext(ctx), time.Now()
			if err := s.StartTransaction(); err != nil {
				return err
			}
			id := fmt.Sprint(i, "-", n)
			defer func() {
				if time.Since(begun) > 2*time.Second {
					slow.Store(id, true)
				}
			}()

			if _, err := coll.InsertOne(ctx, envelope(id)); err != nil {
				return err
			}
			select {
			case <-time.After(time.Duration(i) * 130 * time.Millisecond):
			case <-ctx.Done():
			}

			err := s.CommitTransaction(context.WithoutCancel(ctx))
			if i > 0 {
				select {
				case committed <- struct{}{}:
				default:
				}
			}
			return err
		})

		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// The aim is 20,000 a second without a limit of the rate. Run go test -bench Purge for the figure.
func BenchmarkPurge(b *testing.B) {
	const n = 50_000
	for _, batch := range []int{200, 500, 1000, 5000} {
		b.Run(fmt.Sprint(batch), func(b *testing.B) {
			var spent time.Duration

			for b.Loop() {
				b.StopTimer()
				w := newBench(b)
				w.setPosition(b, "w/0of1", at(10_000))
				w.insert(b, n, 1_000)
				w.pace.batch = batch

				b.StartTimer()
				begun := time.Now()
				if got, err := w.purgeCollections(b.Context()); err != nil || got != n {
					b.Fatalf("purged %d, %v", got, err)
				}
				spent += time.Since(begun)
			}
			b.ReportMetric(float64(b.N)*n/spent.Seconds(), "envelopes/s")
		})
	}
}
