package process_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// watch returns the setting for collections of the database.
func (b *bundle) watch(collections ...string) string {
	for i := range collections {
		collections[i] = b.db.Name() + "." + collections[i]
	}
	return "watch=[" + strings.Join(collections, ", ") + "]"
}

// runOnce runs a relay with settings until it has delivered a new event of collection.
func (b *bundle) runOnce(collection, payload string, set ...string) {
	b.t.Helper()
	stop := b.start(set...)
	b.appendTo(collection, payload)
	b.readUntil(payload)
	if err := stop(); err != nil {
		b.t.Fatal(err)
	}
}

// updateWatcher sets fields of the watcher document while no relay runs.
func (b *bundle) updateWatcher(set bson.D) {
	b.t.Helper()
	if _, err := b.state.Collection("watchers").UpdateOne(b.t.Context(), bson.D{}, bson.D{{Key: "$set", Value: set}}); err != nil {
		b.t.Fatal(err)
	}
}

// position returns the position of the watcher.
func (b *bundle) position() bson.Timestamp {
	b.t.Helper()
	document, _, err := lease.Read(b.t.Context(), b.state.Collection("watchers"), "default/0of1")
	if err != nil {
		b.t.Fatal(err)
	}
	at, _ := document.Position().Time()
	return at
}

// TestN27_AHalfSweptGapOfAnEarlierConfigurationIncludesAddedCollections: its sweep did not read them, so its cursor does not count for them.
func TestN27_AHalfSweptGapOfAnEarlierConfigurationIncludesAddedCollections(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.insertAged("later", "aged")
	if _, err := b.db.Collection("later").InsertOne(t.Context(), bson.D{
		{Key: "_id", Value: "unstamped"},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "k"},
		{Key: "type", Value: "Placed"},
		{Key: "payload", Value: bson.Binary{Data: []byte("unstamped")}},
	}); err != nil {
		t.Fatal(err)
	}
	// The position passes all of them.
	b.runOnce("outbox", "first", b.watch("outbox"))
	at := b.position()
	b.updateWatcher(bson.D{{Key: "gap", Value: lease.Gap{Reason: "286", From: at, To: at, Cursor: at, Since: time.Now()}}})

	b.start(b.watch("outbox", "later"), "retention=1m", "purge.interval=100ms")
	b.log.wait(t, "the gap is closed")
	b.appendTo("later", "end")
	payloads := b.readUntil("end")
	for _, want := range []string{"aged", "unstamped"} {
		if !slices.Contains(payloads, want) {
			t.Errorf("%s was not delivered: %q", want, payloads)
		}
	}
}

// TestN27_AnOutboxThatIsWatchedUnderItsNewNameIsSweptFromTheRename: the stream of the earlier configuration has read it up to then.
func TestN27_AnOutboxThatIsWatchedUnderItsNewNameIsSweptFromTheRename(t *testing.T) {
	t.Parallel()
	b := setup(t)
	earlier := b.watch("outbox", "other")
	stop := b.start(earlier)
	b.appendTo("outbox", "before")
	b.appendTo("other", "read")
	b.readUntil("read")
	b.rename("outbox", "later")
	b.appendTo("later", "after")
	b.appendTo("other", "passed")
	b.readUntil("passed")
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	b.start(b.watch("later", "other"))
	b.appendTo("later", "end")
	payloads := b.readUntil("end")
	// The event before the rename may be repeated.
	if i := slices.Index(payloads, "after"); i < 0 || slices.Contains(payloads[i+1:], "after") {
		t.Errorf("delivered %q, want the event after the rename once", payloads)
	}
}

// TestN27_AnOnlyOutboxThatIsWatchedUnderItsNewNameIsSweptFromTheRename, although the rename ends the stream of a single collection.
func TestN27_AnOnlyOutboxThatIsWatchedUnderItsNewNameIsSweptFromTheRename(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start(b.watch("outbox"))
	b.insertAged("outbox", "before")
	b.readUntil("before")
	b.rename("outbox", "later")
	b.log.wait(t, "the watched collection is gone")
	b.appendTo("later", "after")
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	b.start(b.watch("later"))
	b.appendTo("later", "end")
	if payloads := b.readUntil("end"); !slices.Equal(payloads, []string{"before", "after", "end"}) {
		t.Errorf("delivered %q, want each event once", payloads)
	}
}

