package migrate

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// deployment is a state database and one with collections.
type deployment struct {
	state       state.Database
	shop        *mongo.Database
	collections []string
}

func newDeployment(t *testing.T, c *mongo.Client, collections ...string) *deployment {
	t.Helper()
	d := &deployment{state: state.Of(stacktest.Database(t, c)), shop: stacktest.Database(t, c), collections: collections}
	for _, name := range collections {
		if err := d.shop.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func (d *deployment) newMigrator(steps []Step) *Migrator {
	return &Migrator{State: d.state, Node: "n1", Version: "1.0", Steps: steps, Outboxes: func(context.Context) ([]outboxes.Outbox, error) {
		var out []outboxes.Outbox
		for _, name := range d.collections {
			out = append(out, outboxes.Outbox{DB: d.shop.Name(), Coll: name})
		}
		return out, nil
	}}
}

func indexNames(t *testing.T, coll *mongo.Collection) []string {
	t.Helper()
	specs, err := coll.Indexes().ListSpecifications(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	var out []string
	for _, s := range specs {
		if s.Name != "_id_" {
			out = append(out, s.Name)
		}
	}

	slices.Sort(out)
	return out
}

func mustMigrate(t *testing.T, m *Migrator) Report {
	t.Helper()
	r, err := m.Up(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func newIndex(fields ...string) mongodb.Index {
	i := mongodb.Index{Name: strings.Join(fields, "_1_") + "_1"}
	for _, f := range fields {
		i.Keys = append(i.Keys, bson.E{Key: f, Value: int32(1)})
	}
	return i
}

// The history up to a version of three steps, of which the last replaces an index.
func history() []Step {
	return []Step{
		{ID: "0001", Name: "one", Create: []Change{{Outbox, newIndex("a")}, {stateKind("events"), newIndex("at")}, {Dead, newIndex("d")}}},
		{ID: "0002", Name: "two", Create: []Change{{Outbox, newIndex("b")}}},
		{ID: "0003", Name: "three", Create: []Change{{Outbox, newIndex("a", "c")}}, Drop: []Change{{Outbox, newIndex("a")}}},
	}
}

func TestTheStepsCreateTheDeclaredIndexes(t *testing.T) {
	t.Parallel()
	same := func(a, b []mongodb.Index) bool {
		text := func(list []mongodb.Index) []string {
			var out []string
			for _, i := range list {
				out = append(out, i.Statement("d", "c"))
			}
			slices.Sort(out)
			return out
		}
		return slices.Equal(text(a), text(b))
	}

	steps := Steps()
	if !same(declaredIndexes(steps, Outbox), outboxes.Indexes()) {
		t.Errorf("the steps make %+v on an outbox, and the code declares %+v: add a step", declaredIndexes(steps, Outbox), outboxes.Indexes())
	}
	if !same(declaredIndexes(steps, Dead), deadletter.Indexes()) {
		t.Errorf("the steps make %+v on dead letters, and the code declares %+v: add a step", declaredIndexes(steps, Dead), deadletter.Indexes())
	}

	ids := map[string]bool{}
	made := map[string]bool{}
	for i, s := range steps {
		if ids[s.ID] || len(s.ID) != 4 || i > 0 && s.ID <= steps[i-1].ID || s.Name == "" {
			t.Errorf("step %q: ids are four digits, ascending, and never used again", s.ID)
		}
		ids[s.ID] = true
		for _, c := range s.Create {
			if key := string(c.On) + " " + c.Index.Name; made[key] {
				t.Errorf("step %s makes %s, a name that an earlier step has used", s.ID, key)
			} else {
				made[key] = true
			}
		}
	}
}

// Released steps do not change. A new step adds a line here. Nothing else may change a line.
func TestReleasedStepsStayAsTheyAre(t *testing.T) {
	t.Parallel()
	want := map[string]string{
		"0001": "46df994e1b1f48c59172317559110108",
		"0002": "d6af6709258737cb737d21bf4b5108c6",
		"0003": "235ced226a907139e9735eb99f647de8",
		"0004": "adce3dbf6db5f80b77094402651805e5",
	}

	got := map[string]string{}
	for _, s := range Steps() {
		got[s.ID] = s.Checksum()
	}

	if !maps.Equal(got, want) {
		t.Errorf("checksums are %v, want %v", got, want)
	}
}

func TestUpTakesEachStepOnceAndWritesItDown(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox", "b.outbox")
	if _, err := d.shop.Collection(deadletter.Collection("outbox")).InsertOne(t.Context(), bson.D{{Key: "x", Value: 1}}); err != nil {
		t.Fatal(err)
	}

	if r := mustMigrate(t, d.newMigrator(history()[:2])); !slices.Equal(r.Applied, []string{"0001", "0002"}) || !r.OK() {
		t.Fatalf("first: %+v", r)
	}
	if got := indexNames(t, d.shop.Collection("b.outbox")); !slices.Equal(got, []string{"a_1", "b_1"}) {
		t.Errorf("after two steps: %v", got)
	}

	m := d.newMigrator(history())
	if r := mustMigrate(t, m); !slices.Equal(r.Applied, []string{"0003"}) || !r.OK() {
		t.Fatalf("second: %+v", r)
	}
	if r := mustMigrate(t, m); len(r.Applied) != 0 || !r.OK() {
		t.Fatalf("third: %+v", r)
	}

	for coll, want := range map[*mongo.Collection][]string{
		// The superseded index is gone.
		d.shop.Collection("outbox"):                        {"a_1_c_1", "b_1"},
		d.shop.Collection("b.outbox"):                      {"a_1_c_1", "b_1"},
		d.shop.Collection(deadletter.Collection("outbox")): {"d_1"},
		d.state.Collection("events"):                       {"at_1"},
	} {
		if got := indexNames(t, coll); !slices.Equal(got, want) {
			t.Errorf("%s has %v, want %v", coll.Name(), got, want)
		}
	}
	if there, err := d.shop.ListCollectionNames(t.Context(), bson.D{{Key: "name", Value: deadletter.Collection("b.outbox")}}); err != nil || len(there) != 0 {
		t.Errorf("an empty collection of dead letters was made: %v, %v", there, err)
	}

	s, err := m.Status(t.Context())
	if err != nil || len(s.Steps) != 3 || s.Lock != nil {
		t.Fatalf("%+v, %v", s, err)
	}
	for _, st := range s.Steps {
		if st.State != outcomeApplied || st.Node != "n1" || st.Version != "1.0" || time.Since(st.At).Abs() > time.Minute || st.Checksum == "" {
			t.Errorf("the ledger contains %+v", st)
		}
	}
}

func TestACollectionThatAppearsLaterNeedsNoEntry(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t))
	m := d.newMigrator(history())
	mustMigrate(t, m)

	tenant := d.shop.Collection("tenant")
	if _, err := tenant.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "a", Value: 1}}}); err != nil { // of an old version
		t.Fatal(err)
	}

	for range 2 {
		if r, err := m.Prepare(t.Context(), outboxes.Outbox{DB: d.shop.Name(), Coll: "tenant"}); err != nil || !r.OK() {
			t.Fatalf("%+v, %v", r, err)
		}
	}

	if got := indexNames(t, tenant); !slices.Equal(got, []string{"a_1_c_1", "b_1"}) {
		t.Errorf("it has %v", got)
	}
	if n, err := d.state.Collection(ledgerName).CountDocuments(t.Context(), bson.D{}); err != nil || n != 3 {
		t.Errorf("%d entries, %v", n, err)
	}
}

