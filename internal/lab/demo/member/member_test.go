package member

import (
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newOrders returns the orders of a service: three of one key and one of another key.
func newOrders() []Order {
	return []Order{{"e1", "a", 1}, {"e2", "a", 2}, {"e3", "a", 3}, {"e4", "b", 4}}
}

func done(event, key string, n, place int64) storedEffect {
	return storedEffect{event, key, n, place, "c-1"}
}

// Each kind of damage is found, and nothing else.
func TestJudgeOfEffectsFindsPlantedViolations(t *testing.T) {
	t.Parallel()
	one, two, three, other := done("e1", "a", 1, 1), done("e2", "a", 2, 2), done("e3", "a", 3, 3), done("e4", "b", 4, 1)
	full := map[string]int64{"a": 3, "b": 1}

	for name, c := range map[string]struct {
		effects []storedEffect
		counts  map[string]int64
		want    EffectReport
	}{
		"all is well":       {[]storedEffect{three, other, one, two}, full, EffectReport{}},
		"lost":              {[]storedEffect{one, done("e3", "a", 3, 2), other}, map[string]int64{"a": 2, "b": 1}, EffectReport{Lost: 1}},
		"nothing at all":    {nil, nil, EffectReport{Lost: 4}},
		"double":            {[]storedEffect{one, two, three, done("e2", "a", 2, 4), other}, map[string]int64{"a": 4, "b": 1}, EffectReport{Double: 1}},
		"out of order":      {[]storedEffect{one, done("e3", "a", 3, 2), done("e2", "a", 2, 3), other}, full, EffectReport{OutOfOrder: 1}},
		"of no order":       {[]storedEffect{one, two, three, other, done("e9", "b", 9, 2)}, map[string]int64{"a": 3, "b": 2}, EffectReport{Phantom: 1}},
		"of another key":    {[]storedEffect{one, two, three, done("e4", "c", 4, 1)}, map[string]int64{"a": 3, "c": 1}, EffectReport{Phantom: 1}},
		"half written":      {[]storedEffect{one, two, three, other}, map[string]int64{"a": 4, "b": 1}, EffectReport{Miscounted: 1}},
		"half written too":  {[]storedEffect{one, two, three, done("e4", "b", 4, 2)}, map[string]int64{"a": 3, "b": 2}, EffectReport{Miscounted: 1}},
		"without a counter": {[]storedEffect{one, two, three, other}, map[string]int64{"a": 3}, EffectReport{Miscounted: 1}},
	} {
		got := judgeEffects(newOrders(), c.effects, c.counts)

		c.want.Orders, c.want.Effects = 4, len(c.effects)
		words := got.Examples
		got.Examples = nil
		if got.Lost != c.want.Lost || got.Double != c.want.Double || got.OutOfOrder != c.want.OutOfOrder || got.Phantom != c.want.Phantom ||
			got.Miscounted != c.want.Miscounted || got.Orders != 4 || got.Effects != len(c.effects) {
			t.Errorf("%s:\n got %+v\nwant %+v\n%s", name, *got, c.want, strings.Join(words, "\n"))
		}

		bad := c.want.Lost + c.want.Double + c.want.OutOfOrder + c.want.Phantom + c.want.Miscounted
		if (got.Err() == nil) != (bad == 0) || len(words) != bad {
			t.Errorf("%s: %v %q", name, got.Err(), words)
		}
	}
}

func TestJudgeOfStepsFindsPlantedViolations(t *testing.T) {
	t.Parallel()
	finished := time.Now()
	walks := func(a, b []int) []storedSaga {
		return []storedSaga{{0, int64(len(a)), sagaState{a}, finished}, {1, int64(len(b)), sagaState{b}, finished}}
	}

	events := []step{{0, 1}, {0, 2}, {1, 1}, {1, 2}}
	for name, c := range map[string]struct {
		sagas   []storedSaga
		emitted []step
		want    StepReport
	}{
		"all is well":       {walks([]int{2, 1}, []int{1, 2}), events, StepReport{}},
		"lost":              {walks([]int{1}, []int{1, 2}), events, StepReport{Lost: 1}},
		"a saga is lost":    {walks([]int{1, 2}, nil)[:1], events, StepReport{Lost: 2}},
		"double":            {walks([]int{1, 2, 1}, []int{1, 2}), events, StepReport{Double: 1}},
		"not requested":     {walks([]int{1, 2, 3}, []int{1, 2}), events, StepReport{Double: 1}},
		"not emitted":       {walks([]int{1, 2}, []int{1, 2}), events[:3], StepReport{LostEmitted: 1}},
		"emitted twice":     {walks([]int{1, 2}, []int{1, 2}), append(events[:4:4], step{1, 2}), StepReport{DoubleEmitted: 1}},
		"emitted unasked":   {walks([]int{1, 2}, []int{1, 2}), append(events[:4:4], step{5, 2}), StepReport{Double: 1}},
		"not complete":      {[]storedSaga{{0, 2, sagaState{[]int{1, 2}}, time.Time{}}, walks(nil, []int{1, 2})[1]}, events, StepReport{Unfinished: 1}},
		"changed too often": {[]storedSaga{{0, 3, sagaState{[]int{1, 2}}, finished}, walks(nil, []int{1, 2})[1]}, events, StepReport{Lost: 1}},
	} {
		got := judgeSteps(c.sagas, c.emitted, 2, 2)
		w := c.want
		if got.Lost != w.Lost || got.Double != w.Double || got.Unfinished != w.Unfinished || got.LostEmitted != w.LostEmitted || got.DoubleEmitted != w.DoubleEmitted {
			t.Errorf("%s: %+v", name, *got)
		}
		if (got.Err() == nil) != (w.Lost+w.Double+w.Unfinished+w.LostEmitted+w.DoubleEmitted == 0) {
			t.Errorf("%s: %v", name, got.Err())
		}
	}
}

func TestSpecs(t *testing.T) {
	t.Parallel()
	s := Spec{Role: Saga, Name: "c-1", MongoDB: "mongodb://x", Database: "shop", Brokers: []string{"b:1"}, Topics: []string{"t"}, Group: "g", Steps: 3, SessionTimeout: time.Second}
	got, err := Parse(s.Arg())
	if err != nil || got.Arg() != s.Arg() {
		t.Errorf("%+v, %v", got, err)
	}

	_, err = Parse(`{"role":"baker"}`)
	for _, what := range []string{"baker", "name", "mongodb", "database", "group"} {
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v does not name %s", err, what)
		}
	}
	if _, err := Parse("-"); err == nil {
		t.Error("no error")
	}

	s.Steps = 0
	if _, err := Parse(s.Arg()); err == nil {
		t.Error("a saga without steps")
	}
}
