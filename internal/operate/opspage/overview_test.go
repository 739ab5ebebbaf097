package opspage

import (
	"context"
	"html"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

// The verdict of a watcher counts only its own problems, and the problems of the whole deployment.
func TestEachWatcherHasItsVerdict(t *testing.T) {
	t.Parallel()
	o := admin.Overview{
		Slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1", State: "live"}, {Name: "tried", Slot: "0of1"}},
		Problems: []admin.Problem{
			{Watcher: "tried", Severity: problems.Fail, Detail: "no process runs it"},
			{Severity: problems.Warn, Object: "nodes"},
		},
	}

	v := newOverview(o, &view{Watcher: "orders"})
	if v.Worst != "warn" || len(v.Problems) != 1 || v.Problems[0].Object != "nodes" {
		t.Errorf("orders: worst %s, problems %+v", v.Worst, v.Problems)
	}
	if want := []verdict{{Name: "orders", Status: "ok"}, {Name: "tried", Status: "fail"}}; !cmp.Equal(v.Watching, want) {
		t.Errorf("watchers: got %+v, want %+v", v.Watching, want)
	}
	if v := newOverview(o, &view{Watcher: "tried"}); v.Worst != "fail" || len(v.Problems) != 2 || v.Problems[0].Detail != "no process runs it" {
		t.Errorf("tried: worst %s, problems %+v", v.Worst, v.Problems)
	}
}

// problemDesk is a desk with these problems.
type problemDesk struct {
	*desk
	problems     []admin.Problem
	acknowledged string
}

func (d *problemDesk) Overview(context.Context) (admin.Overview, error) {
	return admin.Overview{Slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1", State: "live"}}, Problems: d.problems}, nil
}

func (d *problemDesk) Acknowledge(_ context.Context, id string) error {
	d.acknowledged = id
	return nil
}

// A problem is written once, as a card with its object, its number, its age, its consequence, its fix and its action.
func TestEachProblemIsOneCardWithItsAction(t *testing.T) {
	t.Parallel()
	desk := &problemDesk{desk: &desk{}, problems: []admin.Problem{
		{
			Kind: problems.TopicUnwritable, Severity: problems.Fail, Watcher: "orders", Object: "invoices", Title: "Topic invoices cannot be written", ForS: 600,
			Count: 48, Unit: "events wait", Detail: "it does not exist", Consequence: "its events wait in order", Fix: "create it",
		},
		{Kind: problems.LostHistoryFound, Severity: problems.Warn, Watcher: "orders", Object: "orders", Title: "History of orders was lost", Detail: "3 s", Acknowledge: "lost-1"},
		{Kind: problems.Paused, Severity: problems.Warn, Watcher: "orders", Object: "orders/1of2", Title: "orders/1of2 is paused", Detail: "an operator paused it"},
	}}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		use := desk.useCases()
		use.Operator = desk
		return use
	}})

	_, body := sendRequest(t, site, &operator, "GET", "/", nil)
	text := strings.Join(strings.Fields(body), " ")
	for _, want := range []string{
		"✕ fail", "48 events wait · for 10 min", "It does not exist. Its events wait in order.", "What to do: create it.", `href="/waiting?topic=invoices">Show 48 events</a>`,
		`name="problem" value="lost-1"`, `name="slot" value="1of2"`, `action="/confirm/resume"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the overview lacks %q", want)
		}
	}
	if n := strings.Count(text, "Topic invoices cannot be written"); n != 1 {
		t.Errorf("the problem is written %d times", n)
	}
	if _, body := sendRequest(t, site, &viewer, "GET", "/", nil); strings.Contains(body, "/confirm/") {
		t.Error("a viewer is offered the action of a problem")
	}

	form := url.Values{"problem": {"lost-1"}}
	if _, body := sendRequest(t, site, &operator, "POST", "/confirm/acknowledge", form); !strings.Contains(body, "History of orders was lost: 3 s.") || desk.acknowledged != "" {
		t.Errorf("the question: %s", body)
	}
	form.Set("_count", "-1")
	if response, _ := sendRequest(t, site, &operator, "POST", "/act/acknowledge", form); response.StatusCode != http.StatusSeeOther || desk.acknowledged != "lost-1" {
		t.Errorf("status %d, acknowledged %q", response.StatusCode, desk.acknowledged)
	}
	if response, _ := sendRequest(t, site, &operator, "POST", "/confirm/acknowledge", url.Values{"problem": {"gone"}}); response.StatusCode != http.StatusBadRequest {
		t.Errorf("a problem that is over: %d", response.StatusCode)
	}
}

// A card whose problem the page cannot end leads to a page that explains it, or has a command that does.
func TestEachCardHasANextStep(t *testing.T) {
	t.Parallel()
	for _, spec := range problems.Specs() {
		problem := admin.Problem{Kind: spec.Kind, Watcher: "orders", Object: "orders/1of2", Fix: spec.Fix}
		if spec.Kind == problems.LostHistoryFound || spec.Kind == problems.EventsDiscarded {
			problem.Acknowledge = "lost-1"
		}
		if card := newProblemCard(problem, &view{}); card.Link+card.Action+card.Command == "" {
			t.Errorf("the card of %s has no link, no action and no command", spec.Kind)
		}
	}

	for kind, want := range map[problems.Kind]string{
		problems.Lagging: "/topics", problems.OplogUsed: "outrelay doctor", problems.OutboxNotReadable: "outrelay doctor", problems.CountsFail: "outrelay doctor",
		problems.GapOpen: "/log?kind=gap_found+gap_closed&of=orders",
	} {
		card := newProblemCard(admin.Problem{Kind: kind, Watcher: "orders"}, &view{})
		if card.Link != want && card.Command != want {
			t.Errorf("the card of %s has the link %q and the command %q, want %q", kind, card.Link, card.Command, want)
		}
	}
	if card := newProblemCard(admin.Problem{Kind: problems.GapOpen, Fix: "wait; outrelay status shows the progress"}, &view{}); !strings.Contains(card.Fix, "this card shows") {
		t.Errorf("the card of a gap leads away from the page: %s", card.Fix)
	}
}

// The card of a topic that needs partitions asks for that number.
func TestTheCardOfADeletedTopicRestoresItsPartitions(t *testing.T) {
	t.Parallel()
	missing := admin.Problem{Kind: problems.TopicUnwritable, Severity: problems.Fail, Watcher: "orders", Object: "invoices", Command: "kafka-topics.sh", Partitions: 6}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		desk := &problemDesk{desk: &desk{}, problems: []admin.Problem{missing}}
		use := desk.useCases()
		use.Operator = desk
		return use
	}})

	_, body := sendRequest(t, site, &operator, "GET", "/", nil)
	for _, want := range []string{`action="/confirm/topic-create"`, `name="topic" value="invoices"`, `name="partitions" value="6"`, "Restore the topic"} {
		if !strings.Contains(body, want) {
			t.Errorf("the card lacks %q", want)
		}
	}

	missing.Partitions = 0
	if _, body = sendRequest(t, site, &operator, "GET", "/", nil); strings.Contains(body, `name="partitions"`) || !strings.Contains(body, "Create the topic") {
		t.Error("a topic that may have any number of partitions has one in its card")
	}
}

// The card of a missing topic creates it, and that of a stream that stands passes over the event. Each question names the topic or the event.
func TestCardsRepairTheirProblem(t *testing.T) {
	t.Parallel()
	desk := &problemDesk{desk: &desk{}, problems: []admin.Problem{
		{Kind: problems.TopicUnwritable, Severity: problems.Fail, Watcher: "orders", Object: "invoices", Title: "Topic invoices cannot be written", Command: "kafka-topics.sh --create --topic 'invoices'"},
		{Kind: problems.StreamStopped, Severity: problems.Fail, Watcher: "orders", Object: "orders/1of2", Title: "The change stream of orders/1of2 makes no progress"},
	}}
	site := New(Options{Watcher: "orders", UseCases: func(_ admin.Actor, _, slot string) UseCases {
		desk.slot = slot
		use := desk.useCases()
		use.Operator = desk
		return use
	}})

	_, body := sendRequest(t, site, &operator, "GET", "/", nil)
	text := html.UnescapeString(strings.Join(strings.Fields(body), " "))
	for _, want := range []string{
		`<code data-copy="the command">kafka-topics.sh --create --topic 'invoices'</code>`, `action="/confirm/topic-create"`, `name="topic" value="invoices"`,
		`action="/confirm/skip"`, `name="slot" value="1of2"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the overview lacks %q", want)
		}
	}

	for _, c := range []struct {
		action string
		form   url.Values
		asked  []string // in the question
		did    string
	}{
		{"topic-create", url.Values{"topic": {"invoices"}}, []string{"Topic invoices is created in Kafka", "kafka-topics.sh", "the default of the brokers"}, "create invoices 0"},
		{"topic-create", url.Values{"topic": {"invoices"}, "partitions": {"6"}}, []string{"6"}, "create invoices 6"},
		{"skip", url.Values{"slot": {"1of2"}}, []string{`name="collection" value="shop.outbox"`, `name="id" value="e-7"`, "becomes a dead letter"}, ""},
		// The question has filled in the event.
		{"skip", url.Values{"slot": {"1of2"}, "collection": {"shop.outbox"}, "id": {"e-7"}}, nil, "skip shop.outbox e-7 1of2"},
	} {
		_, body := sendRequest(t, site, &operator, "POST", "/confirm/"+c.action, c.form)
		for _, want := range c.asked {
			if !strings.Contains(html.UnescapeString(body), want) {
				t.Errorf("%s %v: the question lacks %q", c.action, c.form, want)
			}
		}
		if c.did == "" {
			continue
		}
		desk.did = nil
		c.form.Set("_count", "-1")
		if response, body := sendRequest(t, site, &operator, "POST", "/act/"+c.action, c.form); response.StatusCode != http.StatusSeeOther || !slices.Equal(desk.did, []string{c.did}) {
			t.Errorf("%s %v: %d, did %q: %s", c.action, c.form, response.StatusCode, desk.did, body)
		}
	}

	for name, form := range map[string]url.Values{"no topic": {}, "no number": {"topic": {"t"}, "partitions": {"many"}}, "zero": {"topic": {"t"}, "replication": {"0"}}} {
		if response, _ := sendRequest(t, site, &operator, "POST", "/confirm/topic-create", form); response.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %d", name, response.StatusCode)
		}
	}
}

