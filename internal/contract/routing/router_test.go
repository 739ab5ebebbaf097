package routing

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newView(t testing.TB, e event.Event) *envelope.View {
	t.Helper()
	raw, err := e.MarshalBSON()
	if err != nil {
		t.Fatal(err)
	}
	v := new(envelope.View)
	if err := envelope.Parse(raw, v); err != nil {
		t.Fatal(err)
	}
	return v
}

func mustNew(t testing.TB, c Config) *Router {
	t.Helper()
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func classOf(err error) record.Class {
	var rejection *record.Rejection
	if errors.As(err, &rejection) {
		return rejection.Class
	}
	return ""
}

func TestRoutes(t *testing.T) {
	t.Parallel()
	full := Config{
		Rules: []Rule{
			{AggregateType: "order", Type: "Order*", To: []string{"orders", "audit"}}, // fan-out
			{AggregateType: "order", To: []string{"order.{type}"}},
			{Type: "*.v?", To: []string{"versioned.{aggregatetype}", "versioned.{aggregatetype}x"}},
			{AggregateType: "bad*", To: []string{"{aggregatetype}"}},
			{AggregateType: "same", To: []string{"x.{type}", "x.{aggregatetype}"}},
		},
		Allow: []string{"outbox.*", "orders", "audit", "order.*", "versioned.*", "bad*", "x.*", "named-?"},
	}

	any32 := record.AnyPartition
	for name, test := range map[string]struct {
		config Config
		event  event.Event
		want   []Target
		class  record.Class
	}{
		"default template":     {Config{}, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}), []Target{{"outbox.event.order", any32}}, ""},
		"template with type":   {Config{Template: "{aggregatetype}.{type}"}, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}), []Target{{"order.A", any32}}, ""},
		"fan-out":              {full, event.New(event.Aggregate{Type: "order", ID: "1"}, "OrderPlaced", event.Payload{}), []Target{{"orders", any32}, {"audit", any32}}, ""},
		"second rule":          {full, event.New(event.Aggregate{Type: "order", ID: "1"}, "Cancelled", event.Payload{}), []Target{{"order.Cancelled", any32}}, ""},
		"by type":              {full, event.New(event.Aggregate{Type: "bill", ID: "1"}, "Paid.v2", event.Payload{}), []Target{{"versioned.bill", any32}, {"versioned.billx", any32}}, ""},
		"two that are one":     {full, event.New(event.Aggregate{Type: "same", ID: "1"}, "same", event.Payload{}), []Target{{"x.same", any32}}, ""},
		"no rule":              {full, event.New(event.Aggregate{Type: "bill", ID: "1"}, "Paid", event.Payload{}), []Target{{"outbox.event.bill", any32}}, ""},
		"own topic":            {full, event.New(event.Aggregate{Type: "order", ID: "1"}, "OrderPlaced", event.Payload{}, event.WithTopic("named-1")), []Target{{"named-1", any32}}, ""},
		"own partition":        {full, event.New(event.Aggregate{Type: "order", ID: "1"}, "OrderPlaced", event.Payload{}, event.WithPartition(7)), []Target{{"orders", 7}, {"audit", 7}}, ""},
		"own topic forbidden":  {full, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}, event.WithTopic("named-10")), nil, record.NotAllowed},
		"internal topic":       {Config{}, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}, event.WithTopic("__consumer_offsets")), nil, record.NotAllowed},
		"internal by pattern":  {Config{Template: "{aggregatetype}", Allow: []string{"*"}}, event.New(event.Aggregate{Type: "__transaction_state", ID: "1"}, "A", event.Payload{}), nil, record.NotAllowed},
		"no topic's name":      {Config{}, event.New(event.Aggregate{Type: "a b", ID: "1"}, "A", event.Payload{}), nil, record.Malformed},
		"too long":             {Config{}, event.New(event.Aggregate{Type: strings.Repeat("a", 240), ID: "1"}, "A", event.Payload{}), nil, record.Malformed},
		"only dots":            {Config{Template: "{aggregatetype}"}, event.New(event.Aggregate{Type: "..", ID: "1"}, "A", event.Payload{}), nil, record.Malformed},
		"fan-out is all or no": {Config{Rules: []Rule{{To: []string{"a", "{type}"}}}, Allow: []string{"a"}}, event.New(event.Aggregate{Type: "x", ID: "1"}, "b", event.Payload{}), nil, record.NotAllowed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := mustNew(t, test.config)
			for range 2 { // decided, then remembered
				kept := []Target{{"kept", 3}}
				got, err := r.Route(newView(t, test.event), nil, kept)
				if classOf(err) != test.class || (err == nil) != (test.class == "") {
					t.Fatalf("error = %v, want class %q", err, test.class)
				}
				if diff := cmp.Diff(append(kept, test.want...), got); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
}

func TestNegativePartition(t *testing.T) {
	t.Parallel()
	v := newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}))
	v.Partition = -2
	if _, err := mustNew(t, Config{}).Route(v, nil, nil); classOf(err) != record.PartitionOutOfRange {
		t.Errorf("error = %v", err)
	}
}

