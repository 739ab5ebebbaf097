package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/chromedp/chromedp"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// stamp is a time as people type it into the page.
func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04") }

// scheduledEvents has one sent now instead of tomorrow, and takes back all others of its type.
func scheduledEvents(s *scene, b *tab) {
	b.open("/scheduled")
	b.says(fmt.Sprintf("%d in all", scheduled))
	b.do("a tick and a time", chromedp.Click(`tbody tr:nth-child(1) input[name=pick]`), chromedp.SetValue(`input[name=due]`, stamp(time.Now().Add(-time.Minute))))
	id := eval[string](b, "document.querySelector('input[name=pick]:checked').value")
	b.press("Reschedule …")
	b.confirm("1 event is due at", "Reschedule 1", "is due at")
	s.until("the event that is due in Kafka", func(context.Context) bool { return s.sent(id) })

	b.open("/scheduled?type=PaymentDue")
	b.do("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.press("Cancel events …")
	b.says("Type cancel 2")
	b.shot("scheduled-cancel-confirm")
	b.do("the phrase", chromedp.SetValue(`input[name=_phrase]`, "cancel 2"))
	b.confirm("2 scheduled events are cancelled", "Cancel events 2", "2 scheduled events cancelled")
	if left := s.count("outbox", bson.D{{Key: "type", Value: "PaymentDue"}}); left != 1 || !s.sent(id) {
		b.t.Errorf("%d events are left of the one that was sent", left)
	}
	if at := eval[string](b, "location.search"); !strings.Contains(at, "type=PaymentDue") {
		b.t.Errorf("the list has forgotten its filter: %s", at)
	}
	b.quiet("scheduled")
}

// replays sends one event again, and breaks off a replay of all of them.
func replays(s *scene, b *tab) {
	b.open("/control")
	b.do("an id", chromedp.SetValue(`textarea[name=id]`, "good-001"))
	b.press("Replay …")
	b.confirm("1 event is sent again", "Replay", "has begun: 1 event")
	s.until("the event in Kafka once more", func(context.Context) bool {
		return s.sent("good-001") && s.count("outbox", bson.D{{Key: "_id", Value: "good-001"}, {Key: "delivery", Value: bson.D{{Key: "$gte", Value: 1}}}}) == 1
	})

	b.open("/control")
	b.do("a slow one", chromedp.SetValue(`input[name=from]`, stamp(time.Now().Add(-time.Hour))), chromedp.SetValue(`input[name=rate]`, "0.05"))
	b.press("Replay …")
	b.confirm("events are sent again", "Replay", "Cancel it …")
	b.open("/control")
	b.pressIn("table", "Resume …")
	b.confirm("goes on with replay", "Resume the replay", "goes on.")
	b.press("Cancel it …")
	b.confirm("what it has queued is sent, the rest is not", "Cancel the replay", "is cancelled")
	for state, want := range map[string]int64{"cancelled": 1, "running": 0} {
		n, err := s.state.Collection("replays").CountDocuments(b.t.Context(), bson.D{{Key: "state", Value: state}, {Key: "query.ids", Value: bson.D{{Key: "$in", Value: bson.A{nil, bson.A{}}}}}})
		if err != nil || n != want {
			b.t.Errorf("%d replays are %s, %v", n, state, err)
		}
	}

	if n := s.count("outbox", bson.D{{Key: "delivery", Value: bson.D{{Key: "$gte", Value: 1}}}, {Key: "_id", Value: bson.Regex{Pattern: "^good-"}}}); n >= delivered {
		b.t.Errorf("%d events are sent again, although the replay was cancelled", n)
	}

	b.quiet("replays")
}

// upkeep purges what was delivered hours ago and mends an index.
func upkeep(s *scene, b *tab) {
	s.age()
	b.open("/control")
	b.do("an age", chromedp.SetValue(`input[name=older]`, "1h"))
	b.press("Purge …")
	b.confirm(fmt.Sprintf("About %d envelopes, delivered and older than 60 min", aged), "Purge", fmt.Sprintf("%d envelopes removed", aged))
	if n := s.count("outbox", bson.D{{Key: "_id", Value: bson.Regex{Pattern: "^good-03[01]$"}}}); n != 0 || !s.sent("good-002") {
		b.t.Errorf("%d old envelopes are left, or a new one is gone", n)
	}

	indexes := s.db.Collection("outbox").Indexes()
	names := func() (out []string) {
		list, err := indexes.ListSpecifications(b.t.Context())
		if err != nil {
			b.t.Fatal(err)
		}
		for _, x := range list {
			out = append(out, x.Name)
		}
		return out
	}
	before := names()
	if err := indexes.DropOne(b.t.Context(), before[len(before)-1]); err != nil {
		b.t.Fatal(err)
	}
	b.press("Rebuild indexes …")
	b.confirm("not as declared", "Rebuild", "The indexes are as declared")
	if after := names(); len(after) != len(before) {
		b.t.Errorf("the indexes are %v; before one was dropped they were %v", after, before)
	}

	b.open("/sagas")
	b.press("order_sagas")
	b.press("saga-1")
	b.says("Its state is hidden")
	b.press("Show the state")
	b.says("paying<img")
	b.quiet("upkeep")
}

// inboxes purges an old marker and releases what somebody holds, who has to be known to be gone.
func inboxes(s *scene, b *tab) {
	b.open("/inbox")
	b.press("Purge markers …")
	b.confirm("About 1 marker", "Purge", "1 marker removed")
	if old, all := s.count("inbox", bson.D{{Key: "_id.i", Value: "old"}}), s.count("inbox", bson.D{}); old != 0 || all == 0 {
		b.t.Errorf("%d old markers of %d are left", old, all)
	}

	b.press("Release claims …")
	b.says("1 of them are held by somebody right now")
	b.says("Nothing would be done")
	b.press("Back")
	b.says("Release claims …")
	b.do("those that are held, too", chromedp.Click(`input[name=force]`))
	b.press("Release claims …")
	b.confirm("can be handled again at once", "Release", "1 claim released")
	if n := s.count("inbox_claims", bson.D{}); n != 0 {
		b.t.Errorf("%d claims are left", n)
	}

	b.quiet("inbox")
}

// nodesAndPins hands the watcher from node to node, and takes a node off the list that is gone.
func nodesAndPins(s *scene, b *tab) {
	const id = "orders/0of1"
	other := map[string]string{"one": "two", "two": "one"}
	first := s.slot(id).Node
	s.heard("gone", time.Now().Add(-time.Hour), "orders")
	b.open("/nodes")
	b.do("the owner", chromedp.SetValue(`select[name=node]`, first), chromedp.SetValue(`input[name=hold]`, "2s"))
	b.press("Release its slots …")
	b.confirm("gives up every slot that it owns, for 2 s", "Release", "gives up "+id)
	s.until("the other node", func(context.Context) bool { now := s.slot(id); return now.Owner != "" && now.Node == other[first] })
	b.do("the node that is gone", chromedp.SetValue(`select[name=node]`, "gone"))
	b.press("Remove it from the list …")
	b.confirm("is taken off the list", "Remove", "is off the list")
	if n, err := s.state.Collection("nodes").CountDocuments(b.t.Context(), bson.D{{Key: "_id", Value: "gone"}}); err != nil || n != 0 {
		b.t.Errorf("the node is still there: %v", err)
	}

	b.open("/control")
	b.do("the other node", chromedp.SetValue(`select[name=node]`, first))
	b.press("Pin …")
	b.confirm("is handed to node "+first, "Pin", "is pinned to "+first)
	s.until("the node that it is pinned to", func(context.Context) bool {
		now := s.slot(id)
		return now.Owner != "" && now.Node == first && now.Control.Pin == first
	})
	b.press("End the pin …") // of the notice
	b.confirm("any node may take over from there", "End the pin", "has ended")
	if pin := s.slot(id).Control.Pin; pin != "" {
		b.t.Errorf("it is still pinned to %s", pin)
	}
	b.quiet("nodes and pins")
}

// heard writes down a node that last gave a sign of life then.
func (s *scene) heard(node string, at time.Time, watcher string) {
	s.t.Helper()
	if _, err := s.state.Collection("nodes").InsertOne(s.t.Context(), bson.D{
		{Key: "_id", Value: node}, {Key: "watchers", Value: bson.A{watcher}}, {Key: "kafkaReachable", Value: true}, {Key: "startedAt", Value: at}, {Key: "seenAt", Value: at},
	}); err != nil {
		s.t.Fatal(err)
	}
}

// slots acts on single slots of another watcher that has two: one that a node owns, and one that is paused and pinned.
func slots(s *scene, b *tab) {
	s.heard("three", time.Now(), "split")
	for _, doc := range []bson.D{
		{{Key: "_id", Value: "split/0of2"}, {Key: "owner", Value: "three/x"}, {Key: "node", Value: "three"}, {Key: "epoch", Value: int64(4)}, {Key: "expiresAt", Value: time.Now().Add(time.Hour)}},
		{{Key: "_id", Value: "split/1of2"}, {Key: "owner", Value: nil}, {Key: "node", Value: "three"}, {Key: "epoch", Value: int64(7)}, {Key: "expiresAt", Value: time.UnixMilli(0)}, {Key: "control", Value: bson.D{{Key: "paused", Value: true}, {Key: "pin", Value: "three"}}}},
	} {
		if _, err := s.state.Collection("watchers").InsertOne(b.t.Context(), doc); err != nil {
			b.t.Fatal(err)
		}
	}

	b.open("/control?watcher=split")
	b.says("1of2")
	for _, width := range []int64{360, 1280} {
		b.size(width, 900)
		if over := eval[int](b, "document.documentElement.scrollWidth - document.documentElement.clientWidth"); over > 0 {
			b.t.Errorf("the slots scroll sideways by %d px at %d px", over, width)
		}
		b.shot(fmt.Sprintf("slots-%d", width))
	}

	b.accessible("slots")
	b.pressIn(`tr[data-slot="1of2"]`, "Resume …")
	b.confirm("Slot 1of2 of watcher split goes on where it stopped", "Resume", "Slot 1of2 of watcher split goes on.")
	b.pressIn(`tr[data-slot="1of2"]`, "End the pin …")
	b.confirm("Slot 1of2 of watcher split stays where it is", "End the pin", "The pin of slot 1of2")
	if c := s.slot("split/1of2").Control; c.Paused || c.Pin != "" {
		b.t.Errorf("slot 1of2 has %+v", c)
	}

	b.pressIn(`tr[data-slot="0of2"]`, "Step down …")
	b.confirm("The owner of slot 0of2 of watcher split", "Step down", "The owner of slot 0of2")
	if !s.slot("split/0of2").Control.StepDown.After(time.Now()) || !s.slot("split/1of2").Control.StepDown.IsZero() {
		b.t.Error("another slot than 0of2 steps down")
	}

	b.quiet("slots")
}

// quoted is a list as JavaScript has it.
func quoted(list []string) string {
	return "['" + strings.Join(list, "', '") + "']"
}

// viewer logs in as somebody who may only look.
func viewer(s *scene, b *tab) {
	operator := b.url
	defer func() { b.url = operator }()
	b.url = strings.Replace(s.login, "://", "://vera:"+viewerToken+"@", 1)
	b.open("/")
	b.url = s.login                   // the browser knows her now; from an address with a password nothing can be fetched
	b.open("/dead?class=not_allowed") // of which only the payloads hold what is looked for below
	b.says("vera · viewer")
	b.forget()
	offers := "querySelectorAll('form[method=post] button, [formaction], input[name=pick]').length"
	for at, n := range eval[map[string]int](b, fmt.Sprintf(`Promise.all(%s.map((at) => fetch(at).then((r) => r.text()).then((t) => [at, new DOMParser().parseFromString(t, 'text/html').%s]))).then(Object.fromEntries)`, quoted(append([]string{"/control?watcher=split"}, pages...)), offers)) {
		if n != 0 {
			b.t.Errorf("%s offers a viewer %d buttons that act", at, n)
		}
	}

	if eval[int](b, "document.querySelectorAll('tbody tr').length") == 0 {
		b.t.Error("a viewer sees no letters")
	}

	b.shot("viewer")
	b.open(eval[string](b, `document.querySelector('a[href^="/dead/letter"]').getAttribute('href')`) + "&payload=1")
	b.says("your role may not see it")
	if strings.Contains(b.text(), "onerror") || eval[int](b, "document."+offers) != 0 {
		b.t.Error("a viewer sees a payload, or may act on a letter")
	}

	b.quiet("viewer")
	for path, kind := range map[string]string{
		"/act/pause": "application/x-www-form-urlencoded", "/confirm/dead-discard": "application/x-www-form-urlencoded", "/act/dead-discard": "application/x-www-form-urlencoded",
		"/api/v1/watchers/orders/pause": "application/json", "/api/v1/clear": "application/json",
	} {
		body := "scope=all&_count=-1"
		if kind == "application/json" {
			body = `{"what":["dead"],"confirm":"clear orders","force":true}`
		}
		if got := eval[int](b, fmt.Sprintf("fetch(%q, {method: 'POST', headers: {'Content-Type': %q}, body: %q}).then((r) => r.status)", path, kind, body)); got != 403 {
			b.t.Errorf("a viewer who sends %s gets %d", path, got)
		}
	}

	if s.slot("orders/0of1").Control.Paused || s.count("outbox_dead", bson.D{}) == 0 {
		b.t.Error("a viewer acted")
	}

	b.forget() // what the browser says of answers 403
}

// clearing empties the dead letters: not below a relay that works, and not without the phrase.
func clearing(s *scene, b *tab) {
	b.open("/control")
	b.do("dead letters", chromedp.Click(`input[name=what][value=dead]`))
	b.press("Clear …")
	b.says("works for it on slot 0of1")
	b.says("Nothing would be done")
	b.press("Back")
	b.says("Empties collections for good")
	b.do("dead letters, all the same", chromedp.Click(`input[name=what][value=dead]`), chromedp.Click(`form[action="/confirm/clear"] input[name=force]`))
	before := s.count("outbox", bson.D{})
	b.press("Clear …")
	b.says("Type clear orders to confirm")
	b.do("the phrase", chromedp.SetValue(`input[name=_phrase]`, "clear orders"))
	b.confirm("removed for good", "Clear for good", "removed")
	if dead, box := s.count("outbox_dead", bson.D{}), s.count("outbox", bson.D{}); dead != 0 || box != before {
		b.t.Errorf("%d letters are left, and %d envelopes of %d", dead, box, before)
	}

	b.quiet("clearing")
}
