//go:build unix

package integration

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/doctor"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

const rolePassword = "a-password-of-the-test"

// A guarded scene has servers with access control, and a user with exactly the printed role for each role of
// `outrelay roles`.
type guarded struct {
	*kit.Scene
	t     *testing.T
	stack *devstack.Stack
	roles doctor.Roles
}

func newGuardedScene(t *testing.T, set map[string]any) *guarded {
	t.Helper()
	stack := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true,
		Mongo: devstack.MongoOptions{Root: devstack.User{Name: "root", Password: rolePassword}},
		Kafka: devstack.KafkaOptions{Users: []devstack.User{{Name: "relay", Password: rolePassword}}, ACLs: true},
	})

	brokers, err := stack.BrokersOn(devstack.SASL)
	if err != nil {
		t.Fatal(err)
	}

	g := &guarded{t: t, stack: stack}
	settings := map[string]any{
		"mongodb.indexes": false, "retention": "10m", "purge.interval": "500ms",
		"kafka.sasl": map[string]any{"mechanism": "scram-sha-512", "username": "relay", "password": rolePassword},
	}
	maps.Copy(settings, set)
	g.Scene = kit.New(t, kit.Options{Stack: stack, Brokers: brokers, MongoURI: g.uriOf("relay"), Set: settings})

	code, out, errOut := g.RunCommand("roles", "--json")
	if err := json.Unmarshal([]byte(out), &g.roles); err != nil || code != 0 {
		t.Fatalf("roles: exit code %d, %v\n%s", code, err, errOut)
	}

	admin := g.Client.Database("admin")
	for _, r := range g.roles.MongoDB {
		privileges := bson.A{}
		// A service also writes its own documents in the same transactions.
		if r.Name == "outrelayService" {
			privileges = append(privileges, bson.D{{Key: "resource", Value: bson.D{{Key: "db", Value: g.DB.Name()}, {Key: "collection", Value: kit.LoadColl}}}, {Key: "actions", Value: bson.A{"insert"}}})
		}

		for _, p := range r.Privileges {
			raw, err := json.Marshal(p.Resource)
			if err != nil {
				t.Fatal(err)
			}
			var on bson.D
			if err := bson.UnmarshalExtJSON(raw, false, &on); err != nil {
				t.Fatal(err)
			}
			privileges = append(privileges, bson.D{{Key: "resource", Value: on}, {Key: "actions", Value: p.Actions}})
		}

		user := strings.ToLower(strings.TrimPrefix(r.Name, "outrelay"))
		for _, cmd := range []bson.D{
			{{Key: "createRole", Value: r.Name}, {Key: "privileges", Value: privileges}, {Key: "roles", Value: bson.A{}}},
			{{Key: "createUser", Value: user}, {Key: "pwd", Value: rolePassword}, {Key: "roles", Value: bson.A{r.Name}}},
		} {
			if err := admin.RunCommand(t.Context(), cmd).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}

	g.createACLs()
	return g
}

func (g *guarded) uriOf(user string) string {
	return g.stack.MongoURIAs(devstack.User{Name: user, Password: rolePassword})
}

// createACLs creates the printed ACLs.
func (g *guarded) createACLs() {
	g.t.Helper()
	kinds := map[string]kafka.ResourceType{"topic": kafka.ResourceTypeTopic, "transactional-id": kafka.ResourceTypeTransactionalID}
	patterns := map[string]kafka.PatternType{"literal": kafka.PatternTypeLiteral, "prefixed": kafka.PatternTypePrefixed}
	operations := map[string]kafka.ACLOperationType{
		"WRITE": kafka.ACLOperationTypeWrite, "READ": kafka.ACLOperationTypeRead,
		"DESCRIBE": kafka.ACLOperationTypeDescribe, "DESCRIBE_CONFIGS": kafka.ACLOperationTypeDescribeConfigs,
	}

	var list []kafka.ACLEntry
	for _, a := range g.roles.Kafka {
		for _, op := range a.Operations {
			list = append(list, kafka.ACLEntry{
				ResourceType: kinds[a.Resource], ResourceName: a.Name, ResourcePatternType: patterns[a.Pattern],
				Principal: a.Principal, Host: "*", Operation: operations[op], PermissionType: kafka.ACLPermissionTypeAllow,
			})
		}
	}

	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	cl := &kafka.Client{Addr: kafka.TCP(g.stack.Brokers()...), Transport: tr, Timeout: kit.Patience}
	res, err := cl.CreateACLs(g.t.Context(), &kafka.CreateACLsRequest{ACLs: list})
	if err == nil {
		err = errors.Join(res.Errors...)
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// connectAs returns a client for the user.
func (g *guarded) connectAs(user string) *mongo.Client {
	g.t.Helper()
	c, err := mongo.Connect(options.Client().ApplyURI(g.uriOf(user)))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = c.Disconnect(context.WithoutCancel(g.t.Context())) })
	return c
}