func TestPartitionOfOneEnvelopeStaysItsOwn(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{})
	if got, _ := r.Route(newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}, event.WithPartition(3))), nil, nil); got[0].Partition != 3 {
		t.Errorf("%v", got)
	}
	if got, _ := r.Route(newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{})), nil, nil); got[0].Partition != record.AnyPartition {
		t.Errorf("the remembered decision carries another envelope's partition: %v", got)
	}
}

func TestInvalidConfigNamesEverything(t *testing.T) {
	t.Parallel()
	_, err := New(Config{
		Template: "a b",
		Rules:    []Rule{{To: []string{"__x", "{id}", "ok", "ok", "{type"}}, {}, {To: []string{"with space {type}"}}},
		Allow:    []string{"", "a/b", "ok", "fine*"},
	})

	var bad *InvalidError
	if !errors.As(err, &bad) {
		t.Fatal(err)
	}

	var fields []string
	for _, p := range bad.Problems {
		fields = append(fields, p.Field)
	}

	want := []string{"allow[0]", "allow[1]", "template", "rules[0].to[0]", "rules[0].to[1]", "rules[0].to[3]", "rules[0].to[4]", "rules[1].to", "rules[2].to[0]"}
	if diff := cmp.Diff(want, fields); diff != "" {
		t.Error(diff, err)
	}
}

func TestMemoryOfDecisionsIsBounded(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{Template: "{aggregatetype}", Max: 3 * maxCached})
	v := newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}))
	for i := range maxCached + 100 {
		v.AggregateType, v.Topic = fmt.Appendf(nil, "t%d", i), nil
		if got, err := r.Route(v, nil, nil); err != nil || got[0].Topic != string(v.AggregateType) {
			t.Fatalf("%v, %v", got, err)
		}
		v.Topic = fmt.Appendf(nil, "n%d", i)
		if got, err := r.Route(v, nil, nil); err != nil || got[0].Topic != string(v.Topic) {
			t.Fatalf("%v, %v", got, err)
		}
	}
	if len(r.byTypeCache) > maxCached || len(r.byTopicCache) > maxCached {
		t.Errorf("%d and %d remembered", len(r.byTypeCache), len(r.byTopicCache))
	}

	v.Topic, v.AggregateType = nil, []byte(strings.Repeat("x", 2*maxCachedKey))
	if _, err := r.Route(v, nil, nil); classOf(err) != record.Malformed || r.byTypeCache[string(v.AggregateType)].rejection != nil {
		t.Errorf("error = %v", err)
	}
}

func TestRouterFromManyGoroutines(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			v := newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}))
			for j := range 1000 {
				v.AggregateType = fmt.Appendf(nil, "t%d", (i+j)%50)
				if got, err := r.Route(v, nil, nil); err != nil || got[0].Topic != "outbox.event."+string(v.AggregateType) {
					t.Errorf("%v, %v", got, err)
					return
				}
			}
		})
	}

	wg.Wait()
}

