//go:build unix

package kit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Options configures a scene. The zero value is one outbox and one topic with 6 partitions on the
// shared servers.
type Options struct {
	Stack      *devstack.Stack // dedicated servers; the shared servers replace missing ones
	MongoURI   string          // the address for the relay, if it differs from the server (a proxy)
	Brokers    []string        // as MongoURI
	Types      []string        // aggregate types with a topic; nil is "order"
	Partitions int             // of each topic; defaults to 6
	Replicas   int             // of each partition; defaults to 1
	Assigned   [][]int         // brokers of each partition, which replace Partitions and Replicas
	Topic      []kafka.ConfigEntry
	Env        []string       // additional variables for the scene's processes
	Set        map[string]any // configuration keys by path ("lease.ttl"), which override those of the scene
}

// addresses returns the addresses of MongoDB and Kafka.
func (o Options) addresses(tb testing.TB) (uri string, brokers []string) {
	tb.Helper()
	if o.Stack != nil && len(o.Stack.Mongods()) > 0 {
		uri = o.Stack.MongoURI()
	} else {
		uri = stacktest.MongoURI(tb)
	}
	if o.Stack != nil && len(o.Stack.Kafkas()) > 0 {
		return uri, o.Stack.Brokers()
	}
	return uri, stacktest.Brokers(tb)
}

// Scene is one watcher with its own databases and topics.
type Scene struct {
	Client  *mongo.Client
	DB      *mongo.Database // holds the outbox
	State   state.Database  // the state database
	Prefix  string          // prefix of the topics: <Prefix>.<aggregate type>
	Brokers []string
	Ledger  *Ledger
	// Route returns the expected topics of an aggregate type. The default is TopicOf.
	Route func(aggregateType string) []string

	tb      testing.TB
	env     []string
	config  map[string]any
	started int
	running []*Process

	prepared bool // the collections of the consumers exist
	members  int  // consumers that were started
}

// New creates a scene. No relay runs yet.
func New(tb testing.TB, given Options) *Scene {
	tb.Helper()
	uri, brokers := given.addresses(tb)
	// Commands read what a majority has. A test that sees a document earlier would expect too much of them.
	client, err := mongo.Connect(options.Client().ApplyURI(uri).SetHeartbeatInterval(500 * time.Millisecond).
		SetServerSelectionTimeout(40 * time.Second).SetReadConcern(readconcern.Majority()))
	if err != nil {
		tb.Fatal(err)
	}

	scene := &Scene{Client: client, Brokers: brokers, tb: tb, env: given.Env, Ledger: newLedger()}
	tb.Cleanup(func() {
		if tb.Failed() {
			scene.logWaiting()
		}
		scene.dropDatabases()
	})
	name := stacktest.Name(tb)
	scene.Route = func(aggregateType string) []string { return []string{scene.TopicOf(aggregateType)} }
	scene.DB, scene.State, scene.Prefix = client.Database(name), state.Of(client.Database(name+"_state")), name
	if given.MongoURI != "" {
		uri = given.MongoURI
	}

	relayBrokers := brokers
	if given.Brokers != nil {
		relayBrokers = given.Brokers
	}

	scene.config = map[string]any{
		"watcher": "w",
		"mongodb": map[string]any{"uri": uri},
		"state":   map[string]any{"database": scene.State.Name()},
		"watch":   []string{name + ".outbox"},
		"kafka":   map[string]any{"brokers": relayBrokers},
		"topics":  map[string]any{"template": name + ".{aggregatetype}"},
		"lease":   map[string]any{"ttl": "2s", "renew": "400ms"},
		"log":     map[string]any{"level": "debug", "format": "text"},
	}

	for _, key := range slices.Sorted(maps.Keys(given.Set)) {
		scene.SetConfig(key, given.Set[key])
	}

	types := given.Types
	if types == nil {
		types = []string{"order"}
	}

	for _, t := range types {
		if given.Assigned != nil {
			stacktest.CreateAssignedTopic(tb, brokers, scene.TopicOf(t), given.Assigned, given.Topic...)
			continue
		}
		stacktest.CreateTopicOn(tb, brokers, scene.TopicOf(t), cmp.Or(given.Partitions, 6), max(given.Replicas, 1), given.Topic...)
	}
	return scene
}

