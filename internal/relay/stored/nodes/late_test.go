package nodes

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// A heartbeat that the server executes after its process has left lists no node. Otherwise the others would wait until
// that node is stale.
func TestALateSignOfLifeListsNobody(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	db := state.Of(stacktest.Database(t, stacktest.Client(t, options.Client().SetAppName(app))))
	m := newMember(db, "a", nil)
	mustBeat(t, m, Vitals{})
	off := stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"findAndModify"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 3000},
	})

	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error, 1)
	go func() { gaveUp <- m.SendHeartbeat(ctx, Vitals{}) }()
	stacktest.Eventually(t, "the sign of life is under way", func() bool { return countRunning(t, db, app) > 0 })
	cancel()
	if err := <-gaveUp; err == nil {
		t.Fatal("it did not give up")
	}
	if err := m.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "the sign of life is carried out", func() bool { return countRunning(t, db, app) == 0 })
	off()
	if l := listNodes(t, db); len(l) != 0 {
		t.Errorf("it is listed again: %+v", l)
	}
}

// countRunning counts the findAndModify on the list that the server carries out for app.
func countRunning(t *testing.T, db state.Database, app string) int {
	t.Helper()
	cur, err := db.Client().Database("admin").Aggregate(t.Context(), mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{{Key: "allUsers", Value: true}}}},
		{{Key: "$match", Value: bson.D{{Key: "appName", Value: app}, {Key: "command.findAndModify", Value: db.Collection("nodes").Name()}}}},
	})
	if err != nil {
		t.Fatal(err)
	}

	var ops []bson.Raw
	if err := cur.All(t.Context(), &ops); err != nil {
		t.Fatal(err)
	}

	return len(ops)
}
