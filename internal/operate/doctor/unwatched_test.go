//go:build unix

package doctor

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// A service appends to a database that no watcher reads. Collections of services that are no outbox, and outboxes of other watchers, are
// no finding. A user who may not list all databases gets a report with that reason.
func testUnwatched(t *testing.T, root *mongo.Client, cfg, narrow config.Config) {
	expectCheck(t, examine(t, cfg), "outbox.unwatched", OK, "none of ")

	wrong, other := root.Database("libary"), root.Database("warehouse")
	for _, db := range []*mongo.Database{wrong, other} {
		appendTo(t, db, aclTopic)
		t.Cleanup(func() { _ = db.Drop(t.Context()) })
	}
	if _, err := wrong.Collection("books").InsertOne(t.Context(), bson.D{{Key: "type", Value: "novel"}}); err != nil {
		t.Fatal(err)
	}
	uuid, err := mongodb.CollectionUUID(t.Context(), root, other.Name(), "outbox")
	if err != nil {
		t.Fatal(err)
	}
	registry := outboxes.NewRegistry(state.Open(root, cfg.State).Collection("collections"))
	if _, err := registry.Register(t.Context(), uuid, "warehouse.outbox", "warehouse", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	expectCheck(t, examine(t, cfg), "outbox.unwatched", Warn, "reads, although the newest document is an event: libary.outbox", "add it to watch: libary.outbox\n")
	expectCheck(t, examine(t, narrow), "outbox.unwatched", OK, "the user may not list all databases")
}
