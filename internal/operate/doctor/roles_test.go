//go:build unix

package doctor

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// named matches the actions that a finding reports as missing, with their resources.
var named = regexp.MustCompile(`([a-z][A-Za-z, ]*) on (the cluster|all databases|database \w+|\w+\.\w+)`)

// listMissing returns the actions that a report names, as "action on resource".
func listMissing(r Report) (out []string) {
	for _, c := range r.Checks {
		text := c.Detail
		if _, rest, found := strings.Cut(text, "the action "); found {
			text = rest
		} else if _, rest, found := strings.Cut(text, "missing: "); found && strings.HasPrefix(c.ID, "mongodb.") {
			text = rest
		} else {
			continue
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			for action := range strings.SplitSeq(strings.TrimPrefix(m[1], ", "), ", ") {
				if one := action + " on " + m[2]; !slices.Contains(out, one) {
					out = append(out, one)
				}
			}
		}
	}

	return out
}

// rolesOneByOne: with the printed role nothing is missing. If one privilege is revoked, the doctor names exactly that
// privilege.
func rolesOneByOne(t *testing.T, root *mongo.Client, cfg config.Config) {
	roles, err := NewRoles(cfg, RolesFor{})
	if err != nil {
		t.Fatal(err)
	}

	relay := roles.MongoDB[0]
	whole := relay.Privileges
	put := func(verb string, privileges []Privilege) {
		t.Helper()
		runCommand(t, root, bson.D{{Key: verb, Value: relay.Name}, {Key: "privileges", Value: toDocuments(t, privileges)}, {Key: "roles", Value: bson.A{}}})
	}

	put("createRole", whole)
	runCommand(t, root, bson.D{{Key: "createUser", Value: "printed"}, {Key: "pwd", Value: planted}, {Key: "roles", Value: bson.A{relay.Name}}})
	full := examine(t, cfg)
	if m := listMissing(full); len(m) > 0 || full.Failed() {
		t.Fatalf("with the printed role: missing %v, %d failed", m, full.Count(Fail))
	}

	taken := 0
	for i, p := range whole {
		for j, action := range p.Actions {
			fewer := slices.Clone(whole)
			fewer[i].Actions = slices.Delete(slices.Clone(p.Actions), j, j+1)
			if len(fewer[i].Actions) == 0 {
				fewer = slices.Delete(fewer, i, i+1)
			}
			put("updateRole", fewer)
			r := examine(t, cfg)
			on := p.Resource
			got := listMissing(r)
			// The same action on another collection of the database is part of the same privilege.
			another := func(line string) bool {
				where, same := strings.CutPrefix(line, action+" on ")
				return !same || where != on.String() && (on.Collection != "" || !strings.HasPrefix(where, on.DB+"."))
			}
			if len(got) == 0 || slices.ContainsFunc(got, another) {
				t.Errorf("without %s on %s the doctor names %q", action, on, got)
			}
			if r.Failed() == (p.Optional != "") {
				t.Errorf("without %s on %s: failed %v, and it is optional: %q", action, on, r.Failed(), p.Optional)
			}
			taken++
		}
	}
	if taken < 15 {
		t.Errorf("%d actions were taken away; the role has more", taken)
	}

	put("updateRole", whole)
}

// toDocuments returns privileges in the form of createRole.
func toDocuments(t *testing.T, list []Privilege) bson.A {
	t.Helper()
	out := bson.A{}
	for _, p := range list {
		raw, err := json.Marshal(p.Resource)
		if err != nil {
			t.Fatal(err)
		}
		var on bson.D
		if err := bson.UnmarshalExtJSON(raw, false, &on); err != nil {
			t.Fatal(err)
		}
		out = append(out, bson.D{{Key: "resource", Value: on}, {Key: "actions", Value: p.Actions}})
	}

	return out
}

