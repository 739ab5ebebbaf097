package doctor

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// An administrator has upgraded the servers and not yet confirmed the upgrade. The relay addresses collections by their UUIDs, which
// such a server rejects.
func TestFeaturesOfAnEarlierVersionAreReported(t *testing.T) {
	t.Parallel()
	s := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true})
	client, err := mongo.Connect(options.Client().ApplyURI(s.MongoURI()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Disconnect(t.Context())
	if err := client.Database("admin").RunCommand(t.Context(), bson.D{{Key: "setFeatureCompatibilityVersion", Value: "5.0"}}).Err(); err != nil {
		t.Fatal(err)
	}

	r := examine(t, loadConfig(t, s.MongoURI(), stacktest.Brokers(t), "watch=shop.outbox", "topics.template="+stacktest.Topic(t, 1)))
	expectCheck(t, r, "mongodb.version", Fail, "feature compatibility version 5.0", `setFeatureCompatibilityVersion: "6.0"`)
}
