package process_test

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN16_AnElectionCostsNoImage: the envelope that has to wait was deleted in the transaction of its insert, and the first
// attempts to read its event again find their connections cut.
func TestN16_AnElectionCostsNoImage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("node=" + b.topic)
	b.append(1)
	b.consume(1)
	over := stacktest.FailCommand(t, "outrelay stream "+b.topic, "alwaysOn",
		bson.D{{Key: "failCommands", Value: bson.A{"ping"}}, {Key: "closeConnection", Value: true}})
	outbox := b.db.Collection("outbox")
	session, err := b.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer session.EndSession(context.WithoutCancel(t.Context()))
	if _, err := session.WithTransaction(t.Context(), func(tx context.Context) (any, error) {
		e := event.New(event.Aggregate{Type: "order", ID: "1"}, "Placed", event.Bytes("", []byte("short-lived")), event.WithID("gone"), event.WithTopic("missing-"+b.topic))
		if _, err := outbox.InsertOne(tx, e); err != nil {
			return nil, err
		}
		return outbox.DeleteOne(tx, bson.D{{Key: "_id", Value: "gone"}})
	}); err != nil {
		t.Fatal(err)
	}

	b.log.wait(t, "cannot write a topic; its records are parked")
	polls := 0
	stacktest.Eventually(t, "the fail point has blocked 50 polls", func() bool { polls++; return polls > 50 })
	over()
	stacktest.Eventually(t, "the envelope is parked with its payload", func() bool {
		return b.countWaiting(bson.D{{Key: "id", Value: "gone"}, {Key: "reason", Value: "parked"}, {Key: "envelope.payload", Value: bson.D{{Key: "$exists", Value: true}}}}) == 1
	})
}

// TestN15_GivenBackEventsKeepTheOrderOfTheirCommits: two transactions of one key overlap. The first to insert is the last to commit.
// The sink has queued both records when their topic turns out to be missing, and gives them back without their envelopes. Stamps have
// the order of the inserts, so the documents in the outbox do not show the order of the commits: only the stream does.
func TestN15_GivenBackEventsKeepTheOrderOfTheirCommits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	missing := "late-" + b.topic
	b.append(1)
	b.start()
	b.consume(1)
	open := func(name string) *mongo.Session {
		t.Helper()
		session, err := b.client.StartSession()
		if err == nil {
			t.Cleanup(func() { session.EndSession(context.WithoutCancel(t.Context())) })
			err = session.StartTransaction()
		}
		if err == nil {
			e := event.New(event.Aggregate{Type: "order", ID: "same"}, "Placed", event.Bytes("", []byte(name)), event.WithID(name), event.WithTopic(missing))
			err = b.box.Append(mongo.NewSessionContext(t.Context(), session), e)
		}
		if err != nil {
			t.Fatal(err)
		}
		return session
	}

	// A transaction cannot begin while the relay changes the outbox, and nothing here repeats one.
	b.log.wait(t, "created an index")
	insertedFirst, committedFirst := open("inserted-first"), open("committed-first")
	for _, session := range []*mongo.Session{committedFirst, insertedFirst} {
		if err := session.CommitTransaction(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	stacktest.Eventually(t, "both envelopes are parked", func() bool {
		return b.countWaiting(bson.D{{Key: "topics", Value: missing}}) == 2
	})

	stacktest.CreateTopic(t, missing, 1)
	late := *b
	late.topic = missing
	got := late.consume(2)
	if first, second := findID(got[0]), findID(got[1]); first != "committed-first" || second != "inserted-first" {
		t.Errorf("delivered %s, %s; want the order of the commits", first, second)
	}
}

// TestN15_GivenBackEventsWithOneIDKeepTheirEnvelopes: a transaction inserts an id, deletes it and inserts it again. The sink has queued
// both records when their topic turns out to be missing, and gives them back without their envelopes.
func TestN15_GivenBackEventsWithOneIDKeepTheirEnvelopes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	missing := "late-" + b.topic
	b.append(1)
	b.start()
	b.consume(1)

	// A transaction cannot begin while the relay changes the outbox.
	b.log.wait(t, "created an index")
	outbox := b.db.Collection("outbox")
	err := b.client.UseSession(t.Context(), func(ctx context.Context) error {
		_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(tx context.Context) (any, error) {
			for _, payload := range []string{"first", "second"} {
				if _, err := outbox.DeleteOne(tx, bson.D{{Key: "_id", Value: "again"}}); err != nil {
					return nil, err
				}
				e := event.New(event.Aggregate{Type: "order", ID: "same"}, "Placed", event.Bytes("", []byte(payload)), event.WithID("again"), event.WithTopic(missing))
				if _, err := outbox.InsertOne(tx, e); err != nil {
					return nil, err
				}
			}
			return nil, nil
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "both envelopes are parked", func() bool {
		return b.countWaiting(bson.D{{Key: "topics", Value: missing}}) == 2
	})

	stacktest.CreateTopic(t, missing, 1)
	late := *b
	late.topic = missing
	got := late.consume(2)
	if first, second := string(got[0].Value), string(got[1].Value); first != "first" || second != "second" {
		t.Errorf("delivered %q, %q; want each envelope once, in order", first, second)
	}
}