// logWaiting logs how many envelopes wait for each reason.
func (s *Scene) logWaiting() {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()

	byReason := bson.D{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$reason"}, {Key: "count", Value: bson.D{{Key: "$sum", Value: 1}}}}}}
	cur, err := s.State.Collection("waiting").Aggregate(ctx, mongo.Pipeline{byReason})
	var states []bson.M
	if err == nil {
		err = cur.All(ctx, &states)
	}
	s.tb.Logf("waiting envelopes by reason: %v (error: %v)", states, err)
}

// SetConfig sets a configuration key for the processes that start from now on.
func (s *Scene) SetConfig(path string, value any) {
	fields := s.config
	for {
		head, rest, more := strings.Cut(path, ".")
		if !more {
			fields[head] = value
			return
		}

		next, ok := fields[head].(map[string]any)
		if !ok {
			next = map[string]any{}
			fields[head] = next
		}
		fields, path = next, rest
	}
}

// TopicOf returns the topic of an aggregate type.
func (s *Scene) TopicOf(aggregateType string) string { return s.Prefix + "." + aggregateType }

// WriteConfig writes the configuration file of a node and returns its path.
func (s *Scene) WriteConfig(node, listen string) string {
	s.tb.Helper()
	s.SetConfig("node", node)
	s.SetConfig("http.listen", listen)
	data, err := yaml.Marshal(s.config)
	if err != nil {
		s.tb.Fatal(err)
	}
	path := filepath.Join(s.tb.TempDir(), node+".yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		s.tb.Fatal(err)
	}
	return path
}

// StartRelay starts a relay with a unique node name and returns at once.
func (s *Scene) StartRelay() *Process {
	s.tb.Helper()
	return s.launchRelay(Binary(s.tb))
}

// StartStandby starts a relay beside owner, and waits until it stands by. On a busy machine, an owner with a short lease may lose it to the
// new relay: then it is killed, the new relay is the owner, and another one starts. StartStandby returns the owner.
func (s *Scene) StartStandby(owner *Process) (current, standby *Process) {
	s.tb.Helper()
	for {
		started := s.StartRelay()
		stacktest.EventuallyIn(s.tb, Patience, "a relay that stands by or takes over", func() bool {
			return started.HasLogged("standing by") || started.HasLogged("took over")
		}, func() any { return started.ReadLog() })
		if !started.HasLogged("took over") {
			return owner, started
		}
		owner.Kill()
		owner = started
	}
}

// StartCrashing starts a relay that kills itself at a crash point: "name", or "name:n" for its n-th
// pass. It creates the indexes before the first relay. If an owner died in a transaction while it
// created them, all appends would wait until its successor ended the transaction.
func (s *Scene) StartCrashing(crashPoint string) *Process {
	s.tb.Helper()
	if s.started == 0 {
		if code, out, errOut := s.RunCommand("setup", "--yes"); code != 0 {
			s.tb.Logf("setup: %d\n%s%s", code, out, errOut)
		}
	}
	return s.launchRelay(Binary(s.tb), "OUTRELAY_CRASH_AT="+crashPoint)
}

func (s *Scene) launchRelay(binary string, env ...string) *Process {
	s.tb.Helper()
	s.started++

	// The name is unique on shared servers, because a fail point selects the connections of a process by it.
	node := fmt.Sprintf("n%d-%s", s.started, s.Prefix[len(s.Prefix)-8:])
	listen := freePort(s.tb)
	file := s.WriteConfig(node, listen)
	process := Launch(s.tb, node, binary, append(slices.Clone(s.env), env...), "run", "--config", file)
	process.HTTP, process.ConfigFile = "http://"+listen, file
	s.running = append(s.running, process)
	return process
}

// Processes returns all relays that were started, including those that have ended.
func (s *Scene) Processes() []*Process { return s.running }

// RunCommand runs a command with the scene's configuration and returns its exit code, standard output
// and standard error.
func (s *Scene) RunCommand(args ...string) (code int, stdout, stderr string) {
	s.tb.Helper()
	// An argument may follow --, so the flag comes first.
	return RunCommand(s.tb, s.env, append([]string{"--config", s.WriteConfig("operator", "off")}, args...)...)
}

// RunCommand runs a command line.
func RunCommand(tb testing.TB, env []string, args ...string) (code int, stdout, stderr string) {
	tb.Helper()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(tb.Context(), Binary(tb), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		tb.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

// Get sends a request to the HTTP server of the process.
func (p *Process) Get(path string) (code int, body string) {
	p.tb.Helper()
	client := &http.Client{Timeout: Patience}
	defer client.CloseIdleConnections()
	res, err := client.Get(p.HTTP + path)
	if err != nil {
		p.tb.Fatal(err)
	}
	defer res.Body.Close()
	var buffer bytes.Buffer
	_, _ = buffer.ReadFrom(res.Body)
	return res.StatusCode, buffer.String()
}

// Status is the scene's watcher in `outrelay status --json`.
type Status struct {
	Owner, Node, State, Reason string
	Epoch                      int64
	Unresolved                 int
	Unwritable                 []struct {
		Topic, Reason string
		Count         int
		Parked        bool
	}
}

// ReadStatus runs `outrelay status --json`. The scene must have one slot.
func (s *Scene) ReadStatus() Status {
	s.tb.Helper()
	var all struct{ Slots []Status }
	s.readStatusJSON(&all)
	if len(all.Slots) != 1 {
		s.tb.Fatalf("status --json: %d slots, want 1", len(all.Slots))
	}
	return all.Slots[0]
}

// unavailable is the exit code of a command that may succeed later.
const unavailable = 75

// readStatusJSON decodes the output of `outrelay status --json`. It runs the command again if the
// servers do not respond in time.
func (s *Scene) readStatusJSON(into any) {
	s.tb.Helper()
	deadline := time.Now().Add(Patience)
	for {
		code, out, errOut := s.RunCommand("status", "--json")
		if code == unavailable && time.Now().Before(deadline) {
			s.tb.Logf("status: exit code %d, trying again\n%s", code, errOut)
			continue
		}
		if code != 0 {
			s.tb.Fatalf("status: exit code %d\n%s", code, errOut)
		}

		if err := json.Unmarshal([]byte(out), into); err != nil {
			s.tb.Fatalf("status --json: %v\n%s", err, out)
		}
		return
	}
}

// WaitForStatus waits until ok accepts the output of `outrelay status`. It polls rarely, because each
// poll starts a process.
func (s *Scene) WaitForStatus(what string, ok func(Status) bool) {
	s.tb.Helper()
	stacktest.Eventually(s.tb, what, func() bool { return ok(s.ReadStatus()) })
}

// WatcherID is the id of the watcher document.
const WatcherID = "w/0of1"

// WatcherDocument reads the watcher document.
func (s *Scene) WatcherDocument() bson.Raw {
	s.tb.Helper()
	raw, err := s.State.Collection("watchers").FindOne(s.tb.Context(), bson.D{{Key: "_id", Value: WatcherID}}).Raw()
	if err != nil {
		s.tb.Fatal(err)
	}
	return raw
}

// CurrentEpoch reads the epoch of the last acquisition.
func (s *Scene) CurrentEpoch() int64 {
	s.tb.Helper()
	return s.WatcherDocument().Lookup("epoch").AsInt64()
}

func (s *Scene) dropDatabases() {
	ctx, cancel := cleanupContext()
	defer cancel()
	names, _ := s.Client.ListDatabaseNames(ctx, bson.D{{Key: "name", Value: bson.D{{Key: "$regex", Value: "^" + s.Prefix}}}})
	for _, n := range names {
		_ = s.Client.Database(n).Drop(ctx)
	}
	_ = s.Client.Disconnect(ctx)
}

func freePort(tb testing.TB) string {
	tb.Helper()
	addr, err := devstack.FreeAddress()
	if err != nil {
		tb.Fatal(err)
	}
	return addr
}
