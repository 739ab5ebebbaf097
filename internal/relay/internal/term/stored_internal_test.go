package term

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// N22: an envelope that waits or is dead stays in its outbox, so a sweep reads it. It is not sent again to the topics for which it
// waits or is dead. Another envelope with its id is sent.
func TestN22_ASweepLeavesOutWhatIsStored(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	log := slog.New(slog.DiscardHandler)
	x := &storedTopics{
		calls:   &readiness.Calls{Timeout: time.Minute, State: readiness.NewState(time.Minute, time.Now, log)},
		store:   waiting.NewStore(db.Collection("waiting"), "w", slot.Range{}),
		letters: db.Collection("letters"),
		claims:  db.Collection("claims"),
		watcher: "w",
	}

	envelopeOf := func(id any, stamp bson.Timestamp, payload string) bson.Raw {
		raw, err := bson.Marshal(bson.D{
			{Key: "_id", Value: id},
			{Key: "ts", Value: stamp},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "1"},
			{Key: "type", Value: "T"},
			{Key: "payload", Value: payload},
		})
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	wait := func(raw bson.Raw, delivery int32, topics ...string) {
		t.Helper()
		e := waiting.Entry{Watcher: "w", NS: "a.outbox", Raw: raw, Delivery: delivery, Pos: "82", Pending: topics, Reason: waiting.Retry, Origin: waiting.OriginStream}
		if err := waiting.Enter(t.Context(), x.store.Collection(), []waiting.Entry{e}); err != nil {
			t.Fatal(err)
		}
	}
	die := func(raw bson.Raw, topic string) {
		t.Helper()
		p, err := letters.Prepare(letters.Letter{
			Watcher: "w", NS: "a.outbox", Raw: raw, Class: record.RecordRejected, Reason: "no", Topic: topic, Partition: record.AnyPartition, Pos: "82",
		})
		if err != nil {
			t.Fatal(err)
		}
		err = db.Client().UseSession(t.Context(), func(ctx context.Context) error {
			_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(tx context.Context) (any, error) {
				return nil, letters.Write(tx, x.letters, time.Now(), []*letters.Prepared{p})
			})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}

	// The envelope of a writer that sets no ts, before and after the purge has stamped it.
	foreign := func(id string) (inserted, stamped bson.Raw) {
		t.Helper()
		fields := bson.D{{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "order"}, {Key: "payload", Value: "p"}}
		inserted, err := bson.Marshal(fields)
		if err == nil {
			stamped, err = bson.Marshal(append(fields, bson.E{Key: "ts", Value: bson.Timestamp{T: 300, I: 1}}))
		}
		if err != nil {
			t.Fatal(err)
		}
		return inserted, stamped
	}

	stamp, later := bson.Timestamp{T: 100, I: 1}, bson.Timestamp{T: 200, I: 1}
	all := envelopeOf("all", stamp, "p")
	some := envelopeOf("some", stamp, "p")
	dead := envelopeOf("dead", stamp, "p")
	both := envelopeOf("both", stamp, "p")
	replayed := envelopeOf("replayed", stamp, "p")
	unstamped := envelopeOf("unstamped", bson.Timestamp{}, "p")
	sent := envelopeOf("sent", stamp, "p")
	sentToOne := envelopeOf("sent to one", stamp, "p")
	wait(all, 0)
	wait(some, 0, "t1", "t2")
	die(dead, "t3")
	wait(both, 0, "t1")
	die(both, "t2")
	wait(replayed, 1, "t1")
	wait(unstamped, 0, "t1")
	wait(sent, 0, "t1")
	wait(sentToOne, 0, "t1")
	wait(sentToOne, 0, "t2")
	foreignWaits, foreignWaitsStamped := foreign("foreign waits")
	foreignDead, foreignDeadStamped := foreign("foreign dead")
	wait(foreignWaits, 0, "t1")
	die(foreignDead, "t3")
	// With `recording: mark`, a claimed envelope stays in its outbox.
	claimed := envelopeOf("claimed", stamp, "p")
	claim := &waiting.Claim{ID: waiting.NewClaimID("w/0of1"), Envelopes: []waiting.Claimed{{NS: "a.outbox", Raw: claimed}}}
	if err := waiting.InsertClaim(t.Context(), x.claims, claim); err != nil {
		t.Fatal(err)
	}

	check := func(name string, raw bson.Raw, wantFound bool, want ...string) {
		t.Helper()
		topics, found, err := x.TopicsOf(t.Context(), "a.outbox", raw)
		slices.Sort(topics)
		if err != nil || found != wantFound || !slices.Equal(topics, want) {
			t.Errorf("%s: topics %q, found %v, %v; want %q, %v", name, topics, found, err, want, wantFound)
		}
	}
	check("waits for all topics", all, true, "")
	check("waits for some topics", some, true, "t1", "t2")
	check("dead for one topic", dead, true, "t3")
	check("waits for one topic and dead for another", both, true, "t1", "t2")
	check("claimed", claimed, true, "")
	check("never stored", envelopeOf("other", stamp, "p"), false)
	check("only a replay waits", replayed, false)
	check("without a stamp", unstamped, true, "t1")
	check("waits, and was stamped since", foreignWaitsStamped, true, "t1")
	check("dead, and was stamped since", foreignDeadStamped, true, "t3")
	_, otherStamped := foreign("foreign")
	check("never stored, and was stamped", otherStamped, false)

	// The ids were used again: these envelopes were not sent.
	check("another envelope with the id of a waiting one", envelopeOf("some", later, "q"), false)
	check("another envelope with the id of a dead one", envelopeOf("dead", later, "q"), false)
	check("another type of id", envelopeOf(bson.Binary{Data: []byte("some")}, stamp, "p"), false)
	if topics, found, err := x.TopicsOf(t.Context(), "other.outbox", some); err != nil || found {
		t.Errorf("of another outbox: %q, %v", topics, err)
	}
	// Without a stamp, another envelope looks like one that was sent since: it is sent, flagged as redelivered.
	check("another envelope without a stamp", envelopeOf("unstamped", bson.Timestamp{}, "q"), false)

	// They waited when the sweep began, and are sent since: to these topics, and to no other.
	for _, id := range []string{"sent", "sent to one"} {
		if _, err := x.store.Collection().DeleteOne(t.Context(), bson.D{{Key: "id", Value: id}, {Key: "topics", Value: "t1"}}); err != nil {
			t.Fatal(err)
		}
	}
	check("sent during the sweep", sent, true, "t1")
	check("sent to one topic during the sweep, and waits for another", sentToOne, true, "t1", "t2")
}