func TestAChangedStepIsAClearError(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox")
	mustMigrate(t, d.newMigrator(history()))

	other := history()
	other[1].Create[0].Index.TTL = new(int32(60))
	m := d.newMigrator(other)
	_, err := m.Up(t.Context())
	if !errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), "version 1.0 has applied migration 0002") {
		t.Errorf("a changed step: got %v, want ErrChanged with the step and the version", err)
	}

	s, err := m.Status(t.Context())
	if err != nil || s.Steps[1].State != stateChanged || s.Steps[0].State != outcomeApplied {
		t.Errorf("%+v, %v", s.Steps, err)
	}
}

func TestStepsOfANewerVersionAreBorneUnlessTheyBreak(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox")
	mustMigrate(t, d.newMigrator(history()))

	old := d.newMigrator(history()[:2])
	if r := mustMigrate(t, old); !slices.Equal(r.Newer, []string{"0003"}) || len(r.Applied) != 0 {
		t.Errorf("an old version reports %+v", r)
	}
	if s, err := old.Status(t.Context()); err != nil || len(s.Steps) != 3 || s.Steps[2].State != stateNewer || s.Steps[2].Name != "three" {
		t.Errorf("%+v, %v", s, err)
	}

	next := append(history(), Step{ID: "0004", Name: "four", Breaking: true})
	newest := d.newMigrator(next)
	newest.Version = "2.0"
	mustMigrate(t, newest)

	_, err := d.newMigrator(history()).Up(t.Context())
	if !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), "migration 0004") || !strings.Contains(err.Error(), "run version 2.0") {
		t.Errorf("a newer step: got %v, want ErrNewer with the step and the version", err)
	}
}

