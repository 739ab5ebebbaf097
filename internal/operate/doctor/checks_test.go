//go:build unix

package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// The Kafka users, each with the right on the topic that it lacks, and the words of the report about it. The user nothing lacks all
// rights on the topic, and noid lacks the right on the transactional id.
var kafkaUsers = map[string]struct {
	lacks kafka.ACLOperationType
	word  string
}{
	"full":    {},
	"nowrite": {kafka.ACLOperationTypeWrite, "missing: WRITE on "},
	"noread":  {kafka.ACLOperationTypeRead, "missing: READ on "},
	"noconf":  {kafka.ACLOperationTypeDescribeConfigs, "missing: DESCRIBE_CONFIGS on "},
	"nothing": {kafka.ACLOperationTypeAny, "missing: WRITE, READ, DESCRIBE, DESCRIBE_CONFIGS on "},
	"noid":    {},
}

const aclTopic = "acl.orders"

// TestChecks takes one right away at a time, from servers that enforce them, and has a standalone server recognised.
func TestChecks(t *testing.T) {
	t.Parallel()
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, bytes.Repeat([]byte("abcd"), 16), 0o600); err != nil {
		t.Fatal(err)
	}

	users := []devstack.User{}
	for name := range kafkaUsers {
		users = append(users, devstack.User{Name: name, Password: planted})
	}

	s := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true,
		Mongo: devstack.MongoOptions{Args: []string{"--keyFile", key}},
		Kafka: devstack.KafkaOptions{Users: users, ACLs: true},
	})

	addr := s.Mongods()[0].Addr()
	sasl, err := s.BrokersOn(devstack.SASL)
	if err != nil {
		t.Fatal(err)
	}

	root := secureServer(t, addr)
	stacktest.CreateTopicOn(t, s.Brokers(), aclTopic, 1, 1)
	grantACLs(t, s)
	base := func(t *testing.T, mongoUser, kafkaUser string) config.Config {
		return loadConfig(t, fmt.Sprintf("mongodb://%s:%s@%s/shop?authSource=admin&replicaSet=rs0", mongoUser, planted, addr), sasl,
			"topics.template={aggregatetype}", "watcher=w-"+kafkaUser,
			"kafka.sasl.mechanism=scram-sha-256", "kafka.sasl.username="+kafkaUser, "kafka.sasl.password="+planted)
	}

	t.Run("privileges", func(t *testing.T) { privilegesOneByOne(t, root, base(t, "relay", "full")) })
	t.Run("roles", func(t *testing.T) { rolesOneByOne(t, root, base(t, "printed", "full")) })
	t.Run("logins", func(t *testing.T) { testLogins(t, addr, sasl) })
	t.Run("scopes", func(t *testing.T) { testScopes(t, root, base(t, "relay", "full")) })
	t.Run("parameters", func(t *testing.T) { testParameters(t, root, addr, sasl) })
	t.Run("unwatched", func(t *testing.T) { testUnwatched(t, root, base(t, "root", "full"), base(t, "relay", "full")) })
	t.Run("writers", func(t *testing.T) { testWriters(t, root, base(t, "relay", "full"), addr) })
	t.Run("acls", func(t *testing.T) { testACLs(t, base) })
	t.Run("groups", func(t *testing.T) { aGroupThatTheLoginMayNotSee(t, base(t, "relay", "full")) })
	t.Run("hanging", func(t *testing.T) { testHangingServers(t, s, base(t, "relay", "full")) })
	t.Run("standalone", func(t *testing.T) { aStandalone(t, s) })
}

// secureServer creates the first administrator of a set with access control.
func secureServer(t *testing.T, addr string) *mongo.Client {
	t.Helper()
	first := connectTo(t, "mongodb://"+addr+"/?directConnection=true")
	runCommand(t, first, bson.D{{Key: "createUser", Value: "root"}, {Key: "pwd", Value: planted}, {Key: "roles", Value: bson.A{"root"}}})
	c := connectTo(t, "mongodb://root:"+planted+"@"+addr+"/?replicaSet=rs0")
	appendTo(t, c.Database("shop"), aclTopic)
	if err := outboxes.EnsureIndexes(t.Context(), c.Database("shop").Collection("outbox")); err != nil {
		t.Fatal(err)
	}
	return c
}

func connectTo(t *testing.T, uri string) *mongo.Client {
	t.Helper()
	c, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Disconnect(context.WithoutCancel(t.Context())) })
	return c
}

func runCommand(t *testing.T, c *mongo.Client, cmd bson.D) {
	t.Helper()
	if err := c.Database("admin").RunCommand(t.Context(), cmd).Err(); err != nil {
		t.Fatalf("%s: %v", cmd[0].Key, err)
	}
}