func TestRolesOfPatterns(t *testing.T) {
	t.Parallel()
	of := func(set ...string) string {
		t.Helper()
		roles, err := NewRoles(loadConfig(t, "mongodb://m/", []string{"k:1"}, set...), RolesFor{
			Sagas: []string{"orders_saga"}, Databases: []string{"bill"}, Group: "g", Principal: "User:relay", Consumer: "bill",
		})
		if err != nil {
			t.Fatal(err)
		}
		commands, err := roles.Commands([]string{"k:1"})
		if err != nil {
			t.Fatal(err)
		}
		return roles.Script() + commands
	}

	for _, c := range []struct {
		set  []string
		want []string
		not  []string
	}{
		{[]string{"watch=shop.outbox"}, []string{
			`{resource: {db: "shop", collection: "outbox"}, actions: ["find","changeStream","insert","update","remove"]}`,
			`{db: "bill", collection: "inbox_claims"}`, `{db: "bill", collection: "orders_saga"}`, `{db: "bill", collection: "saga_types"}`,
			"grant WRITE to no other principal\n", "--topic 'outbox.event.' --resource-pattern-type prefixed", "--transactional-id 'outrelay.' --resource-pattern-type prefixed", "--group 'g'", "--allow-principal 'User:relay'", "--allow-principal 'User:bill'",
		}, []string{`db: "",`, "listDatabases", "anyResource", "AnyDatabase", `"local"`, "CREATE", `"dropIndex"],`}},
		{[]string{"watch=shop.outbox,shop.more"}, []string{`{resource: {db: "shop", collection: ""}, actions: ["find","changeStream"]}`, `{resource: {db: "shop", collection: "more"}, actions: ["find","insert","update","remove"]}`}, nil},
		{[]string{"watch=tenant_*.outbox"}, []string{`{resource: {db: "", collection: ""}, actions: ["find","changeStream"]}`, `{resource: {db: "", collection: "outbox"}, actions: ["find","insert","update","remove"]}`, "listDatabases"}, nil},
		{[]string{"watch=shop.out*"}, []string{`{resource: {db: "shop", collection: ""}, actions: ["find","changeStream","insert","update","remove"]}`}, nil},
		{[]string{"watch=shop.outbox", "state.database=relays", "topics.allow=a,b.*", "topics.create.partitions=3"}, []string{`{db: "relays", collection: ""}`, "--topic 'a'\n", "--topic 'b.' --resource-pattern-type prefixed", "--operation CREATE"}, []string{"outbox.event."}},
		{[]string{"watch=shop.outbox", "topics.template={aggregatetype}"}, []string{"--topic '*'\n"}, nil},
	} {
		text := of(c.set...)
		for _, w := range c.want {
			if !strings.Contains(text, w) {
				t.Errorf("%v: no %s in\n%s", c.set, w, text)
			}
		}
		relay, _, _ := strings.Cut(text, "// outrelay setup")
		for _, w := range c.not {
			if strings.Contains(relay, w) {
				t.Errorf("%v: %s in\n%s", c.set, w, relay)
			}
		}
	}
}

// The relay counts, and operators act, in the databases of consumers.databases too.
func TestRolesCoverTheDatabasesOfConsumers(t *testing.T) {
	t.Parallel()
	cfg := loadConfig(t, "mongodb://m/", []string{"k:1"}, "watch=shop.outbox", "consumers.databases=shipping")
	roles, err := NewRoles(cfg, RolesFor{})
	if err != nil {
		t.Fatal(err)
	}

	for _, role := range roles.MongoDB {
		wants := map[string]string{"outrelayRelay": "inbox_dead", "outrelayOperator": "inbox_waiting", "outrelayReader": "inbox_waiting", "outrelayConsumer": "inbox"}
		coll, isWanted := wants[role.Name]
		has := slices.ContainsFunc(role.Privileges, func(p Privilege) bool { return p.Resource == Resource{DB: "shipping", Collection: coll} })
		if isWanted != has {
			t.Errorf("%s on shipping.%s: got %v, want %v", role.Name, coll, has, isWanted)
		}
	}
}

