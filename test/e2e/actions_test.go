package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/chromedp/chromedp"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// reader is the time zone of the browser.
var reader = time.FixedZone("Asia/Kolkata", 5*3600+1800)

// formatInput formats a time in the format of the input fields, which show the zone of the reader.
func formatInput(t time.Time) string { return t.In(reader).Format("2006-01-02T15:04") }

// testScheduledEvents sends one scheduled event now instead of tomorrow, and cancels all others of its type.
func testScheduledEvents(s *scene, b *tab) {
	b.openPage("/scheduled")
	b.waitForText(fmt.Sprintf("%d in all", scheduled))
	b.runActions("a tick and a time", chromedp.Click(`tbody tr:nth-child(1) input[name=pick]`), chromedp.SetValue(`input[name=due]`, formatInput(time.Now().Add(-time.Minute))))
	id := evaluateScript[string](b, "document.querySelector('input[name=pick]:checked').ariaLabel.replace('Select ', '')")
	b.clickButton("Reschedule …")
	b.confirmAction("1 event is due at", "Reschedule 1", "is due at")
	s.waitUntil("the event that is due in Kafka", func(context.Context) bool { return s.allSent(id) })

	b.openPage("/scheduled?type=PaymentDue")
	b.runActions("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.clickButton("Cancel events …")
	b.waitForText("Type cancel 2")
	b.takeScreenshot("scheduled-cancel-confirm")
	b.runActions("the phrase", chromedp.SetValue(`input[name=_phrase]`, "cancel 2"))
	b.confirmAction("2 scheduled events are cancelled", "Cancel events 2", "2 scheduled events cancelled")
	if left := s.countDocuments("outbox", bson.D{{Key: "type", Value: "PaymentDue"}}); left != 1 || !s.allSent(id) {
		b.t.Errorf("%d events of type PaymentDue are left, want only the sent event", left)
	}
	if at := evaluateScript[string](b, "location.search"); !strings.Contains(at, "type=PaymentDue") {
		b.t.Errorf("the list has forgotten its filter: %s", at)
	}
	b.checkConsole("scheduled")
}

// testReplays replays one event, and cancels a replay of all events.
func testReplays(s *scene, b *tab) {
	b.openPage("/control")
	b.runActions("an id", chromedp.SetValue(`textarea[name=id]`, "good-001"))
	b.clickButton("Replay …")
	b.confirmAction("1 event is sent again", "Replay", "has begun: 1 event")
	s.waitUntil("the event in Kafka once more", func(context.Context) bool {
		return s.allSent("good-001") && s.noneWaits("good-001") && s.countIn(s.state.Collection("replays"), bson.D{{Key: "state", Value: "done"}, {Key: "queued", Value: 1}}) == 1
	})

	b.openPage("/control")
	b.runActions("a slow one", chromedp.SetValue(`input[name=from]`, formatInput(time.Now().Add(-time.Hour))), chromedp.SetValue(`input[name=rate]`, "0.05"))
	b.clickButton("Replay …")
	b.confirmAction("events are sent again", "Replay", "Cancel it …")
	b.openPage("/control")
	b.clickButtonIn("table", "Resume …")
	b.confirmAction("goes on with replay", "Resume the replay", "goes on.")
	b.clickButton("Cancel it …")
	b.confirmAction("queued envelopes are sent, the others are not", "Cancel the replay", "is cancelled")
	for state, want := range map[string]int64{"cancelled": 1, "running": 0} {
		n, err := s.state.Collection("replays").CountDocuments(b.t.Context(), bson.D{{Key: "state", Value: state}, {Key: "query.ids", Value: bson.D{{Key: "$in", Value: bson.A{nil, bson.A{}}}}}})
		if err != nil || n != want {
			b.t.Errorf("%d replays are %s, %v", n, state, err)
		}
	}

	part := bson.D{{Key: "state", Value: "cancelled"}, {Key: "queued", Value: bson.D{{Key: "$lt", Value: delivered}}}}
	if s.countIn(s.state.Collection("replays"), part) != 1 {
		b.t.Error("all events are sent again, although the replay was cancelled")
	}

	b.checkConsole("replays")
}

// testMaintenance purges envelopes that were delivered hours ago, and shows the state of a saga.
func testMaintenance(s *scene, b *tab) {
	s.ageDelivered()
	b.openPage("/control")
	b.runActions("an age", chromedp.SetValue(`input[name=older]`, "1h"))
	b.clickButton("Purge …")
	b.confirmAction(fmt.Sprintf("About %d envelopes, delivered and older than 60 min", aged), "Purge", fmt.Sprintf("%d envelopes removed", aged))
	if n := s.countDocuments("outbox", bson.D{{Key: "_id", Value: bson.Regex{Pattern: "^good-03[01]$"}}}); n != 0 || !s.allSent("good-002") {
		b.t.Errorf("%d old envelopes are left, or a new one is gone", n)
	}

	b.openPage("/sagas")
	b.clickButton("order_sagas")
	b.clickButton("saga-1")
	b.waitForText("Its state is hidden")
	b.clickButton("Show the state")
	b.waitForText("paying<img")
	b.checkConsole("upkeep")
}

// testInboxes purges an old mark, and releases a live claim with the required confirmation.
func testInboxes(s *scene, b *tab) {
	b.openPage("/inbox")
	b.clickButton("Purge marks …")
	b.confirmAction("About 1 mark", "Purge", "1 mark removed")
	if old, all := s.countDocuments("inbox", bson.D{{Key: "_id.i", Value: "old"}}), s.countDocuments("inbox", bson.D{}); old != 0 || all == 0 {
		b.t.Errorf("%d old markers of %d are left", old, all)
	}

	b.clickButton("Release claims …")
	b.waitForText("1 claim is live")
	b.waitForText("This action would change nothing")
	b.clickButton("Back")
	b.waitForText("Release claims …")
	b.runActions("the claims that are held, too", chromedp.Click(`input[name=force]`))
	b.clickButton("Release claims …")
	b.confirmAction("can be handled again at once", "Release", "1 claim released")
	if n := s.countDocuments("inbox_claims", bson.D{}); n != 0 {
		b.t.Errorf("%d claims are left", n)
	}

	b.checkConsole("inbox")
}

// testNodesAndPins moves the watcher from node to node, and removes a stopped node from the list.
func testNodesAndPins(s *scene, b *tab) {
	const id = "orders/0of1"
	other := map[string]string{"one": "two", "two": "one"}
	// The part before has handed the slot over.
	var first string
	s.waitUntil("an owner", func(context.Context) bool {
		now := s.readSlot(id)
		first = now.Node
		return now.Owner != ""
	})
	s.setLastHeartbeat("gone", time.Now().Add(-time.Hour), "orders")
	b.openPage("/nodes")
	b.runActions("the owner", chromedp.SetValue(`select[name=node]`, first), chromedp.SetValue(`input[name=hold]`, "2s"))
	b.clickButton("Release its slots …")
	b.confirmAction("gives up every slot that it owns, for 2 s", "Release", "gives up "+id)
	s.waitUntil("the other node", func(context.Context) bool { now := s.readSlot(id); return now.Owner != "" && now.Node == other[first] })
	b.runActions("the node that is gone", chromedp.SetValue(`select[name=node]`, "gone"))
	b.clickButton("Remove it from the list …")
	b.confirmAction("is taken off the list", "Remove", "is off the list")
	if n, err := s.state.Collection("nodes").CountDocuments(b.t.Context(), bson.D{{Key: "_id", Value: "gone"}}); err != nil || n != 0 {
		b.t.Errorf("the node is still there: %v", err)
	}

	b.openPage("/control")
	b.runActions("the other node", chromedp.SetValue(`select[name=node]`, first))
	b.clickButton("Pin …")
	b.confirmAction("is handed to node "+first, "Pin", "is pinned to "+first)
	s.waitUntil("the node that it is pinned to", func(context.Context) bool {
		now := s.readSlot(id)
		return now.Owner != "" && now.Node == first && now.Control.Pin == first
	})
	b.clickButton("End the pin …") // in the notice
	b.confirmAction("any node may take over from there", "End the pin", "has ended")
	if pin := s.readSlot(id).Control.Pin; pin != "" {
		b.t.Errorf("it is still pinned to %s", pin)
	}
	b.checkConsole("nodes and pins")
}

// setLastHeartbeat inserts a node with this last heartbeat.
func (s *scene) setLastHeartbeat(node string, at time.Time, watcher string) {
	s.t.Helper()
	if _, err := s.state.Collection("nodes").InsertOne(s.t.Context(), bson.D{
		{Key: "_id", Value: node}, {Key: "watchers", Value: bson.A{watcher}}, {Key: "kafkaReachable", Value: true}, {Key: "startedAt", Value: at}, {Key: "seenAt", Value: at},
	}); err != nil {
		s.t.Fatal(err)
	}
}

// testSlots acts on single slots of another watcher with two slots: one has an owner, the other is
// paused and pinned.
func testSlots(s *scene, b *tab) {
	s.setLastHeartbeat("three", time.Now(), "split")
	for _, doc := range []bson.D{
		{{Key: "_id", Value: "split/0of2"}, {Key: "owner", Value: "three/x"}, {Key: "node", Value: "three"}, {Key: "epoch", Value: int64(4)}, {Key: "expiresAt", Value: time.Now().Add(time.Hour)}},
		{{Key: "_id", Value: "split/1of2"}, {Key: "owner", Value: nil}, {Key: "node", Value: "three"}, {Key: "epoch", Value: int64(7)}, {Key: "expiresAt", Value: time.UnixMilli(0)}, {Key: "control", Value: bson.D{{Key: "paused", Value: true}, {Key: "pin", Value: "three"}}}},
	} {
		if _, err := s.state.Collection("watchers").InsertOne(b.t.Context(), doc); err != nil {
			b.t.Fatal(err)
		}
	}

	b.openPage("/control?watcher=split")
	b.waitForText("1of2")
	for _, width := range []int64{360, 1280} {
		b.setWindowSize(width, 900)
		if over := evaluateScript[int](b, "document.documentElement.scrollWidth - document.documentElement.clientWidth"); over > 0 {
			b.t.Errorf("the slots scroll sideways by %d px at %d px", over, width)
		}
		b.takeScreenshot(fmt.Sprintf("slots-%d", width))
	}

	b.checkAccessibility("slots")
	b.clickButtonIn(`tr[data-slot="1of2"]`, "Resume …")
	b.confirmAction("Slot 1of2 of watcher split goes on where it stopped", "Resume", "Slot 1of2 of watcher split goes on.")
	b.clickButtonIn(`tr[data-slot="1of2"]`, "End the pin …")
	b.confirmAction("Slot 1of2 of watcher split stays where it is", "End the pin", "The pin of slot 1of2")
	if c := s.readSlot("split/1of2").Control; c.Paused || c.Pin != "" {
		b.t.Errorf("slot 1of2 has %+v", c)
	}

	b.clickButtonIn(`tr[data-slot="0of2"]`, "Step down …")
	b.waitForText("no other live node can take over split/0of2")
	b.runActions("the phrase", chromedp.SetValue(`input[name=_phrase]`, "stop split"))
	b.confirmAction("The owner of slot 0of2 of watcher split", "Step down", "The owner of slot 0of2")
	if !s.readSlot("split/0of2").Control.StepDown.After(time.Now()) || !s.readSlot("split/1of2").Control.StepDown.IsZero() {
		b.t.Error("another slot than 0of2 steps down")
	}

	b.checkConsole("slots")
}

// quoteList formats a list as JavaScript.
func quoteList(list []string) string {
	return "['" + strings.Join(list, "', '") + "']"
}

// testViewer logs in as a viewer.
func testViewer(s *scene, b *tab) {
	operator := b.url
	defer func() { b.url = operator }()
	b.url = s.login
	// The texts below appear only in the payloads.
	b.openPage("/dead?class=not_allowed")
	b.waitForText("Log in to outrelay")
	b.checkAccessibility("login")
	b.runActions("a wrong token", chromedp.SetValue(`input[name=name]`, "vera"), chromedp.SetValue(`input[name=token]`, "guessed-token"))
	b.clickButton("Log in")
	b.waitForText("The token is not one of this listener's")
	// The console shows the response with status 401.
	b.clearConsole()
	b.runActions("the token", chromedp.SetValue(`input[name=name]`, "vera"), chromedp.SetValue(`input[name=token]`, viewerToken))
	b.takeScreenshot("login")
	b.clickButton("Log in")
	b.waitForText("vera · viewer")
	b.clearConsole()
	offers := "querySelectorAll('form[method=post]:not([action^=\"/log\"]) button, [formaction], input[name=pick]').length"
	for at, n := range evaluateScript[map[string]int](b, fmt.Sprintf(`Promise.all(%s.map((at) => fetch(at).then((r) => r.text()).then((t) => [at, new DOMParser().parseFromString(t, 'text/html').%s]))).then(Object.fromEntries)`, quoteList(append([]string{"/control?watcher=split"}, pages...)), offers)) {
		if n != 0 {
			b.t.Errorf("%s offers a viewer %d buttons that act", at, n)
		}
	}

	if evaluateScript[int](b, "document.querySelectorAll('tbody tr').length") == 0 {
		b.t.Error("a viewer sees no letters")
	}

	b.takeScreenshot("viewer")
	b.openPage(evaluateScript[string](b, `document.querySelector('a[href^="/dead/letter"]').getAttribute('href')`) + "&payload=1")
	b.waitForText("Your role cannot read payloads")
	if strings.Contains(b.pageText(), "onerror") || evaluateScript[int](b, "document."+offers) != 0 {
		b.t.Error("a viewer sees a payload, or may act on a letter")
	}

	b.checkConsole("viewer")
	for path, kind := range map[string]string{
		"/act/pause": "application/x-www-form-urlencoded", "/confirm/dead-discard": "application/x-www-form-urlencoded", "/act/dead-discard": "application/x-www-form-urlencoded",
		"/api/v1/watchers/orders/pause": "application/json", "/api/v1/clear": "application/json",
	} {
		body := "scope=all&_count=-1"
		if kind == "application/json" {
			body = `{"what":["dead"],"confirm":"clear orders","force":true}`
		}
		if got := evaluateScript[int](b, fmt.Sprintf("fetch(%q, {method: 'POST', headers: {'Content-Type': %q}, body: %q}).then((r) => r.status)", path, kind, body)); got != 403 {
			b.t.Errorf("a viewer who sends %s gets %d", path, got)
		}
	}

	if s.readSlot("orders/0of1").Control.Paused || s.countLetters(bson.D{}) == 0 {
		b.t.Error("a viewer acted")
	}

	// The browser logs responses with status 403.
	b.clearConsole()
	b.openPage("/")
	b.clickButtonIn("header", "Log out")
	b.waitForText("Log in to outrelay")
	b.openPage("/nodes")
	b.waitForText("Log in to outrelay")
	b.checkConsole("login")
}

// testClearing clears the dead letters. This is rejected while a relay runs, and without the phrase.
func testClearing(s *scene, b *tab) {
	b.openPage("/control")
	b.runActions("dead letters", chromedp.Click(`input[name=what][value=dead]`))
	b.clickButton("Clear …")
	b.waitForText("works for it on slot 0of1")
	b.waitForText("This action would change nothing")
	b.clickButton("Back")
	b.waitForText("Deletes all documents of the chosen collections")
	b.runActions("dead letters, all the same", chromedp.Click(`input[name=what][value=dead]`), chromedp.Click(`form[action="/confirm/clear"] input[name=force]`))
	before := s.countDocuments("outbox", bson.D{})
	b.clickButton("Clear …")
	b.waitForText("Type clear orders to confirm")
	b.runActions("the phrase", chromedp.SetValue(`input[name=_phrase]`, "clear orders"))
	b.confirmAction("removed for good", "Clear for good", "removed")
	if dead, box := s.countLetters(bson.D{}), s.countDocuments("outbox", bson.D{}); dead != 0 || box != before {
		b.t.Errorf("%d letters are left, and %d envelopes of %d", dead, box, before)
	}

	b.checkConsole("clearing")
}
