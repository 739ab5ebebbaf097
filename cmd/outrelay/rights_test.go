package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/pkg/relay"
)

// rightsStack is a server with access control, and its administrator.
type rightsStack struct {
	t     *testing.T
	stack *devstack.Stack
	root  *mongo.Client
}

func newRightsStack(t *testing.T) *rightsStack {
	t.Helper()
	root := devstack.User{Name: "root", Password: "root-password"}
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{Root: root}})
	client, err := mongo.Connect(options.Client().ApplyURI(stack.MongoURI()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(context.WithoutCancel(t.Context())) })
	return &rightsStack{t, stack, client}
}

func (r *rightsStack) runAdminCommand(cmd bson.D) {
	r.t.Helper()
	if err := r.root.Database("admin").RunCommand(r.t.Context(), cmd).Err(); err != nil {
		r.t.Fatalf("%s: %v", cmd[0].Key, err)
	}
}

// setPrivileges creates or updates a role. Each grant is a namespace, or a database with a dot at the end, and its actions.
func (r *rightsStack) setPrivileges(verb, role string, grants map[string]string) {
	r.t.Helper()
	list := bson.A{}
	for ns, actions := range grants {
		db, coll, _ := strings.Cut(ns, ".")
		on := bson.D{{Key: "db", Value: db}, {Key: "collection", Value: coll}}
		list = append(list, bson.D{{Key: "resource", Value: on}, {Key: "actions", Value: strings.Fields(actions)}})
	}
	r.runAdminCommand(bson.D{{Key: verb, Value: role}, {Key: "privileges", Value: list}, {Key: "roles", Value: bson.A{}}})
}

// createUser creates a user with one role, and returns the environment of a relay that logs in as this user.
func (r *rightsStack) createUser(t *testing.T, name string, role any) *deployment {
	t.Helper()
	user := devstack.User{Name: name, Password: "user-password"}
	r.runAdminCommand(bson.D{{Key: "createUser", Value: user.Name}, {Key: "pwd", Value: user.Password}, {Key: "roles", Value: bson.A{role}}})
	return r.newDeployment(t, name, r.stack.MongoURIAs(user))
}

func (r *rightsStack) newDeployment(t *testing.T, name, uri string) *deployment {
	t.Helper()
	if err := r.root.Database("shop-"+name).CreateCollection(t.Context(), "outbox"); err != nil {
		t.Fatal(err)
	}
	return &deployment{t: t, env: []string{
		"OUTRELAY_MONGODB_URI=" + uri, "OUTRELAY_WATCH=shop-" + name + ".outbox", "OUTRELAY_STATE_DATABASE=state-" + name,
		"OUTRELAY_KAFKA_BROKERS=" + strings.Join(stacktest.Brokers(t), ","), "OUTRELAY_HTTP_LISTEN=off", "OUTRELAY_LOG_FORMAT=text",
	}}
}

// outboxRights and stateRights are what `outrelay roles` prints as required.
const (
	outboxRights = "find changeStream insert update remove listIndexes"
	stateRights  = "find insert update remove createCollection createIndex listIndexes"
)

