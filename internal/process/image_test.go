package process_test

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
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

	b.log.wait(t, "topic is parked")
	polls := 0
	waitFor(t, "the fail point has blocked 50 polls", func() bool { polls++; return polls > 50 })
	over()
	waitFor(t, "the envelope is parked with its payload", func() bool {
		n, err := outbox.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "gone"}, {Key: "state", Value: "parked"}, {Key: "payload", Value: bson.D{{Key: "$exists", Value: true}}}})
		return err == nil && n == 1
	})
}
