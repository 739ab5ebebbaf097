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

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/doctor"
	"github.com/outrelay/outrelay/pkg/event"
)

// advice matches the log texts that name a missing privilege.
var advice = regexp.MustCompile(`grant (?:the actions? )?([a-zA-Z, ]+?) on (?:\{db: \\?"(\w+)\\?", collection: \\?"(\w*)\\?"\}|(the cluster|its database|the state database|[\w.]+))`)

// lacking finds the right in the line with which a relay ends at its start.
var lacking = regexp.MustCompile(`lacks (\w+) on (?:database )?([\w.-]+)`)

// If a single privilege of its role is missing, a relay logs exactly this privilege when it needs it.
// It works without privileges that only commands of operators or figures need. The doctor lists all of
// them.
func TestASingleMissingPrivilegeIsNamed(t *testing.T) {
	t.Parallel()
	g := newGuardedScene(t, nil)
	// A drain cannot finish without a privilege.
	g.SetConfig("lease.drain", "100ms")
	g.mustRunAs("setup", "setup")
	outbox := g.DB.Name() + ".outbox"
	role := g.roles.MongoDB[0]
	state := ""
	for _, p := range role.Privileges {
		if !p.Resource.Cluster && p.Resource.DB != g.DB.Name() {
			state = p.Resource.DB
		}
	}

	// The value is the resource that the log names if the privilege is missing. It is empty if the relay works without the privilege.
	named := map[string]string{
		"find on " + outbox: outbox, "changeStream on " + outbox: outbox, "update on " + outbox: outbox, "remove on " + outbox: outbox, "listIndexes on " + outbox: "",
		"insert on " + outbox: "",
		// The relay counts the letters of handlers.
		"find on " + g.DB.Name() + ".inbox_dead": "",
		"find on " + state + ".":                 state, "insert on " + state + ".": state, "update on " + state + ".": state, "remove on " + state + ".": state,
		// The collections exist.
		"createCollection on " + state + ".": "", "createIndex on " + state + ".": "", "listIndexes on " + state + ".": state,
		"listCollections on " + g.DB.Name() + ".": g.DB.Name(),
		"replSetGetConfig on the cluster":         "the cluster",
		"serverStatus on the cluster":             "the cluster",
		"getParameter on the cluster":             "", // of the purge's margin
	}

	tried := 0
	for i, p := range role.Privileges {
		on := "the cluster"
		if !p.Resource.Cluster {
			on = p.Resource.DB + "." + p.Resource.Collection
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
				t.Errorf("the test does not define whether a relay needs %s", what)
				continue
			}
			g.checkWithout(fewer, what, action, want, state)
			tried++
		}
	}

	if tried != len(named) {
		t.Errorf("the test removed %d privileges, want %d", tried, len(named))
	}
}

// checkWithout runs a relay without one action of its role. It appends an event for each operation of
// the relay.
func (g *guarded) checkWithout(privileges []doctor.Privilege, what, action, want, state string) {
	t := g.t
	began := time.Now()
	defer func() { t.Logf("without %s: %.1f s", what, time.Since(began).Seconds()) }()
	g.updateRole(g.roles.MongoDB[0].Name, privileges)
	relay := g.StartRelay()
	g.AppendEvents(g.Outbox(), event.New(event.Aggregate{Type: "order", ID: "1"}, "Placed", event.Payload{}), event.New(event.Aggregate{Type: "late", ID: what}, "Placed", event.Payload{}))
	g.AppendMalformed(what)
	names := func() (right bool, wrong []string) {
		for _, m := range advice.FindAllStringSubmatch(relay.ReadLog(), -1) {
			place := m[4]
			if m[2] != "" {
				place = strings.TrimSuffix(m[2]+"."+m[3], ".")
			}
			switch place {
			case "the state database":
				place = state
			case "its database":
				place = g.DB.Name()
			}
			actions := strings.FieldsFunc(strings.ReplaceAll(m[1], " and ", ","), func(r rune) bool { return r == ',' || r == ' ' })
			if want != "" && (place == want || strings.HasPrefix(place, want+".")) && slices.Contains(actions, action) {
				right = true
			} else {
				wrong = append(wrong, m[0])
			}
		}

		// Without a right that the relay cannot do without, it ends at its start.
		if m := lacking.FindStringSubmatch(relay.ReadLog()); m != nil {
			right = m[1] == action && strings.HasPrefix(m[2], want)
		}
		return right, wrong
	}

	if want == "" {
		relay.WaitTookOver()
		stacktest.Eventually(t, "the event is dead", func() bool {
			n, err := g.State.Collection("letters").CountDocuments(t.Context(), bson.D{{Key: "id", Value: what}})
			return err == nil && n == 1
		})
	} else {
		stacktest.Eventually(t, fmt.Sprintf("without %s, the log names it", what), func() bool { right, _ := names(); return right })
	}

	if _, wrong := names(); len(wrong) > 0 {
		t.Errorf("without %s the relay logs wrong privileges %q", what, wrong)
	}

	relay.Terminate()
	relay.WaitExit()
}

// updateRole gives a role exactly these privileges.
func (g *guarded) updateRole(role string, list []doctor.Privilege) {
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
