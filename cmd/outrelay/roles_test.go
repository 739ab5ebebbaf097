package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/sagas"
)

// createPrintedRoles creates the roles that `outrelay roles` prints for a configuration, and a user for each with the name of the role.
// It returns the URI of each user by the role without its prefix, such as Operator.
func (r *rightsStack) createPrintedRoles(env []string, args ...string) map[string]string {
	r.t.Helper()
	code, out, errOut := runCommand(r.t, env, append([]string{"roles", "--json"}, args...)...)
	if code != exitOK {
		r.t.Fatalf("roles: %d %s", code, errOut)
	}
	var printed struct {
		MongoDB []struct {
			Role       string
			Privileges []struct {
				Resource json.RawMessage
				Actions  []string
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &printed); err != nil {
		r.t.Fatal(err)
	}

	uris := map[string]string{}
	for _, role := range printed.MongoDB {
		list := bson.A{}
		for _, privilege := range role.Privileges {
			var resource bson.D
			if err := bson.UnmarshalExtJSON(privilege.Resource, false, &resource); err != nil {
				r.t.Fatal(err)
			}
			list = append(list, bson.D{{Key: "resource", Value: resource}, {Key: "actions", Value: privilege.Actions}})
		}
		r.runAdminCommand(bson.D{{Key: "createRole", Value: role.Role}, {Key: "privileges", Value: list}, {Key: "roles", Value: bson.A{}}})
		user := devstack.User{Name: role.Role, Password: "user-password"}
		r.runAdminCommand(bson.D{{Key: "createUser", Value: user.Name}, {Key: "pwd", Value: user.Password}, {Key: "roles", Value: bson.A{role.Role}}})
		uris[strings.TrimPrefix(role.Role, "outrelay")] = r.stack.MongoURIAs(user)
	}
	return uris
}

// Everything that people do with the data of services works with the printed role of operators. What only reads works with that of
// readers, and what changes something does not. The consumer runs with its own printed role.
func TestThePrintedRolesSufficeForTheDataOfServices(t *testing.T) {
	t.Parallel()
	rights := newRightsStack(t)
	g := newGraveyardIn(t, rights.root, rights.stack.MongoURI(), 0)
	g.env = append(g.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(stacktest.Brokers(t), ","))
	uris := rights.createPrintedRoles(g.env, "--saga", "payments")

	consumers, err := mongo.Connect(options.Client().ApplyURI(uris["Consumer"]))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = consumers.Disconnect(t.Context()) })
	shop := g.outbox.Database()
	c := newClinicIn(g, consumers.Database(shop.Name()))
	c.publish("OrderPlaced", "bad 1", "bad 2", "bad 3", "late 1", "late 2")
	c.untilLetters(3)

	// A claim of a process that was killed, an old mark, and a saga.
	if _, err := sagas.NewMongo(shop).Prepare(t.Context(), sagas.Type{Name: "payments", Owner: "shop.Payment", ID: sagas.String}); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-90 * 24 * time.Hour)
	c.insertDocument(shop.Collection("payments"), bson.D{{Key: "_id", Value: "p1"}, {Key: "version", Value: int64(1)}, {Key: "createdAt", Value: old}, {Key: "updatedAt", Value: old}, {Key: "state", Value: bson.D{}}})
	c.insertDocument(shop.Collection("inbox"), bson.D{{Key: "_id", Value: "m"}, {Key: "s", Value: "handled"}, {Key: "at", Value: old}})
	c.insertDocument(shop.Collection("inbox_claims"), bson.D{{Key: "_id", Value: "m"}, {Key: "until", Value: old}})
	payload := filepath.Join(t.TempDir(), "payload")
	if err := os.WriteFile(payload, []byte("fixed"), 0o600); err != nil {
		t.Fatal(err)
	}

	for _, command := range []struct {
		line    string
		changes bool
	}{
		{"status", false},
		{"problems list", false},
		{"waiting list --source handler", false},
		{"waiting summary --source handler", false},
		{"groups list", false},
		{"groups show " + c.group, false},
		{"lookup late+1", false},
		{"dead list", false},
		{"dead summary", false},
		{"dead show bad+1", false},
		{"inbox counts", false},
		{"inbox marks", false},
		{"saga types", false},
		{"saga list payments", false},
		{"saga show payments p1", false},
		{"waiting retry late+1 --yes", true},
		{"waiting discard late+2 --yes", true},
		{"dead edit bad+1 --version 0 --yes --payload " + payload, true},
		{"dead requeue bad+2 --yes", true},
		{"dead discard bad+3 --yes", true},
		{"inbox purge --older-than 720h --yes", true},
		{"inbox release --yes", true},
	} {
		args := strings.Fields(command.line)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "+", " ")
		}

		// The reader comes first, while there is something to change.
		for _, role := range []string{"Reader", "Operator"} {
			code, out, errOut := runCommand(t, append(c.env, "OUTRELAY_MONGODB_URI="+uris[role]), args...)
			if role == "Reader" && command.changes {
				if code == exitOK || !strings.Contains(errOut, "not authorized") && !strings.Contains(errOut, "not allowed") {
					t.Errorf("%s: %s: exit code %d, want a missing right: %s%s", role, command.line, code, out, errOut)
				}
				continue
			}
			if code != exitOK {
				t.Errorf("%s: %s: exit code %d: %s%s", role, command.line, code, out, errOut)
			}
		}
	}
}