// A user who lacks a right without which nothing is delivered ends run at its start, with the user, the right, the object and the command.
func TestRunEndsWithoutARight(t *testing.T) {
	t.Parallel()
	rights := newRightsStack(t)
	for _, c := range []struct {
		name   string
		grants map[string]string
		// builtIn is a role in place of grants.
		builtIn any
		setUp   bool
		want    []string
	}{
		{
			name:   "none",
			grants: map[string]string{"shop-none.outbox": outboxRights},
			want: []string{
				"user none@admin lacks find, insert, update, remove on database state-none",
				`db.getSiblingDB("admin").grantPrivilegesToRole("none", [{resource: {db: "state-none", collection: ""}, actions: ["find","insert","update","remove"]}])`,
				"outrelay roles --only mongodb",
			},
		},
		{
			name:   "reads",
			grants: map[string]string{"shop-reads.outbox": outboxRights, "state-reads.": "find createCollection createIndex listIndexes"},
			want:   []string{"user reads@admin lacks insert, update, remove on database state-reads", `grantPrivilegesToRole("reads"`},
		},
		{
			name:    "builtin",
			builtIn: bson.D{{Key: "role", Value: "readWrite"}, {Key: "db", Value: "shop-builtin"}},
			want: []string{
				"user builtin@admin lacks find, insert, update, remove on database state-builtin",
				`outrelay roles --only mongodb | mongosh "$ADMIN_URI"`, `db.getSiblingDB("admin").grantRolesToUser("builtin", [{role: "outrelayRelay", db: "admin"}])`,
			},
		},
		{
			name:   "stream",
			grants: map[string]string{"shop-stream.outbox": "find insert update remove", "state-stream.": stateRights},
			want:   []string{"user stream@admin lacks changeStream on shop-stream.outbox;", `{db: "shop-stream", collection: "outbox"}, actions: ["changeStream"]`},
		},
		{
			name:   "one",
			grants: map[string]string{"shop-one.outbox": outboxRights},
			setUp:  true,
			want:   []string{"user one@admin lacks update on state-one.outrelay_watchers;", `{db: "state-one", collection: "outrelay_watchers"}, actions: ["update"]`},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			role := c.builtIn
			if c.grants != nil {
				if c.setUp {
					for _, coll := range state.NamesWith("outrelay_") {
						c.grants["state-one."+coll] = "find insert update remove"
					}
					c.grants["state-one.outrelay_watchers"] = "find insert remove"
				}
				rights.setPrivileges("createRole", c.name, c.grants)
				role = c.name
			}
			relay := rights.createUser(t, c.name, role)
			if c.setUp {
				admin := append(relay.env[1:len(relay.env):len(relay.env)], "OUTRELAY_MONGODB_URI="+rights.stack.MongoURI())
				if code, out, errOut := runCommand(t, admin, "setup", "--yes"); code != exitOK {
					t.Fatalf("setup: %d %s%s", code, out, errOut)
				}
			}

			_, log, end := relay.startCommand("run")
			text := log.waitForText(t, "outrelay: MongoDB cannot be used: ", 1)
			expectTexts(t, text, c.want...)
			if strings.Count(text, "\n") != 1 || strings.Contains(text, "user-password") {
				t.Errorf("more than one line, or a secret: %s", text)
			}
			if code := end(); code != exitConfig {
				t.Errorf("exit code %d, want %d", code, exitConfig)
			}
		})
	}

	t.Run("no-login", func(t *testing.T) {
		t.Parallel()
		uri := strings.Replace(rights.stack.MongoURI(), "root:root-password@", "", 1)
		if uri == rights.stack.MongoURI() {
			t.Fatalf("no login in %s", uri)
		}
		relay := rights.newDeployment(t, "no-login", uri)
		_, log, end := relay.startCommand("run")
		expectTexts(t, log.waitForText(t, "outrelay: MongoDB cannot be used: ", 1),
			"the server has access control, but mongodb.uri names no user; set the user and the password of the relay in mongodb.uri")
		if code := end(); code != exitConfig {
			t.Errorf("exit code %d, want %d", code, exitConfig)
		}
	})
}