func TestTypesOfOneAggregateAreDistinguished(t *testing.T) {
	t.Parallel()
	for _, c := range []Config{
		{Template: "{aggregatetype}.{type}"},
		{Rules: []Rule{{To: []string{"{aggregatetype}.{type}"}}}},
		{Template: "order.A", Rules: []Rule{{Type: "B", To: []string{"order.B"}}}},
	} {
		r := mustNew(t, c)
		for _, typ := range []string{"A", "B", "A"} {
			if got, err := r.Route(newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, typ, event.Payload{})), nil, nil); err != nil || got[0].Topic != "order."+typ {
				t.Errorf("%s: %v, %v", typ, got, err)
			}
		}
	}
}

// TestEveryTopicIsLegal routes hostile names: each result is a topic that Kafka accepts and the list allows.
func TestEveryTopicIsLegal(t *testing.T) {
	t.Parallel()
	allow := []string{"outbox.*", "_*"}
	r := mustNew(t, Config{Rules: []Rule{{Type: "*x*", To: []string{"outbox.{type}", "{aggregatetype}"}}}, Allow: allow})
	v := newView(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}))

	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.String(), rapid.StringMatching(`_{0,3}[a-zA-Z._-]{0,5}`))
		v.AggregateType, v.Type, v.Topic = []byte(name.Draw(t, "aggregatetype")), []byte(name.Draw(t, "type")), nil
		if rapid.Bool().Draw(t, "named") {
			v.Topic = []byte(name.Draw(t, "topic"))
		}

		targets, err := r.Route(v, nil, nil)
		if (err == nil) == (len(targets) == 0) {
			t.Fatalf("the targets %v with the error %v, want one of them", targets, err)
		}
		for _, one := range targets {
			if checkTopicName(one.Topic) != "" || strings.HasPrefix(one.Topic, "__") || !slices.ContainsFunc(allow, func(p string) bool { return glob.Match(p, one.Topic) }) {
				t.Fatalf("routed to %q", one.Topic)
			}
		}
	})
}

// Topics that are stored on a document, such as the pending ones of a waiting envelope, are checked like the topics that an
// envelope names.
func TestStoredTopicsAreJudged(t *testing.T) {
	t.Parallel()
	r, err := New(Config{Allow: []string{"outbox.event.*", "__*"}})
	if err != nil {
		t.Fatal(err)
	}

	targets := []Target{{"outbox.event.order", 3}}
	stored := []string{"outbox.event.order", "secret", "__consumer_offsets", "not a name", "", "outbox.event.parcel"}
	kept, rejected := r.RestrictTo(targets, stored)
	if want := []Target{{"outbox.event.order", 3}, {"outbox.event.parcel", record.AnyPartition}}; !slices.Equal(kept, want) {
		t.Errorf("kept %v, want %v", kept, want)
	}

	classes := map[string]record.Class{}
	for _, a := range rejected {
		classes[a.Topic] = a.Rejection.Class
	}
	if want := map[string]record.Class{"secret": record.NotAllowed, "__consumer_offsets": record.NotAllowed, "not a name": record.Malformed, "": record.Malformed}; !maps.Equal(classes, want) {
		t.Errorf("rejected %v, want %v", classes, want)
	}
}

// Envelopes may name so many topics and no more: a service could else fill the memory with topics that do not exist. Topics
// that exist, that the configuration names, or that were seen before are never rejected for that.
func TestTopicsThatEnvelopesNameAreBounded(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{Rules: []Rule{{AggregateType: "order", To: []string{"orders"}}}, Max: 3})
	r.SetExistingTopics(map[string]bool{"outbox.event.old": true})
	route := func(aggregateType string) *record.Rejection {
		_, err := r.Route(newView(t, event.New(event.Aggregate{Type: aggregateType, ID: "1"}, "A", event.Payload{})), nil, nil)
		rejection, _ := errors.AsType[*record.Rejection](err)
		return rejection
	}

	for _, allowed := range []string{"a", "b", "old", "c", "order", "a", "old"} {
		if why := route(allowed); why != nil {
			t.Fatalf("%s: %v", allowed, why)
		}
	}

	for range 2 {
		if why := route("d"); why == nil || why.Class != record.NotAllowed || !strings.Contains(why.Reason, "topics.max") {
			t.Fatalf("d: %v", why)
		}
	}

	if why := route("a"); why != nil || !r.NeedsTopics() {
		t.Errorf("a: %v", why)
	}

	// A user has created the topic in the meantime.
	r.SetExistingTopics(map[string]bool{"outbox.event.old": true, "outbox.event.d": true})
	if why := route("d"); why != nil {
		t.Errorf("d: %v", why)
	}

	r.ResetTopics()
	r.SetExistingTopics(map[string]bool{})
	if why := route("d"); why != nil || r.NeedsTopics() {
		t.Errorf("d in the next term: %v", why)
	}
}