// listRights returns the rights of the role in the documentation, by resource.
func listRights() map[Resource][]string {
	write := []string{"find", "insert", "update", "remove"}
	return map[Resource][]string{
		{DB: "shop", Collection: "outbox"}:     append(slices.Clone(write), "changeStream", "listIndexes"),
		{DB: "shop", Collection: "inbox_dead"}: {"find"},
		{DB: "shop"}:                           {"listCollections"},
		{DB: "outrelay"}:                       append(slices.Clone(write), "createCollection", "createIndex", "listIndexes"),
		{Cluster: true}:                        {"serverStatus", "replSetGetConfig", "getParameter"},
	}
}

func newRole(verb string, rights map[Resource][]string) bson.D {
	list := bson.A{}
	for r, actions := range rights {
		if len(actions) == 0 {
			continue
		}
		on := bson.D{{Key: "db", Value: r.DB}, {Key: "collection", Value: r.Collection}}
		if r.Cluster {
			on = bson.D{{Key: "cluster", Value: true}}
		}
		list = append(list, bson.D{{Key: "resource", Value: on}, {Key: "actions", Value: actions}})
	}

	d := bson.D{{Key: verb, Value: "rights"}, {Key: "privileges", Value: list}}
	if verb == "createRole" {
		d = append(d, bson.E{Key: "roles", Value: bson.A{}})
	}

	return d
}

// privilegesOneByOne: the user's role inherits another, which loses one action at a time.
func privilegesOneByOne(t *testing.T, root *mongo.Client, cfg config.Config) {
	runCommand(t, root, newRole("createRole", listRights()))
	runCommand(t, root, bson.D{{Key: "createRole", Value: "relay"}, {Key: "privileges", Value: bson.A{}}, {Key: "roles", Value: bson.A{"rights"}}})
	runCommand(t, root, bson.D{{Key: "createUser", Value: "relay"}, {Key: "pwd", Value: planted}, {Key: "roles", Value: bson.A{"relay"}}})
	whole := examine(t, cfg)
	for _, c := range whole.Checks {
		if strings.HasPrefix(c.ID, "mongodb.privileges") && c.Status != OK || c.Status == Fail {
			t.Fatalf("with all rights: %+v", c)
		}
	}
	expectCheck(t, whole, "mongodb.transactions", OK, "is 60")
	expectCheck(t, whole, "outbox.indexes", OK)

	const stream, outbox, dead, state, cluster = "mongodb.privileges.stream", "mongodb.privileges.outbox", "mongodb.privileges.dead", "mongodb.privileges.state", "mongodb.privileges.cluster"
	for r, actions := range map[Resource]map[string]map[string]Status{
		{DB: "shop", Collection: "outbox"}: {
			// Without these rights no topic is found.
			"find": {
				stream: Fail, outbox: Fail, "outbox.fields": Warn, "topics": Warn,
				"topics.exist": Warn, "topics.acl": Warn, "topics.unclean_election": Warn, "topics.max_message_bytes": Warn, "topics.cleanup_policy": Warn,
			},
			"changeStream": {stream: Fail},
			"insert":       {outbox: Fail}, "update": {outbox: Fail}, "remove": {outbox: Fail},
			"listIndexes": {"outbox.indexes": Warn},
		},
		{DB: "shop", Collection: "inbox_dead"}: {"find": {dead: Warn}},
		{DB: "shop"}:                           {"listCollections": {outbox: Warn}},
		{DB: "outrelay"}: {
			"find":   {state: Fail, "state": Warn, "outbox.claims": Warn, "outbox.unwatched": Warn, "watcher": Warn},
			"insert": {state: Fail, "state": Warn}, "update": {state: Fail, "state": Warn}, "remove": {state: Fail, "state": Warn},
		},
		{Cluster: true}: {
			"serverStatus": {cluster: Warn, "mongodb.oplog": Warn}, "replSetGetConfig": {cluster: Warn},
			"getParameter": {"mongodb.transactions": Warn},
		},
	} {
		for action, want := range actions {
			fewer := listRights()
			fewer[r] = slices.DeleteFunc(slices.Clone(fewer[r]), func(a string) bool { return a == action })
			runCommand(t, root, newRole("updateRole", fewer))
			got := map[string]Status{}
			report := examine(t, cfg)
			for i, c := range report.Checks {
				if c.Status == whole.Checks[i].Status {
					continue
				}
				got[c.ID] = c.Status
				if strings.HasPrefix(c.ID, "mongodb.privileges.") && (!strings.Contains(c.Detail, action+" on ") || !strings.Contains(c.Fix, `grantPrivilegesToRole("relay"`) || !strings.Contains(c.Fix, `"`+action+`"`)) {
					t.Errorf("without %s on %s: %s: %s; fix %s", action, r, c.ID, c.Detail, c.Fix)
				}
			}
			if !maps.Equal(got, want) {
				t.Errorf("without %s on %s: changed %v, want %v", action, r, got, want)
			}
		}
	}
	runCommand(t, root, newRole("updateRole", listRights()))
}