// waitingDesk is a desk with a parked topic.
type waitingDesk struct {
	*desk
	lag *float64
}

func (d waitingDesk) Overview(context.Context) (admin.Overview, error) {
	return admin.Overview{
		Slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1", State: "live", LagS: d.lag}}, LagS: d.lag, OldestS: 180, Counts: admin.Counts{Parked: 3},
	}, nil
}

// The lag is the same number in the line of figures, the headline, the chart and the card. The age of a parked envelope has another name.
func TestLagHasOneMeaning(t *testing.T) {
	t.Parallel()
	lag := 0.25
	d := &waitingDesk{&desk{}, &lag}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		u := d.useCases()
		u.Operator = d
		return u
	}})

	for path, lags := range map[string]int{"/strip": 1, "/": 4} {
		_, body := sendRequest(t, site, &operator, "GET", path, nil)
		text := strings.Join(strings.Fields(body), " ")
		if !strings.Contains(text, "lag 0.25 s ·") || strings.Count(text, "0.25") != lags || strings.Contains(text, "lag 180") || !strings.Contains(text, "oldest waiting 180 s") && !strings.Contains(text, "oldest waiting 3 min") {
			t.Errorf("%s: %s", path, text)
		}
	}

	// The line of figures, the tile, the card and the point of the chart do not take an unknown lag for 0.
	d.lag = nil
	_, body := sendRequest(t, site, &operator, "GET", "/", nil)
	text := strings.Join(strings.Fields(body), " ")
	for _, want := range []string{"lag – ·", "records, lag –", "<dd>–</dd>", `data-lag=""`} {
		if !strings.Contains(text, want) {
			t.Errorf("without a lag, %q is missing: %s", want, text)
		}
	}
}