// A relay in a service ends in the same way, also if its state database is complete.
func TestAnEmbeddedRelayEndsWithoutARight(t *testing.T) {
	t.Parallel()
	rights := newRightsStack(t)
	for name, want := range map[string]string{"embedded": "lacks update on state-embedded.outrelay_watchers;", "nostream": "lacks changeStream on shop-nostream.outbox;"} {
		ofOutbox := outboxRights
		if name == "nostream" {
			ofOutbox = "find insert update remove"
		}
		grants := map[string]string{"shop-" + name + ".outbox": ofOutbox}
		for _, coll := range state.NamesWith("outrelay_") {
			grants["state-"+name+"."+coll] = "find insert update remove"
		}
		if name == "embedded" {
			grants["state-embedded.outrelay_watchers"] = "find insert remove"
		}
		rights.setPrivileges("createRole", name, grants)
		deployed := rights.createUser(t, name, name)
		admin := append(deployed.env[1:len(deployed.env):len(deployed.env)], "OUTRELAY_MONGODB_URI="+rights.stack.MongoURI())
		if code, out, errOut := runCommand(t, admin, "setup", "--yes"); code != exitOK {
			t.Fatalf("setup: %d %s%s", code, out, errOut)
		}

		cfg := relay.Default()
		cfg.MongoDB.URI = relay.NewURI(envValue(deployed.env, "OUTRELAY_MONGODB_URI"))
		cfg.Kafka.Brokers, cfg.Watch = stacktest.Brokers(t), []string{"shop-" + name + ".outbox"}
		cfg.State.Database, cfg.HTTP.Listen = "state-"+name, "off"
		embedded, err := relay.New(cfg, relay.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		err = embedded.Run(ctx)
		stop()
		if err == nil || !strings.Contains(err.Error(), "user "+name+"@admin "+want) || !strings.Contains(err.Error(), "outrelay roles --only mongodb") {
			t.Errorf("%s: got %v, want %q", name, err, want)
		}
	}
}

// A right that is revoked while the relay runs is a problem, and no end: the relay continues once it is granted again.
func TestARevokedRightDoesNotEndRun(t *testing.T) {
	t.Parallel()
	rights := newRightsStack(t)
	whole := map[string]string{"shop-revoked.outbox": outboxRights, "state-revoked.": stateRights}
	rights.setPrivileges("createRole", "revoked", whole)
	relay := rights.createUser(t, "revoked", "revoked")
	relay.env = append(relay.env, "OUTRELAY_LEASE_TTL=1s", "OUTRELAY_LEASE_RENEW=200ms")
	_, log, end := relay.startCommand("run")
	log.waitForText(t, "took over", 1)

	rights.setPrivileges("updateRole", "revoked", map[string]string{"shop-revoked.outbox": outboxRights})
	log.waitForText(t, "cannot renew the lease", 1)
	log.waitForText(t, "work is suspended", 1)
	rights.setPrivileges("updateRole", "revoked", whole)
	log.waitForText(t, "lease renewed; work continues", 1)
	if code := end(); code != exitOK {
		t.Errorf("exit code %d, want 0", code)
	}
}

// An outage while the rights are read is no missing right: run starts, and takes over.
func TestRunStartsIfItsRightsCannotBeRead(t *testing.T) {
	t.Parallel()
	rights := newRightsStack(t)
	rights.setPrivileges("createRole", "outage", map[string]string{"shop-outage.outbox": outboxRights, "state-outage.": stateRights})
	relay := rights.createUser(t, "outage", "outage")
	rights.runAdminCommand(bson.D{
		{Key: "configureFailPoint", Value: "failCommand"},
		{Key: "mode", Value: bson.D{{Key: "times", Value: 1}}},
		{Key: "data", Value: bson.D{
			{Key: "failCommands", Value: bson.A{"connectionStatus"}}, {Key: "closeConnection", Value: true}, {Key: "appName", Value: "outrelay doctor"},
		}},
	})
	_, log, end := relay.startCommand("run")
	log.waitForText(t, "took over", 1)
	if code := end(); code != exitOK {
		t.Errorf("exit code %d, want 0", code)
	}

	// The outage has happened.
	var response struct{ Count int }
	cmd := bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: "off"}}
	if err := rights.root.Database("admin").RunCommand(t.Context(), cmd).Decode(&response); err != nil || response.Count != 1 {
		t.Errorf("%d outages, %v", response.Count, err)
	}
}