// testScopes checks that a stream over a database or the cluster needs its privilege there.
func testScopes(t *testing.T, root *mongo.Client, cfg config.Config) {
	const stream = "mongodb.privileges.stream"
	both := func(of Resource) map[Resource][]string {
		r := listRights()
		r[of] = append(slices.Clone(r[of]), "find", "changeStream")
		return r
	}

	cfg.Watch = []string{"shop.outbox", "shop.more"}
	expectCheck(t, examine(t, cfg), stream, Fail, "find, changeStream on database shop")
	runCommand(t, root, newRole("updateRole", both(Resource{DB: "shop"})))
	r := examine(t, cfg)
	expectCheck(t, r, stream, OK)
	expectCheck(t, r, "mongodb.privileges.outbox", Fail, "insert, update, remove on shop.more")
	single := both(Resource{DB: "shop"})
	delete(single, Resource{DB: "outrelay"})
	for _, coll := range state.NamesWith("outrelay_") {
		single[Resource{DB: "outrelay", Collection: coll}] = []string{"find", "insert", "update", "remove"}
	}

	single[Resource{DB: "outrelay", Collection: "outrelay_watchers"}] = []string{"find", "insert", "remove"}
	runCommand(t, root, newRole("updateRole", single))
	r = examine(t, cfg)
	expectCheck(t, r, "mongodb.privileges.state", Fail, "missing: update on outrelay.outrelay_watchers", `["update"]`)
	cfg.Watch = []string{"*.outbox"}
	expectCheck(t, examine(t, cfg), stream, Fail, "on all databases", `{db: "", collection: ""}`)
	runCommand(t, root, newRole("updateRole", both(Resource{})))
	expectCheck(t, examine(t, cfg), stream, OK)
	runCommand(t, root, newRole("updateRole", listRights()))
}

func testLogins(t *testing.T, addr string, brokers []string) {
	r := examine(t, loadConfig(t, "mongodb://relay:not-"+planted+"@"+addr+"/shop?authSource=admin&replicaSet=rs0", brokers,
		"kafka.sasl.mechanism=scram-sha-256", "kafka.sasl.username=full", "kafka.sasl.password=not-"+planted))
	expectCheck(t, r, "mongodb", Fail, "user or the password", "authSource")
	expectCheck(t, r, "kafka", Fail, "user or password is wrong", "kafka.sasl.password")
	r = examine(t, loadConfig(t, "mongodb://"+addr+"/shop?replicaSet=rs0", brokers))
	expectCheck(t, r, "mongodb", OK)
	expectCheck(t, r, "mongodb.access", Fail, "names no user")
	expectCheck(t, r, "watcher", Warn, "not checked because of mongodb.access")
	expectCheck(t, r, "kafka", Fail, "SASL")
}

// testParameters tests the settings of the server that a root may read and change.
func testParameters(t *testing.T, root *mongo.Client, addr string, brokers []string) {
	set := func(seconds int) {
		runCommand(t, root, bson.D{{Key: "setParameter", Value: 1}, {Key: "transactionLifetimeLimitSeconds", Value: seconds}})
	}

	cfg := loadConfig(t, "mongodb://root:"+planted+"@"+addr+"/shop?authSource=admin&w=1&replicaSet=rs0", brokers)
	set(151)
	r := examine(t, cfg)
	expectCheck(t, r, "mongodb.transactions", Fail, "is 151", "transactionLifetimeLimitSeconds: 150")
	expectCheck(t, r, "mongodb.write_concern", Warn, "mongodb.uri sets w:1", "100 ms", "w:majority")
	set(150)
	expectCheck(t, examine(t, cfg), "mongodb.transactions", OK)
	set(60)
	runCommand(t, root, bson.D{{Key: "setDefaultRWConcern", Value: 1}, {Key: "defaultWriteConcern", Value: bson.D{{Key: "w", Value: 1}}}, {Key: "writeConcern", Value: bson.D{{Key: "w", Value: "majority"}}}})
	cfg.MongoDB.URI = config.NewURI("mongodb://root:" + planted + "@" + addr + "/shop?authSource=admin&replicaSet=rs0")
	expectCheck(t, examine(t, cfg), "mongodb.write_concern", Warn, "the cluster's default is w:1")
}