// An owner reports a topic that cannot be written before a count finds its events in the store. The tile has at least the events of the card.
func TestTilesAgreeWithTheCards(t *testing.T) {
	t.Parallel()
	missing := admin.Problem{Kind: problems.TopicUnwritable, Severity: problems.Warn, Watcher: "orders", Object: "missing", Count: 48}

	for _, c := range []struct {
		topic       admin.WaitingTopic
		waiting     int64 // the sum of the counts
		want        int64 // of the tile
		ofTheTopic  int64
		description string
	}{
		{admin.WaitingTopic{Topic: "missing"}, 3, 51, 48, "not counted yet"},
		{admin.WaitingTopic{Topic: "missing", Parked: 10, Blocked: 30}, 43, 51, 18, "counted in part"},
		{admin.WaitingTopic{Topic: "missing", Parked: 18, Blocked: 30}, 51, 51, 18, "counted"},
		{admin.WaitingTopic{Topic: "other", Parked: 3}, 3, 3, 3, "another topic"},
	} {
		reported := admin.Overview{Problems: []admin.Problem{missing}, WaitingTopics: []admin.WaitingTopic{c.topic}, Counts: admin.Counts{Retry: c.waiting}}
		shown := newOverview(reported, &view{Watcher: "orders"})

		if got := shown.Tiles(&view{})[0].Count; got != c.want || shown.Waiting() != c.want || shown.WaitingTopics[0].Parked != c.ofTheTopic {
			t.Errorf("%s: the tile has %d events, want %d; the topic has %d parked, want %d", c.description, got, c.want, shown.WaitingTopics[0].Parked, c.ofTheTopic)
		}
		if reported.WaitingTopics[0].Parked != c.topic.Parked {
			t.Errorf("%s: the report was changed", c.description)
		}
	}
}

