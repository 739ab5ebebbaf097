package process_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/pkg/event"
)

// undoCheckpoint runs a relay and do, and then sets the position back to its value before the relay. So the watcher document equals the document
// of an owner that died at an earlier checkpoint, and whose later records are in the topics.
func (b *bundle) undoCheckpoint(set []string, do func()) {
	b.t.Helper()
	watchers := b.state.Collection("watchers")
	before, err := watchers.FindOne(b.t.Context(), bson.D{}).Raw()
	if err != nil {
		b.t.Fatal(err)
	}

	stop := b.start(set...)
	do()
	if err := stop(); err != nil {
		b.t.Fatal(err)
	}

	back := bson.D{}
	for _, field := range []string{"token", "clusterTime", "offsets", "collections", "pipelineHash"} {
		back = append(back, bson.E{Key: field, Value: before.Lookup(field)})
	}
	if _, err := watchers.UpdateOne(b.t.Context(), bson.D{}, bson.D{{Key: "$set", Value: back}}); err != nil {
		b.t.Fatal(err)
	}
}

// TestN15_EventsSentInTimeDoNotExpire: an event expires after its delivery, and the owner died before the checkpoint
// that passes it. Its successor finds the record, and writes no dead letter.
func TestN15_EventsSentInTimeDoNotExpire(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.appendTo("outbox", "before")
	stop := b.start()
	b.readUntil("before")
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	var expires time.Time
	b.undoCheckpoint(nil, func() {
		b.log.wait(t, "took over")
		expires = time.Now().Add(4 * time.Second)
		if err := b.box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("sent")), event.WithExpiry(expires))); err != nil {
			t.Fatal(err)
		}
		b.readUntil("sent")
	})

	stacktest.Eventually(t, "the envelope has expired", func() bool { return time.Now().After(expires) })

	stop = b.start()
	b.appendTo("outbox", "after")
	b.readUntil("after")
	// The stop drains, so all records and letters are written after it.
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	if n := b.countLetters(bson.D{}); n != 0 {
		t.Errorf("%d dead letters of delivered events", n)
	}
}

// TestN07_AnotherWatchListFindsSentRecords: records of a watcher of one collection have no header with its name,
// records of a watcher of several collections have. A crash before the watch list is changed repeats nothing all the
// same.
func TestN07_AnotherWatchListFindsSentRecords(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, before, after string }{
		{"one more", "%.outbox", "%.outbox*"},
		{"one less", "%.outbox*", "%.outbox"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			watch := func(list string) string { return "watch=" + strings.ReplaceAll(list, "%", b.db.Name()) }

			b.appendTo("outbox", "before")
			stop := b.start(watch(c.before))
			b.readUntil("before")
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			sent := newPayloads("sent", 10)
			b.undoCheckpoint([]string{watch(c.before)}, func() {
				b.appendTo("outbox", sent...)
				b.readUntil("sent9")
			})

			b.start(watch(c.after))
			b.appendTo("outbox", "after")
			if got, want := b.readUntil("after"), slices.Concat([]string{"before"}, sent, []string{"after"}); !slices.Equal(got, want) {
				t.Errorf("delivered %q,\nwant %q", got, want)
			}
		})
	}
}

// endBlocked ends the commands of a client that the fail point still blocks. The server turns the fail point off only after them,
// and the tests of other packages wait for the fail point.
func (b *bundle) endBlocked(app string) {
	b.t.Helper()
	admin := b.client.Database("admin")
	cur, err := admin.Aggregate(b.t.Context(), mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{}}},
		{{Key: "$match", Value: bson.D{{Key: "appName", Value: app}}}},
	})
	if err != nil {
		b.t.Fatal(err)
	}

	var blocked []struct {
		ID int `bson:"opid"`
	}
	if err := cur.All(b.t.Context(), &blocked); err != nil {
		b.t.Fatal(err)
	}

	for _, op := range blocked {
		if err := admin.RunCommand(b.t.Context(), bson.D{{Key: "killOp", Value: 1}, {Key: "op", Value: op.ID}}).Err(); err != nil {
			b.t.Fatal(err)
		}
	}
}

// TestN07_AnotherWatchListFindsRecordsSentBeforeTwoCrashes: the first owner with the new list dies as well, after a checkpoint in the
// middle of the events that an owner with the old list has sent.
func TestN07_AnotherWatchListFindsRecordsSentBeforeTwoCrashes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, name := range []string{"outbox", "outbox2"} {
		if err := b.db.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	one, several := "watch="+b.db.Name()+".outbox", "watch="+b.db.Name()+".outbox*"
	b.appendTo("outbox", "before")
	stop := b.start(one)
	b.readUntil("before")
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	// 300 envelopes are more than the first response of a stream.
	sent := newPayloads("sent", 300)
	b.undoCheckpoint([]string{one}, func() {
		b.appendTo("outbox", sent...)
		b.readUntil("sent299")
	})
	state := func() (clock bson.Timestamp, seq int64) {
		t.Helper()
		doc, _, err := lease.Read(t.Context(), b.state.Collection("watchers"), "default/0of1")
		if err != nil {
			t.Fatal(err)
		}
		return doc.ClusterTime, doc.Seq
	}

	from, _ := state()
	// The owner gets the first response of its stream.
	proceed := stacktest.FailCommand(t, "outrelay stream "+b.topic, bson.D{{Key: "skip", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 60_000},
	})
	stop = b.start(several, "node="+b.topic)
	var moved int64
	stacktest.Eventually(t, "the checkpoint has moved", func() bool { at, seq := state(); moved = seq; return at.After(from) })
	stacktest.Eventually(t, "the owner has renewed its lease several times", func() bool { _, seq := state(); return seq >= moved+6 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	b.endBlocked("outrelay stream " + b.topic)
	proceed()

	b.start(several)
	b.appendTo("outbox", "after")
	if got, want := b.readUntil("after"), slices.Concat([]string{"before"}, sent, []string{"after"}); !slices.Equal(got, want) {
		t.Errorf("%d records were delivered, want %d: %q", len(got), len(want), got)
	}
}