// Managed services have the same privileges in their own formats.
func TestRolesOfManagedServices(t *testing.T) {
	t.Parallel()
	cfg := loadConfig(t, "mongodb://m/", []string{"k:1"}, "watch=shop.outbox", "topics.template=orders.{aggregatetype}", "topics.create.partitions=3")
	roles, err := NewRoles(cfg, RolesFor{Group: "shipping", Principal: "User:sa-1", Consumer: "User:sa-2"})
	if err != nil {
		t.Fatal(err)
	}

	var first struct {
		RoleName string
		Actions  []struct {
			Action    string
			Resources []map[string]any
		}
	}
	lines := strings.Split(strings.TrimSpace(roles.AtlasRoles()), "\n")
	if err := json.Unmarshal([]byte(lines[0]), &first); err != nil || len(lines) != len(roles.MongoDB) || first.RoleName != "outrelayRelay" {
		t.Fatalf("%v in %q", err, lines)
	}
	var actions []string
	for _, a := range first.Actions {
		actions = append(actions, a.Action)
		if a.Action == "CHANGE_STREAM" && (len(a.Resources) == 0 || a.Resources[0]["db"] != "shop") {
			t.Errorf("the change stream is on %v", a.Resources)
		}
	}
	for _, want := range []string{"FIND", "INSERT", "CHANGE_STREAM", "LIST_COLLECTIONS"} {
		if !slices.Contains(actions, want) {
			t.Errorf("the role has %v, want %s too", actions, want)
		}
	}

	confluent, err := roles.ConfluentCommands()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"confluent kafka acl create --allow --service-account 'sa-1' --operations write,read,describe,describe-configs,create --topic 'orders.' --prefix\n",
		"--service-account 'sa-1' --operations write,describe --transactional-id 'outrelay.' --prefix\n",
		"--service-account 'sa-2' --operations read,describe --consumer-group 'shipping'\n",
	} {
		if !strings.Contains(confluent, want) {
			t.Errorf("the commands lack %q:\n%s", want, confluent)
		}
	}

	msk := roles.MSKPolicies()
	var policy iamPolicy
	relay, _, _ := strings.Cut(strings.TrimPrefix(msk, "# the relay; replace REGION, ACCOUNT and CLUSTER\n"), "# the consumer")
	if err := json.Unmarshal([]byte(relay), &policy); err != nil {
		t.Fatalf("%v in %s", err, relay)
	}
	for _, want := range []string{
		"kafka-cluster:WriteDataIdempotently", "kafka-cluster:CreateTopic", "kafka-cluster:AlterTransactionalId",
		"arn:aws:kafka:REGION:ACCOUNT:topic/CLUSTER/*/orders.*", "arn:aws:kafka:REGION:ACCOUNT:transactional-id/CLUSTER/*/outrelay.*",
	} {
		if !strings.Contains(relay, want) {
			t.Errorf("the policy of the relay lacks %q:\n%s", want, relay)
		}
	}
	if !strings.Contains(msk, "arn:aws:kafka:REGION:ACCOUNT:group/CLUSTER/*/shipping") || !strings.Contains(msk, "kafka-cluster:AlterGroup") {
		t.Errorf("the policy of the consumer:\n%s", msk)
	}
}

// opened are the collections that the code of consumers opens, by file.
var opened = map[string][]string{
	"pkg/consumer/deadletter/collection.go":      {"inbox_dead"},
	"pkg/consumer/topics/topics.go":              {"inbox_topics"},
	"pkg/saga/saga.go":                           {"payments"},
	"internal/service/inbox/mongostore/store.go": {"inbox", "inbox_offsets", "inbox_claims", "inbox_tenures"},
	"internal/service/lettercount/series.go":     {"inbox_dead"},
	"internal/service/rates/rates.go":            {"inbox_rates"},
	"internal/service/sagas/mongo.go":            {"payments", "saga_types"},
	"internal/service/setaside/desk.go":          {"inbox_waiting", "inbox_waiting_counts"},
	"internal/service/setaside/store.go":         {"inbox_waiting", "inbox_waiting_counts"},
}

// Each option of consumers works with the printed role. A file that opens a collection needs an entry in opened.
func TestTheRoleOfConsumersHasEachCollectionOfTheirCode(t *testing.T) {
	t.Parallel()
	roles, err := NewRoles(loadConfig(t, "mongodb://m/", []string{"k:1"}, "watch=shop.outbox"), RolesFor{Sagas: []string{"payments"}})
	if err != nil {
		t.Fatal(err)
	}
	consumer := roles.MongoDB[slices.IndexFunc(roles.MongoDB, func(role Role) bool { return role.Name == "outrelayConsumer" })]
	for file, collections := range opened {
		for _, coll := range collections {
			if !slices.ContainsFunc(consumer.Privileges, func(p Privilege) bool { return p.Resource == Resource{DB: "shop", Collection: coll} }) {
				t.Errorf("%s: the role has no right on %s", file, coll)
			}
		}
	}

	root := filepath.Join("..", "..", "..")
	for _, dir := range []string{"pkg/consumer", "pkg/inbox", "pkg/saga", "internal/service"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			file, _ := filepath.Rel(root, path)
			if strings.Contains(string(text), ".Collection(") && opened[filepath.ToSlash(file)] == nil {
				t.Errorf("%s opens a collection: add its entry", file)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}