// runAs runs a command as the user.
func (g *guarded) runAs(user string, args ...string) (code int, out, errOut string) {
	g.t.Helper()
	return g.RunCommand(append(args, "--set", "mongodb.uri="+g.uriOf(user))...)
}

// mustRunAs is command for a command that must succeed.
func (g *guarded) mustRunAs(user string, args ...string) (out string) {
	g.t.Helper()
	code, out, errOut := g.runAs(user, args...)
	if code != 0 {
		g.t.Fatalf("%s: %v: exit code %d\n%s%s", user, args, code, out, errOut)
	}
	return out
}

// Each role is sufficient for its purpose: an event is appended, waits, is delivered, becomes a dead letter, is
// requeued, purged and replayed, without a missing privilege.
func TestRolesAreEnough(t *testing.T) {
	t.Parallel()
	g := newGuardedScene(t, nil)
	topics := g.ReadTopics()
	root, rootDB := g.Client, g.DB
	service := g.connectAs("service")
	g.Client, g.DB = service, service.Database(rootDB.Name())
	// The service appends before anything else exists.
	g.StartLoad(kit.Load{Events: 20}).WaitDone()
	g.mustRunAs("setup", "setup")
	g.mustRunAs("setup", "setup", "--dry-run")

	relay := g.StartRelay()
	relay.WaitTookOver()
	g.StartLoad(kit.Load{Events: 30}).WaitDone()
	g.Client, g.DB = root, rootDB
	g.CheckDelivery(topics)

	// The event waits until its topic exists, and is then delivered.
	late := event.New(event.Aggregate{Type: "late", ID: "1"}, "Placed", event.Document(bson.D{{Key: "n", Value: 1}}))
	box, err := outbox.New(service.Database(rootDB.Name()))
	if err != nil {
		t.Fatal(err)
	}
	if err := box.Transaction(t.Context(), func(ctx context.Context) error { return box.Append(ctx, late) }); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the envelope without a topic waits", func() bool { return g.CountHeld() > 0 })
	g.CreateTopic("late", 1, 1)
	g.WaitNoneHeld()

	// The event becomes a dead letter, is shown and discarded.
	g.AppendMalformed("wrong")
	g.CheckDead()
	g.mustRunAs("reader", "dead", "list")
	g.mustRunAs("reader", "status", "--json")
	g.mustRunAs("operator", "dead", "discard", "--all", "--yes")

	// A delivered envelope is made old, and is purged.
	old := bson.D{{Key: "_id", Value: late.ID()}}
	aged := bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Add(-time.Hour).Unix()), I: 1}}}}}
	if res, err := g.Outbox().UpdateOne(t.Context(), old, aged); err != nil || res.MatchedCount != 1 {
		t.Fatal(res, err)
	}
	stacktest.Eventually(t, "the old envelope is purged", func() bool {
		g.mustRunAs("operator", "purge", "--older-than", "30m", "--yes")
		return g.CountOutbox(old) == 0
	})

	before := len(topics.AllRecords())
	g.mustRunAs("operator", "replay", "--from", "1h", "--aggregate-type", "order", "--yes")
	if again := len(topics.AllRecords()) - before; again < 50 {
		stacktest.Eventually(t, "all are sent again", func() bool { return len(topics.AllRecords())-before >= 50 })
	}
	g.mustRunAs("operator", "pause")
	g.mustRunAs("operator", "resume")

	checkScheduling(t, g.connectAs("scheduler").Database(rootDB.Name()), service.Database(rootDB.Name()))
	checkConsuming(t, g.connectAs("consumer").Database(rootDB.Name()))

	for _, rejected := range []string{"not authorized", "Unauthorized", "may not", "not allowed", "AUTHORIZATION"} {
		for line := range strings.SplitSeq(relay.ReadLog(), "\n") {
			if strings.Contains(line, rejected) {
				t.Errorf("a privilege of the relay is missing: %s", line)
			}
		}
	}
	if code, _, errOut := g.runAs("reader", "pause"); code == 0 || strings.Contains(errOut, rolePassword) {
		t.Errorf("pause as a reader: exit code %d, want an error without the password: %s", code, errOut)
	}
	if err := service.Database(rootDB.Name()).Collection("outbox").FindOne(t.Context(), bson.D{}).Err(); err == nil {
		t.Error("a service with the append role can read the outbox")
	}
	if code, out, errOut := g.RunCommand("doctor"); strings.Contains(out+errOut, "missing:") || strings.Contains(out+errOut, "grant ") || code != 0 {
		t.Errorf("doctor: exit code %d\n%s%s", code, out, errOut)
	}
}