// testWriters checks that an administrator gets the names of other users who may write where the relay reads, and that the relay's user,
// who may not list them, gets the name of the missing right.
func testWriters(t *testing.T, root *mongo.Client, cfg config.Config, addr string) {
	insert := bson.D{{Key: "resource", Value: bson.D{{Key: "db", Value: "shop"}, {Key: "collection", Value: "outbox"}}}, {Key: "actions", Value: bson.A{"insert"}}}
	runCommand(t, root, bson.D{{Key: "createRole", Value: "append"}, {Key: "privileges", Value: bson.A{insert}}, {Key: "roles", Value: bson.A{}}})
	create := func(name string, roles ...any) {
		runCommand(t, root, bson.D{{Key: "createUser", Value: name}, {Key: "pwd", Value: planted}, {Key: "roles", Value: bson.A(roles)}})
	}
	on := func(role, db string) bson.D { return bson.D{{Key: "role", Value: role}, {Key: "db", Value: db}} }
	create("orders", on("append", "admin"))
	create("reader", on("read", "shop"), on("read", "outrelay"))
	create("dba", on("readWriteAnyDatabase", "admin"))

	expectCheck(t, examine(t, cfg), "mongodb.writers", OK, "may not list other users", "viewUser")
	cfg.MongoDB.URI = config.NewURI("mongodb://root:" + planted + "@" + addr + "/shop?authSource=admin&replicaSet=rs0")
	runCommand(t, root, bson.D{{Key: "dropUser", Value: "relay"}})
	// The documentation has the roles of another relay.
	runCommand(t, root, bson.D{{Key: "dropUser", Value: "printed"}})
	expectCheck(t, examine(t, cfg), "mongodb.writers", OK, "to outrelay: none", "to outboxes: orders@admin;", "to all databases: dba@admin")

	create("billing", on("readWrite", "outrelay"))
	create("relay", on("relay", "admin"))
	expectCheck(t, examine(t, cfg), "mongodb.writers", Warn, "to outrelay: billing@admin, relay@admin;", "revoke")
}

// testHangingServers checks that the doctor reports servers that accept connections and do not respond, within the limit.
func testHangingServers(t *testing.T, s *devstack.Stack, cfg config.Config) {
	for _, m := range slices.Concat(s.Mongods(), s.Kafkas()) {
		if err := m.Pause(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := m.Resume(); err != nil {
				t.Error(err)
			}
		}()
	}

	began := time.Now()
	r := examineWithin(t, cfg, Limit)
	// A call without a limit takes longer.
	if took := time.Since(began); took > 2*Limit {
		t.Errorf("it took %v", took)
	}

	expectCheck(t, r, "mongodb", Fail, "does not respond in time")
	if c := findCheck(t, r, "kafka"); c.Status == OK {
		t.Errorf("%+v", c)
	}
}

