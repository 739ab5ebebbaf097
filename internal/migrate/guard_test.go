package migrate

import (
	"context"
	"errors"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

func TestSchemaIsTheLastStepsNumber(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]int{"0001": 1, "0042": 42, "": 0, "x": 0} {
		if got := StepNumber(id); got != want {
			t.Errorf("%q: %d, want %d", id, got, want)
		}
	}
	if got := LastStep([]Step{{ID: "0007"}, {ID: "0012"}}); got != 12 {
		t.Errorf("%d", got)
	}

	steps := Steps()
	if got := LastStep(steps); got != len(steps) || got == 0 {
		t.Errorf("this version's schema is %d, with %d steps", got, len(steps))
	}
}

// A step that older versions cannot work with is checked before it is announced, and again afterwards. A step that must
// wait changes nothing, and a step that is announced keeps older versions out before it is done.
func TestABreakingStepWaitsUntilAllNodesSupportIt(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox")
	steps := []Step{
		{ID: "0001", Name: "first", Create: []Change{{Outbox, newIndex("ts")}}},
		{ID: "0002", Name: "second", Breaking: true, Create: []Change{{Outbox, newIndex("type")}}},
		{ID: "0003", Name: "third", Create: []Change{{Outbox, newIndex("topic")}}},
	}

	old, m := d.newMigrator(steps[:1]), d.newMigrator(steps)
	if mustMigrate(t, old); !slices.Equal(indexNames(t, d.shop.Collection("outbox")), []string{"ts_1"}) {
		t.Fatal("the first step")
	}

	pending, err := m.PendingBreaking(t.Context())
	if err != nil || len(pending) != 1 || pending[0].ID != "0002" {
		t.Fatalf("%v, %v", pending, err)
	}

	older := errors.New("an older node lives")
	ledger := d.state.Collection(ledgerName)
	for name, answers := range map[string][]error{"at once": {older}, "seen after the announcement": {nil, older}} {
		checks := 0
		m.CheckStep = func(ctx context.Context, s Step) error {
			if s.ID != "0002" {
				t.Errorf("a check of step %s, want only 0002", s.ID)
			}
			announced, err := ledger.CountDocuments(ctx, bson.D{{Key: "_id", Value: "0002"}, {Key: "outcome", Value: outcomeBegun}})
			if err != nil || announced != int64(checks) {
				t.Errorf("%s: announced %d times at check %d, %v", name, announced, checks, err)
			}
			checks++
			return answers[checks-1]
		}
		r, err := m.Up(t.Context())
		if !errors.Is(err, older) || checks != len(answers) || !slices.Contains(r.Pending, "0002") {
			t.Errorf("%s: %v after %d questions, %+v", name, err, checks, r)
		}
		if n, err := ledger.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "0002"}}); err != nil || n != 0 {
			t.Errorf("%s: the announcement is left: %d, %v", name, n, err)
		}
		if _, err := old.PendingBreaking(t.Context()); err != nil {
			t.Errorf("%s: the older version is kept out: %v", name, err)
		}
	}

	m.CheckStep = func(ctx context.Context, _ Step) error {
		if n, _ := ledger.CountDocuments(ctx, bson.D{{Key: "outcome", Value: outcomeBegun}}); n == 1 {
			if _, err := old.PendingBreaking(ctx); !errors.Is(err, ErrNewer) {
				t.Errorf("announced, and an older version may start: %v", err)
			}
		}
		return nil
	}
	if r := mustMigrate(t, m); !slices.Equal(r.Applied, []string{"0002", "0003"}) {
		t.Errorf("%+v", r)
	}
	if _, err := old.PendingBreaking(t.Context()); !errors.Is(err, ErrNewer) {
		t.Errorf("the older version: %v", err)
	}
	if pending, err := m.PendingBreaking(t.Context()); err != nil || len(pending) != 0 {
		t.Errorf("%v, %v", pending, err)
	}
}