// busyDesk is a desk whose watcher sends two records per second.
type busyDesk struct{ deskActivity }

func (busyDesk) Minutes(_ context.Context, watcher string, _ int) ([]admin.Minute, error) {
	return []admin.Minute{{At: time.Now().Add(-time.Minute), Rate: map[string]float64{"orders": 2, "stock": 3}[watcher]}}, nil
}

// A refresh renders the small chart of the last hour again: an element that htmx preserves would keep the first one.
func TestARefreshRendersTheSmallChart(t *testing.T) {
	t.Parallel()
	desk := &desk{text: "x"}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		use := desk.useCases()
		use.Activity = busyDesk{deskActivity{desk}}
		return use
	}})

	for _, header := range [][]string{nil, {"HX-Request", "true"}} {
		_, body := sendRequest(t, site, &operator, "GET", "/", nil, header...)
		if !strings.Contains(body, "120 records in the last 60 minutes") || strings.Contains(body, `id="spark-rate"`) {
			t.Errorf("with headers %v, the overview lacks its small chart, or preserves it", header)
		}
	}
}

// twoWatchers is a desk whose state database has the watchers orders and stock.
type twoWatchers struct{ *desk }

func (twoWatchers) Overview(context.Context) (admin.Overview, error) {
	return admin.Overview{Slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1", State: "live"}, {Name: "stock", Slot: "0of1", State: "live"}}}, nil
}

// Each other watcher of the state database has its own small chart beside its verdict.
func TestEachOtherWatcherHasASmallChart(t *testing.T) {
	t.Parallel()
	desk := &desk{text: "x"}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		use := desk.useCases()
		use.Operator, use.Activity = twoWatchers{desk}, busyDesk{deskActivity{desk}}
		return use
	}})

	_, body := sendRequest(t, site, &operator, "GET", "/", nil)
	_, others, found := strings.Cut(body, `class="watchers"`)
	others, _, _ = strings.Cut(others, "</p>")
	if !found || !strings.Contains(others, "stock") || !strings.Contains(others, "180 records in the last 60 minutes") || strings.Contains(others, "120 records") {
		t.Errorf("the other watcher has no chart of its own:\n%s", others)
	}
}