// TestUnknownTopicsAreNotCounted: until the cluster has listed its topics, each of them may exist.
func TestUnknownTopicsAreNotCounted(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{Max: 1})
	for _, aggregateType := range []string{"a", "b", "c"} {
		if _, err := r.Route(newView(t, event.New(event.Aggregate{Type: aggregateType, ID: "1"}, "A", event.Payload{})), nil, nil); err != nil {
			t.Errorf("%s: %v", aggregateType, err)
		}
	}
	if !r.NeedsTopics() || r.KnowsTopics() {
		t.Error("the router does not need the topics")
	}

	// Then they count, also after earlier decisions.
	r.SetExistingTopics(map[string]bool{"outbox.event.a": true})
	for i, want := range []record.Class{"", "", record.NotAllowed} {
		aggregateType := []string{"a", "b", "c"}[i]
		if _, err := r.Route(newView(t, event.New(event.Aggregate{Type: aggregateType, ID: "1"}, "A", event.Payload{})), nil, nil); classOf(err) != want {
			t.Errorf("%s with a list: %v, want %q", aggregateType, err, want)
		}
	}
}

// TestANamedTopicCountsAlone: the rules decide only whether the envelope is discarded, and their topics are not used.
func TestANamedTopicCountsAlone(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{Rules: []Rule{{AggregateType: "noise", Drop: true}}, Max: 1})
	r.SetExistingTopics(map[string]bool{})
	for _, aggregateType := range []string{"a", "b", "c"} {
		placed := event.New(event.Aggregate{Type: aggregateType, ID: "1"}, "A", event.Payload{}, event.WithTopic("shared"))
		if _, err := r.Route(newView(t, placed), nil, nil); err != nil {
			t.Errorf("%s: %v", aggregateType, err)
		}
	}
}

// Whether a rule discards an envelope that names its topic is decided once for all envelopes with the same values.
func TestTheDecisionToDiscardIsCached(t *testing.T) {
	t.Parallel()
	calls := 0
	choose := func(string, string) []string { calls++; return nil }
	r := mustNew(t, Config{Rules: []Rule{{AggregateType: "noise", Drop: true}}, Choose: choose})
	for aggregateType, want := range map[string]record.Class{"noise": record.Dropped, "a": ""} {
		calls = 0
		placed := event.New(event.Aggregate{Type: aggregateType, ID: "1"}, "A", event.Payload{}, event.WithTopic("shared"))
		for range 3 {
			if _, err := r.Route(newView(t, placed), nil, nil); classOf(err) != want {
				t.Errorf("%s: %v", aggregateType, err)
			}
		}
		if calls != 1 {
			t.Errorf("%s: %d decisions for 3 envelopes", aggregateType, calls)
		}
	}
}

// A name may contain NUL, which separates the two names in the key of a cached decision.
func TestNamesWithNULDoNotShareADecision(t *testing.T) {
	t.Parallel()
	r, err := New(Config{Template: "t", Rules: []Rule{
		{AggregateType: "a", Type: "b\x00c", To: []string{"first"}}, {AggregateType: "a\x00b", Type: "c", To: []string{"second"}},
	}})
	if err != nil {
		t.Fatal(err)
	}

	for _, c := range []struct{ aggregateType, typ, want string }{{"a", "b\x00c", "first"}, {"a\x00b", "c", "second"}, {"a", "b\x00c", "first"}} {
		v := envelope.View{AggregateType: []byte(c.aggregateType), Type: []byte(c.typ), Partition: record.AnyPartition}
		if got, err := r.Route(&v, nil, nil); err != nil || len(got) != 1 || got[0].Topic != c.want {
			t.Errorf("%q %q goes to %v, want %s (%v)", c.aggregateType, c.typ, got, c.want, err)
		}
	}
}