func TestAMissingPrivilegeIsNamedAndTriedAgain(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	c := stacktest.Client(t, options.Client().SetAppName(app))
	d := newDeployment(t, c, "outbox", "other")
	m := d.newMigrator(history())

	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "errorCode", Value: 13},
		{Key: "failCommands", Value: bson.A{"createIndexes"}},
		{Key: "namespace", Value: d.shop.Name() + ".outbox"},
	})

	r := mustMigrate(t, m)
	want := Grant{Action: "createIndex", On: d.shop.Name() + ".outbox"}
	if len(r.Missing) != 1 || r.Missing[0].Action != want.Action || r.Missing[0].On != want.On || !strings.Contains(r.Missing[0].Advice, "createIndex(") {
		t.Errorf("missing %+v", r.Missing)
	}
	// The first step has nothing to do there any more.
	if r.OK() || !slices.Equal(r.Pending, []string{"0002", "0003"}) {
		t.Errorf("report %+v", r)
	}
	if got := indexNames(t, d.shop.Collection("other")); !slices.Equal(got, []string{"a_1_c_1", "b_1"}) {
		t.Errorf("where it is allowed: %v", got)
	}
	if s, err := m.Status(t.Context()); err != nil || s.Steps[2].State != outcomeIncomplete || len(s.Steps[2].Missing) != 1 || s.Lock != nil {
		t.Errorf("%+v, %v", s, err)
	}

	v, err := m.Verify(t.Context(), true)
	if err != nil || v.OK() || len(v.Drift) != 2 || v.Drift[0].Repaired || len(v.Missing) != 1 {
		t.Errorf("%+v, %v", v, err)
	}

	off()
	if r := mustMigrate(t, m); !r.OK() || !slices.Equal(r.Applied, []string{"0002", "0003"}) {
		t.Errorf("after the grant: %+v", r)
	}
}

func TestWithoutTheLedgerIndexesAreMadeAllTheSame(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	c := stacktest.Client(t, options.Client().SetAppName(app))
	d := newDeployment(t, c, "outbox")

	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "errorCode", Value: 13},
		{Key: "failCommands", Value: bson.A{"find", "update", "findAndModify"}},
		{Key: "namespace", Value: d.state.Name() + "." + ledgerName},
	})

	r := mustMigrate(t, d.newMigrator(history()[1:]))
	off()
	if !slices.Equal(r.Pending, []string{"0002", "0003"}) || len(r.Missing) != 1 || r.Missing[0].Action != "find" || r.Missing[0].On != d.state.Name()+"."+ledgerName {
		t.Errorf("%+v", r)
	}

	if got := indexNames(t, d.shop.Collection("outbox")); !slices.Equal(got, []string{"a_1_c_1", "b_1"}) {
		t.Errorf("it has %v", got)
	}
}

