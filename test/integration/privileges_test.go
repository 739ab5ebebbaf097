//go:build unix

package integration

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/doctor"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// advice is where a log says what to grant.
var advice = regexp.MustCompile(`grant (?:the actions? )?([a-zA-Z, ]+?) on (?:\{db: \\?"(\w+)\\?", collection: \\?"(\w*)\\?"\}|(the cluster|its database|the state database|[\w.]+))`)

// A relay that lacks a single privilege of its role names that one, and no other, as soon as it needs it. What it needs for
// commands of operators and for figures alone, it works without; the doctor names each of them.
func TestASingleMissingPrivilegeIsNamed(t *testing.T) {
	t.Parallel()
	g := guard(t)
	g.Set("drain", "100ms") // what lacks a privilege cannot be finished
	g.do("setup", "migrate", "up", "--yes")
	outbox, dead := g.DB.Name()+".outbox", g.DB.Name()+".outbox_dead"
	role := g.roles.MongoDB[0]
	state := ""
	for _, p := range role.Privileges {
		if p.Resource.DB != nil && *p.Resource.DB != g.DB.Name() {
			state = *p.Resource.DB
		}
	}
	named := map[string]string{ // the place that the log names for a privilege, "" if the relay works without it
		"find on " + outbox: outbox, "changeStream on " + outbox: outbox, "update on " + outbox: outbox, "remove on " + outbox: outbox, "listIndexes on " + outbox: outbox,
		"insert on " + outbox: "", // of an edited letter that is given back
		"find on " + dead:     dead, "insert on " + dead: dead, "update on " + dead: dead, "listIndexes on " + dead: dead,
		"remove on " + dead:      "", // of a letter that is discarded
		"find on " + state + ".": state, "insert on " + state + ".": state, "update on " + state + ".": state, "remove on " + state + ".": state, "changeStream on " + state + ".": state,
		"listCollections on " + g.DB.Name() + ".": "its database",
		"replSetGetConfig on the cluster":         "the cluster",
		"serverStatus on the cluster":             "", // of the oplog's window
		"getParameter on the cluster":             "", // of the purge's margin
	}
	tried := 0
	for i, p := range role.Privileges {
		on := "the cluster"
		if !p.Resource.Cluster {
			on = *p.Resource.DB + "." + *p.Resource.Collection
		}
		for j, action := range p.Actions {
			fewer := slices.Clone(role.Privileges)
			fewer[i].Actions = slices.Delete(slices.Clone(p.Actions), j, j+1)
			if len(fewer[i].Actions) == 0 {
				fewer = slices.Delete(fewer, i, i+1)
			}
			what := action + " on " + on
			want, known := named[what]
			if !known {
				t.Errorf("it is not said whether a relay needs %s", what)
				continue
			}
			g.lacking(fewer, what, action, want, state)
			tried++
		}
	}
	if tried != len(named) {
		t.Errorf("%d of %d privileges were taken away", tried, len(named))
	}
}

// lacking runs a relay without one action of its role, beside an event for each thing that it does.
func (g *guarded) lacking(privileges []doctor.Privilege, what, action, want, state string) {
	t := g.t
	began := time.Now()
	defer func() { t.Logf("without %s: %.1f s", what, time.Since(began).Seconds()) }()
	if want == state && action == "changeStream" { // a standby watches the lease of an owner
		owner := g.Start()
		owner.TookOver()
		defer func() { owner.Term(); owner.Wait() }()
	}
	g.update(g.roles.MongoDB[0].Name, privileges)
	relay := g.Start()
	g.Append(g.Outbox(), event.New("order", "1", "Placed", nil), event.New("late", what, "Placed", nil))
	g.AppendMalformed(what)
	names := func() (right bool, wrong []string) {
		for _, m := range advice.FindAllStringSubmatch(relay.Log(), -1) {
			place := m[4]
			if m[2] != "" {
				place = strings.TrimSuffix(m[2]+"."+m[3], ".")
			}
			if place == "the state database" {
				place = state
			}
			actions := strings.FieldsFunc(strings.ReplaceAll(m[1], " and ", ","), func(r rune) bool { return r == ',' || r == ' ' })
			if want != "" && (place == want || strings.HasPrefix(place, want+".")) && slices.Contains(actions, action) {
				right = true
			} else {
				wrong = append(wrong, m[0])
			}
		}
		return right, wrong
	}
	if want == "" {
		relay.TookOver()
		kit.Eventually(t, "the event is dead", func() bool {
			n, err := g.DB.Collection("outbox_dead").CountDocuments(t.Context(), bson.D{{Key: "_id.id", Value: what}})
			return err == nil && n == 1
		})
	} else {
		kit.Eventually(t, fmt.Sprintf("without %s, the log names it", what), func() bool { right, _ := names(); return right })
	}
	if _, wrong := names(); len(wrong) > 0 {
		t.Errorf("without %s the relay asks for %q", what, wrong)
	}
	relay.Term()
	relay.Wait()
}

// update gives a role these privileges and no others.
func (g *guarded) update(role string, list []doctor.Privilege) {
	g.t.Helper()
	privileges := bson.A{}
	for _, p := range list {
		raw, err := json.Marshal(p.Resource)
		if err != nil {
			g.t.Fatal(err)
		}
		var on bson.D
		if err := bson.UnmarshalExtJSON(raw, false, &on); err != nil {
			g.t.Fatal(err)
		}
		privileges = append(privileges, bson.D{{Key: "resource", Value: on}, {Key: "actions", Value: p.Actions}})
	}
	if err := g.Client.Database("admin").RunCommand(g.t.Context(), bson.D{{Key: "updateRole", Value: role}, {Key: "privileges", Value: privileges}, {Key: "roles", Value: bson.A{}}}).Err(); err != nil {
		g.t.Fatal(err)
	}
}
