package connect_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
)

// If its user is dropped and created again, MongoDB keeps the open connections of a client and rejects all of their commands. The client
// connects again. A command for which the user has no privilege is rejected on the same connections.
func TestAClientLogsInAgainIfItsUserIsCreatedAgain(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{Root: devstack.User{Name: "root", Password: "root"}}})
	root, err := mongo.Connect(options.Client().ApplyURI(stack.MongoURI()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Disconnect(t.Context()) }()
	run := func(command ...bson.E) {
		t.Helper()
		if err := root.Database("admin").RunCommand(t.Context(), bson.D(command)).Err(); err != nil {
			t.Fatal(err)
		}
	}
	create := func() {
		t.Helper()
		run(bson.E{Key: "createUser", Value: "relay"}, bson.E{Key: "pwd", Value: "secret"}, bson.E{Key: "roles", Value: bson.A{bson.D{{Key: "role", Value: "read"}, {Key: "db", Value: "shop"}}}})
	}
	create()

	log := &stacktest.Buffer{}
	cfg := config.MongoDB{URI: config.NewURI(stack.MongoURIAs(devstack.User{Name: "relay", Password: "secret"})), ReadPreference: "primary"}
	clients, err := connect.NewClients(cfg, connect.MongoHost{}, "n", 1, slog.New(slog.NewTextHandler(log, nil)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer clients.Disconnect(context.WithoutCancel(t.Context()))
	for name, client := range map[string]*mongo.Client{"stream": clients.Stream, "state": clients.State} {
		read := func(database string) error {
			return client.Database(database).Collection("orders", options.Collection().SetReadPreference(readpref.Primary())).FindOne(t.Context(), bson.D{}).Err()
		}
		if err := read("shop"); !errors.Is(err, mongo.ErrNoDocuments) {
			t.Fatal(err)
		}
		before := log.String()
		if err := read("other"); !mongodb.HasCode(err, mongodb.CodeUnauthorized) || log.String() != before {
			t.Errorf("%s: a command without its privilege: %v\n%s", name, err, log)
		}

		run(bson.E{Key: "dropUser", Value: "relay"})
		create()
		stacktest.Eventually(t, "the client of the "+name+" works again", func() bool { return errors.Is(read("shop"), mongo.ErrNoDocuments) })
	}
}