// TestN27_AnAddedCollectionCountsAsReadOnceItsEventsAreSafe: while they wait for Kafka, the stream adopts a new collection, and the owner stops.
func TestN27_AnAddedCollectionCountsAsReadOnceItsEventsAreSafe(t *testing.T) {
	t.Parallel()
	b := setup(t)
	topic := "late-" + b.topic
	box, err := outbox.New(b.db, outbox.WithoutTransaction(), outbox.WithCollection("later"))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("late")), event.WithTopic(topic))); err != nil {
			t.Fatal(err)
		}
	}
	// The position passes all of them.
	b.runOnce("outbox", "first", b.watch("outbox"))
	both := []string{b.watch("outbox", "later", "third*"), "lease.drain=1s"}
	stop := b.start(both...)
	b.log.wait(t, "sweeping collections that got watched names")
	b.appendTo("third", "third")
	b.log.wait(t, "a new collection is watched")
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	stacktest.CreateTopic(t, topic, 1)
	b.start(both...)
	b.readUntil("third")
	late := *b
	late.topic = topic
	late.consume(3)
}

// TestN23_ImagesAreReadAgainWithoutATokenOfAnEarlierConfiguration: the stream does not contain the event of the token. The envelope has to
// wait for its topic, and was deleted at once.
func TestN23_ImagesAreReadAgainWithoutATokenOfAnEarlierConfiguration(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stream, err := b.db.Watch(t.Context(), mongo.Pipeline{}, options.ChangeStream())
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close(context.WithoutCancel(t.Context()))
	b.runOnce("outbox", "first", b.watch("outbox"))
	if !stream.Next(t.Context()) {
		t.Fatal(stream.Err())
	}
	var seen struct {
		ID          bson.Raw       `bson:"_id"`
		ClusterTime bson.Timestamp `bson:"clusterTime"`
	}
	if err := stream.Decode(&seen); err != nil {
		t.Fatal(err)
	}
	b.updateWatcher(bson.D{{Key: "token", Value: seen.ID}, {Key: "clusterTime", Value: seen.ClusterTime}})

	later := b.db.Collection("later")
	e := event.New(event.Aggregate{Type: "order", ID: "1"}, "Placed", event.Bytes("", []byte("short-lived")), event.WithID("gone"), event.WithTopic("missing-"+b.topic))
	if _, err := later.InsertOne(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if _, err := later.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: "gone"}}); err != nil {
		t.Fatal(err)
	}
	b.updateWatcher(bson.D{{Key: "collections", Value: bson.A{}}})
	b.start(b.watch("later", "third"))
	stacktest.Eventually(t, "the envelope is parked with its payload", func() bool {
		return b.countWaiting(bson.D{{Key: "id", Value: "gone"}, {Key: "envelope.payload", Value: bson.D{{Key: "$exists", Value: true}}}}) == 1
	})
}

// TestN27_AnOutboxThatIsCreatedAgainWhileNobodyReadsIsPurged: the list of the takeover has it already when the stream brings the end of the
// earlier one.
func TestN27_AnOutboxThatIsCreatedAgainWhileNobodyReadsIsPurged(t *testing.T) {
	t.Parallel()
	b := setup(t)
	set := []string{b.watch("outbox", "other"), "retention=1m", "purge.interval=100ms"}
	b.runOnce("outbox", "first", set...)
	b.appendTo("outbox", "old")
	if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.appendTo("outbox", "new")

	b.start(set...)
	b.readUntil("new")
	b.ageStamps("outbox")
	stacktest.Eventually(t, "the delivered envelope is purged", func() bool {
		n, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{})
		return err == nil && n == 0
	})
}

// TestN28_AResliceRepeatsNoCollectionThatOneSlotHasRead: the other slot had no key of it.
func TestN28_AResliceRepeatsNoCollectionThatOneSlotHasRead(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.env = append(b.env, "OUTRELAY_WATCH="+b.db.Name()+".*box")
	b.append(5)
	stop := b.start("slots=2")
	b.consume(5)
	// Each of these collections has the key of one slot.
	for i := range 8 {
		e := event.New(event.Aggregate{Type: "order", ID: fmt.Sprint("key", i)}, "Placed", event.Bytes("", []byte("new")))
		if _, err := b.db.Collection(fmt.Sprint("new", i, "box")).InsertOne(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	b.consume(13)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	if report, err := b.reslice(3); err != nil || !report.Done {
		t.Fatalf("%+v, %v", report, err)
	}
	b.start("slots=3")
	b.append(5)
	of := map[string]int{}
	for _, r := range b.consume(18) {
		of[string(r.Value)]++
	}
	if of["new"] != 8 {
		t.Errorf("delivered %v, want each of the 8 new events once", of)
	}
}
