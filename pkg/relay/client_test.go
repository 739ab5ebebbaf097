package relay_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/relay"
)

// weakCommands records the commands that depend on the concerns of their client.
type weakCommands struct {
	mu    sync.Mutex
	seen  int
	found []string
}

func (w *weakCommands) checkCommand(_ context.Context, started *event.CommandStartedEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen++

	lookup := func(path ...string) string {
		text, _ := started.Command.Lookup(path...).StringValueOK()
		return text
	}
	// A slow build of an index sends updates without an effect, to find out whether writes have to wait.
	if _, err := started.Command.LookupErr("updates", "0", "u", "$unset", "none"); err == nil {
		return
	}
	problem := ""
	// A transaction has the concerns of its commit.
	_, err := started.Command.LookupErr("autocommit")
	inTransaction := err == nil && started.CommandName != "commitTransaction"
	writes := []string{"insert", "update", "delete", "findAndModify", "commitTransaction"}
	journaled, _ := started.Command.Lookup("writeConcern", "j").BooleanOK()
	if slices.Contains(writes, started.CommandName) && !inTransaction && (lookup("writeConcern", "w") != "majority" || !journaled) {
		problem = "its write concern is not majority with j: true"
	}
	if mode := lookup("$readPreference", "mode"); mode == "nearest" {
		problem = "it may read from a secondary"
	}
	if level := lookup("readConcern", "level"); level == "available" {
		problem = "it may read data that is rolled back later"
	}
	if problem != "" {
		w.found = append(w.found, fmt.Sprintf("%s: %s: %s", started.CommandName, problem, started.Command))
	}
}

// Relays that use the client of the service deliver across a change of the owner, set their own concerns and
// encoding, and leave the client as it was.
func TestRelaysUseTheClientOfTheService(t *testing.T) {
	t.Parallel()
	s := setup(t)
	weak := &weakCommands{}
	client := stacktest.Client(t, options.Client().
		SetWriteConcern(writeconcern.W1()).
		SetReadConcern(readconcern.Available()).
		SetReadPreference(readpref.Nearest()).
		SetBSONOptions(&options.BSONOptions{UseJSONStructTags: true, NilSliceAsEmpty: true, OmitZeroStruct: true, IntMinSize: true}).
		SetMonitor(&event.CommandMonitor{Started: weak.checkCommand}))
	s.config.MongoDB.URI = relay.URI{}

	start := func(node string) (*relay.Relay, func() error) {
		c := s.config
		c.Node = node
		r, err := relay.New(c, relay.WithMongoClient(client), relay.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		return r, s.run(t, r)
	}

	a, stopA := start("a")
	waitPhases(t, a, relay.Owner)
	b, stopB := start("b")
	waitPhases(t, b, relay.Standby)
	s.append(t, 10)
	s.readValues(t, 10)
	if err := stopA(); err != nil {
		t.Errorf("stopping a: %v", err)
	}

	waitPhases(t, b, relay.Owner)
	s.append(t, 10)
	if got := s.readValues(t, 20); len(got) != 20 {
		t.Errorf("records: got %d, want 20", len(got))
	}
	if err := stopB(); err != nil {
		t.Errorf("stopping b: %v", err)
	}

	if weak.seen == 0 || len(weak.found) > 0 {
		t.Errorf("of %d commands, these depend on the client:\n%s", weak.seen, strings.Join(weak.found, "\n"))
	}
	if n := client.NumberSessionsInProgress(); n != 0 {
		t.Errorf("sessions that the relays left open: got %d, want none", n)
	}
	if err := client.Ping(t.Context(), nil); err != nil {
		t.Errorf("the client of the service after Run: %v", err)
	}
}

// A client that ends long calls is rejected as soon as MongoDB responds.
func TestAClientWithATimeoutIsRejected(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.config.MongoDB.URI = relay.URI{}
	client := stacktest.Client(t, options.Client().SetTimeout(time.Minute))
	err := runWithin(t, s.config, client)
	if err == nil || !strings.Contains(err.Error(), "Timeout") || !strings.Contains(err.Error(), "WithMongoOptions") {
		t.Errorf("got error %v, want one that names Timeout and WithMongoOptions", err)
	}
	if err := client.Ping(t.Context(), nil); err != nil {
		t.Errorf("the client of the service after Run: %v", err)
	}
}

// The strict stable API lacks commands that the relay needs. Its client is rejected by name, and options are used without it.
func TestAStrictClientIsRejected(t *testing.T) {
	t.Parallel()
	s := setup(t)
	strict := options.Client().SetServerAPIOptions(options.ServerAPI(options.ServerAPIVersion1).SetStrict(true))
	s.config.MongoDB.URI = relay.URI{}
	client := stacktest.Client(t, strict)
	err := runWithin(t, s.config, client)
	if err == nil || !strings.Contains(err.Error(), "strict stable API") || !strings.Contains(err.Error(), "WithMongoOptions") {
		t.Errorf("got error %v, want one that names the strict stable API and WithMongoOptions", err)
	}

	r, err := relay.New(s.config, relay.WithMongoOptions(strict.ApplyURI(stacktest.MongoURI(t))), relay.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	s.run(t, r)
	waitPhases(t, r, relay.Owner)
}

// A client that was disconnected before Run is rejected, instead of a relay that never works.
func TestADisconnectedClientIsRejected(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.config.MongoDB.URI = relay.URI{}
	client := stacktest.Client(t)
	if err := client.Disconnect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := runWithin(t, s.config, client); !errors.Is(err, mongo.ErrClientDisconnected) {
		t.Errorf("got error %v, want ErrClientDisconnected", err)
	}
}

// A service whose user may only use its databases can pass its client: the server rejects the question about a Timeout.
func TestAClientIsAcceptedIfTheServerRejectsTheCheck(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.config.MongoDB.URI = relay.URI{}
	app := stacktest.Name(t)
	stacktest.FailCommand(t, app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"currentOp"}}, {Key: "errorCode", Value: 13}})
	client := stacktest.Client(t, options.Client().SetAppName(app))
	r, err := relay.New(s.config, relay.WithMongoClient(client), relay.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	s.run(t, r)
	waitPhases(t, r, relay.Owner)
}

// runWithin returns the error with which a relay with this client ends.
func runWithin(t *testing.T, cfg relay.Config, client *mongo.Client) error {
	t.Helper()
	r, err := relay.New(cfg, relay.WithMongoClient(client), relay.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = r.Run(ctx)
	if ctx.Err() != nil {
		t.Error("the relay was not rejected")
	}
	return err
}