func grantACLs(t *testing.T, s *devstack.Stack) {
	t.Helper()
	var list []kafka.ACLEntry
	add := func(user string, on kafka.ResourceType, name string, pattern kafka.PatternType, op kafka.ACLOperationType) {
		list = append(list, kafka.ACLEntry{ResourceType: on, ResourceName: name, ResourcePatternType: pattern, Principal: "User:" + user, Host: "*", Operation: op, PermissionType: kafka.ACLPermissionTypeAllow})
	}

	for name, u := range kafkaUsers {
		for _, op := range []kafka.ACLOperationType{kafka.ACLOperationTypeWrite, kafka.ACLOperationTypeRead, kafka.ACLOperationTypeDescribeConfigs} {
			if u.lacks != op && u.lacks != kafka.ACLOperationTypeAny {
				add(name, kafka.ResourceTypeTopic, aclTopic, kafka.PatternTypeLiteral, op)
			}
		}
		add(name, kafka.ResourceTypeTopic, "missing.", kafka.PatternTypePrefixed, kafka.ACLOperationTypeDescribe)
		if name != "noid" {
			add(name, kafka.ResourceTypeTransactionalID, "outrelay.", kafka.PatternTypePrefixed, kafka.ACLOperationTypeWrite)
		}
	}

	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	cl := &kafka.Client{Addr: kafka.TCP(s.Brokers()...), Transport: tr, Timeout: 10 * time.Second}
	res, err := cl.CreateACLs(t.Context(), &kafka.CreateACLsRequest{ACLs: list})
	if err == nil {
		err = errors.Join(res.Errors...)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// aGroupThatTheLoginMayNotSee: the other groups are read, and the group has a sentence with the fix.
func aGroupThatTheLoginMayNotSee(t *testing.T, cfg config.Config) {
	found, err := connect.NewCluster(cfg, connect.KafkaHost{}).ReadGroups(t.Context(), connect.GroupQuery{Names: []string{"billing"}, All: true})
	if err != nil || len(found.Groups) != 1 {
		t.Fatalf("got %+v, %v", found, err)
	}
	if got := found.Groups[0].Problem; !strings.Contains(got, "may not see group billing") || !strings.Contains(got, "DESCRIBE") {
		t.Errorf("problem: got %q", got)
	}
}

func testACLs(t *testing.T, base func(t *testing.T, mongoUser, kafkaUser string) config.Config) {
	whole := examine(t, base(t, "relay", "full"))
	expectCheck(t, whole, "topics.acl", OK, "WRITE, READ, DESCRIBE, DESCRIBE_CONFIGS on "+aclTopic)
	expectCheck(t, whole, "kafka.transactional_id", OK)
	for name, u := range kafkaUsers {
		r := examine(t, base(t, "relay", name))
		changed := map[string]Status{}
		for i, c := range r.Checks {
			if c.Status != whole.Checks[i].Status {
				changed[c.ID] = c.Status
			}
		}
		want := map[string]Status{}
		switch {
		case name == "noid":
			want["kafka.transactional_id"] = Fail
			expectCheck(t, r, "kafka.transactional_id", Fail, "WRITE", "--transactional-id outrelay. --resource-pattern-type prefixed", "User:noid")
		case u.word != "":
			want["topics.acl"] = Fail
			expectCheck(t, r, "topics.acl", Fail, u.word+aclTopic, "kafka-acls.sh", "User:"+name)
		}
		// The user may not even describe the topic.
		if u.lacks == kafka.ACLOperationTypeAny {
			want["topics.exist"] = Warn
		}
		// Configurations that the user may not read are not checked. Some of these checks warned
		// before.
		for id, status := range changed {
			if c := findCheck(t, r, id); strings.HasPrefix(c.Detail, "not checked because the user may not read the topics' configurations") {
				want[id] = status
			}
		}
		for _, id := range []string{"topics.replication", "topics.min_insync_replicas"} {
			if u.lacks == kafka.ACLOperationTypeAny {
				// There is no topic to check.
				want[id] = OK
			}
		}
		if !maps.Equal(changed, want) {
			t.Errorf("%s: changed %v, want %v", name, changed, want)
		}
	}

	cfg := base(t, "relay", "full")
	cfg.Topics.Template = "missing.{aggregatetype}"
	cfg.Topics.Create = &config.Create{}
	expectCheck(t, examine(t, cfg), "topics.exist", Fail, "missing."+aclTopic, "may not create", "--operation CREATE")
}

// aStandalone starts the stack's own program without a replica set.
func aStandalone(t *testing.T, s *devstack.Stack) {
	port := 0
	// Choose a port below the ports of outgoing connections. A connection could occupy another one before mongod starts.
	for port == 0 {
		p := 15_000 + rand.IntN(17_000)
		if l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p)); err == nil {
			_, port = l.Close(), p
		}
	}

	cmd := exec.Command(findMongod(t, s), "--port", strconv.Itoa(port), "--bind_ip", "127.0.0.1", "--dbpath", t.TempDir(), "--wiredTigerCacheSizeGB", "0.25", "--nounixsocket", "--quiet")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	addr := "127.0.0.1:" + strconv.Itoa(port)
	waitPing(t, addr)
	r := examine(t, loadConfig(t, "mongodb://"+addr+"/shop", s.Brokers()))
	expectCheck(t, r, "mongodb", OK)
	expectCheck(t, r, "mongodb.replica_set", Fail, "standalone", "--replSet rs0", "rs.initiate()")
	if !r.Failed() {
		t.Error("not failed")
	}

	expectCheck(t, examine(t, loadConfig(t, "mongodb://"+addr+"/shop?replicaSet=rs0", s.Brokers())), "mongodb", Fail, "standalone", "rs.initiate()")
}

// findMongod returns the program that the stack runs.
func findMongod(t *testing.T, s *devstack.Stack) string {
	t.Helper()
	if path, err := exec.LookPath("mongod"); err == nil {
		return path
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", s.Mongods()[0].PID()))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func waitPing(t *testing.T, addr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := connectTo(t, "mongodb://"+addr+"/?directConnection=true&serverSelectionTimeoutMS=60000")
	if err := c.Ping(ctx, nil); err != nil {
		t.Fatal(err)
	}
}