func TestDriftIsReportedAndRepairedOnRequest(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox", "other")
	m := d.newMigrator(history())
	mustMigrate(t, m)
	if v, err := m.Verify(t.Context(), false); err != nil || !v.OK() || v.Collections != 3 {
		t.Fatalf("just migrated: %+v, %v", v, err)
	}

	box := d.shop.Collection("outbox")
	if err := box.Indexes().DropOne(t.Context(), "b_1"); err != nil {
		t.Fatal(err)
	}
	for _, keys := range []string{"a", "users"} { // superseded, and somebody's own
		if _, err := box.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: keys, Value: 1}}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.state.Collection("events").Indexes().DropOne(t.Context(), "at_1"); err != nil {
		t.Fatal(err)
	}

	for _, repair := range []bool{false, true} {
		v, err := m.Verify(t.Context(), repair)
		if err != nil || v.OK() != repair || len(v.Drift) != 3 {
			t.Fatalf("repair %v: %+v, %v", repair, v, err)
		}
		for _, x := range v.Drift {
			if x.Repaired != repair || len(x.Statements) == 0 {
				t.Errorf("%+v", x)
			}
		}
	}

	if v, err := m.Verify(t.Context(), false); err != nil || !v.OK() || len(v.Drift) != 0 {
		t.Errorf("after the repair: %+v, %v", v, err)
	}
	if got := indexNames(t, box); !slices.Equal(got, []string{"a_1_c_1", "b_1", "users_1"}) {
		t.Errorf("it has %v", got)
	}
}

func TestConfiguredIndexesAreNoDrift(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox")

	dead := d.shop.Collection(deadletter.Collection("outbox"))
	if _, err := dead.InsertOne(t.Context(), bson.D{{Key: "x", Value: 1}}); err != nil {
		t.Fatal(err)
	}

	m := d.newMigrator(nil)
	mustMigrate(t, m)
	if err := deadletter.SetExpiry(t.Context(), dead, 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := outboxes.EnsureSentTTL(t.Context(), d.shop.Collection("outbox"), 2*time.Hour); err != nil {
		t.Fatal(err)
	}

	if v, err := m.Verify(t.Context(), false); err != nil || !v.OK() || v.Collections != 4 {
		t.Errorf("%+v, %v", v, err)
	}
}

func TestAnIndexOfSomebodyElseIsAConflictNotAFailure(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox", "other")
	if _, err := d.shop.Collection("outbox").Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "x", Value: 1}}, Options: options.Index().SetName("b_1")}); err != nil {
		t.Fatal(err)
	}

	m := d.newMigrator(history())
	r := mustMigrate(t, m)
	if r.OK() || len(r.Conflicts) == 0 || !strings.Contains(r.Conflicts[0], d.shop.Name()+".outbox") {
		t.Errorf("%+v", r)
	}

	if v, err := m.Verify(t.Context(), true); err != nil || !v.OK() {
		t.Errorf("%+v, %v", v, err)
	}
	if r := mustMigrate(t, m); !r.OK() {
		t.Errorf("after the repair: %+v", r)
	}
}

// A crash between a step and its entry: the step runs once more and changes nothing.
func TestAStepMayRunTwice(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox")
	m := d.newMigrator(history())
	mustMigrate(t, m)

	if _, err := d.state.Collection(ledgerName).DeleteOne(t.Context(), bson.D{{Key: "_id", Value: "0003"}}); err != nil {
		t.Fatal(err)
	}
	if r := mustMigrate(t, m); !r.OK() || !slices.Equal(r.Applied, []string{"0003"}) {
		t.Errorf("%+v", r)
	}

	if got := indexNames(t, d.shop.Collection("outbox")); !slices.Equal(got, []string{"a_1_c_1", "b_1"}) {
		t.Errorf("it has %v", got)
	}
}