// The ACLs of Kafka do not depend on watch, which may follow from an address in a secret that does not exist here.
func TestACLsNeedNoWatch(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := "mongodb: {uri: \"${file:/run/secrets/outrelay/outrelay/mongodb-uri}\"}\nkafka: {brokers: [kafka:9092]}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	for _, only := range []string{"kafka", "confluent", "msk"} {
		if code, out, errOut := runCommand(t, nil, "roles", "--config", file, "--only", only, "--principal", "User:relay"); code != exitOK || out == "" {
			t.Errorf("--only %s: exit code %d, %s", only, code, errOut)
		}
	}
	if code, _, errOut := runCommand(t, nil, "roles", "--config", file); code != exitConfig || !strings.Contains(errOut, "no collection to watch") {
		t.Errorf("with MongoDB: exit code %d, %s", code, errOut)
	}
}

// Without a name there is no ACL: the placeholder of a name would be a valid name, and the output goes into a shell.
func TestACLsNeedThePrincipal(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--only", "kafka"}, "pass --principal, such as User:relay or User:CN=relay, or set kafka.sasl.username"},
		{[]string{"--only", "confluent"}, "pass --principal,"},
		{[]string{"--only", "kafka", "--principal", "User:relay", "--group", "shipping"}, "pass --consumer-principal,"},
		{[]string{"--only", "kafka", "--principal", "User:relay"}, "set kafka.brokers, such as"},
	} {
		code, out, errOut := runCommand(t, nil, append([]string{"roles", "--watch", "shop.outbox"}, c.args...)...)
		if code != exitConfig || out != "" || !strings.Contains(errOut, c.want) {
			t.Errorf("%v: exit code %d, %q, %q", c.args, code, out, errOut)
		}
	}

	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	if err := os.WriteFile(file, []byte("watch: [shop.outbox]\nkafka: {brokers: [\"${BROKERS_OF_THE_POD}\"]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := runCommand(t, nil, "roles", "--config", file, "--only", "kafka", "--principal", "User:relay"); code != exitConfig || out != "" {
		t.Errorf("a reference without a value: exit code %d, %q, %q", code, out, errOut)
	}

	// Both halves: the roles of MongoDB are complete, and a comment replaces the ACLs.
	code, out, errOut := runCommand(t, nil, "roles", "--watch", "shop.outbox")
	_, kafka, _ := strings.Cut(out, "# ---- Kafka")
	if code != exitOK || !strings.Contains(out, `make("outrelayRelay"`) || !strings.Contains(kafka, "\n# no ACLs: ") || strings.Contains(out, "kafka-acls.sh") {
		t.Errorf("both halves: exit code %d, %s%s", code, out, errOut)
	}
}