// With retention 0 and no scheduled events, the relay only reads the outboxes: its user may find and watch them, and write
// the state. The state is in the database of the application.
func TestAUserWhoOnlyReadsTheOutboxesRunsTheRelay(t *testing.T) {
	t.Parallel()
	g := newGuardedScene(t, map[string]any{"retention": "0", "mongodb.indexes": true})
	for _, p := range g.roles.MongoDB[0].Privileges {
		if p.Resource.DB != g.DB.Name() || p.Resource.Collection != "outbox" {
			continue
		}
		for _, action := range p.Actions {
			if !slices.Contains([]string{"find", "changeStream"}, action) {
				t.Errorf("the role of the relay has %s on %s.%s", action, p.Resource.DB, p.Resource.Collection)
			}
		}
	}

	topics := g.ReadTopics()
	relay := g.StartRelay()
	relay.WaitTookOver()
	g.StartLoad(kit.Load{Events: 30}).WaitDone()
	g.CheckDelivery(topics)
	if specs, err := g.Outbox().Indexes().ListSpecifications(t.Context()); err != nil || len(specs) != 1 {
		t.Errorf("the outbox has %d indexes, %v", len(specs), err)
	}
	for line := range strings.SplitSeq(relay.ReadLog(), "\n") {
		if strings.Contains(line, "not authorized") || strings.Contains(line, "privilege") {
			t.Errorf("a privilege of the relay is missing: %s", line)
		}
	}
	if code, out, errOut := g.RunCommand("doctor", "--json"); code != 0 || strings.Contains(out, "missing:") {
		t.Errorf("doctor: exit code %d\n%s%s", code, out, errOut)
	}
}

// checkScheduling checks that a role can find and cancel the events that another role appended.
func checkScheduling(t *testing.T, scheduler, service *mongo.Database) {
	t.Helper()
	appending, err := outbox.New(service, outbox.WithoutTransaction())
	if err != nil {
		t.Fatal(err)
	}

	waiting, err := outbox.New(scheduler, outbox.WithoutTransaction())
	if err != nil {
		t.Fatal(err)
	}

	id, err := appending.Schedule(t.Context(), time.Now().Add(time.Hour), event.New(event.Aggregate{Type: "order", ID: "1"}, "Reminded", event.Payload{}))
	if err != nil {
		t.Fatal(err)
	}
	if err := waiting.Reschedule(t.Context(), id, time.Now().Add(2*time.Hour)); err != nil {
		t.Error(err)
	}
	if err := waiting.Cancel(t.Context(), id); err != nil {
		t.Error(err)
	}
}

// checkConsuming checks that the collections of a consumer can be created and written.
func checkConsuming(t *testing.T, db *mongo.Database) {
	t.Helper()
	box, err := inbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	if err := box.EnsureIndexes(t.Context()); err != nil {
		t.Error(err)
	}
	if err := box.Once(t.Context(), inbox.Key{Scope: "payments", ID: "1"}, func(context.Context) error { return nil }); err != nil {
		t.Error(err)
	}
	if err := box.Once(t.Context(), inbox.Key{Scope: "payments", ID: "1"}, func(context.Context) error { return nil }); !errors.Is(err, inbox.ErrDuplicate) {
		t.Error(err)
	}

	letters, err := deadletter.New(db, deadletter.WithExpiry(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if err := letters.EnsureIndexes(t.Context(), module.Key{}); err != nil {
		t.Error(err)
	}
}
