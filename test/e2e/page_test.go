package e2e

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// pages are the pages without an id in their path.
var pages = []string{"/", "/topics", "/topics/recent", "/waiting?limit=12", "/waiting/handlers", "/dead?limit=8", "/lookup", "/nodes", "/log", "/scheduled", "/sagas", "/inbox", "/groups", "/control"}

// TestPage runs all parts in order in one scene and one browser. Each part depends on the previous ones.
func TestPage(t *testing.T) {
	began := time.Now()
	// Open the browser first, because this fails early if there is none.
	b, ready := openTab(t)
	s := openScene(t)
	b.url = s.url
	if err := <-ready; err != nil {
		t.Fatal(err)
	}

	t.Logf("the scene is set after %.1f s", time.Since(began).Seconds())
	part := func(name string, f func(*scene, *tab)) {
		if t.Failed() {
			// Later parts depend on the failed one.
			return
		}
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			outer := b.t
			b.t = t
			defer func() { b.t = outer }()
			f(s, b)
			t.Logf("%.1f s", time.Since(began).Seconds())
		})
	}

	part("Overview", testOverview)
	part("Charts", testCharts)
	part("Navigation", testNavigation)
	part("Terms", testTerms)
	part("Rows", testRows)
	part("Times", testTimes)
	part("Selection", testSelection)
	part("Tables", testTables)
	part("WidthsAndAccess", testWidthsAndAccess)
	part("Keyboard", testKeyboard)
	part("Colours", testColors)
	part("DeadLetters", testDeadLetters)
	part("EditAndRequeue", testEditAndRequeue)
	part("HandlerLetters", testHandlerLetters)
	part("HandlerWaiting", testHandlerWaiting)
	part("LookUp", testLookup)
	part("Topics", testTopics)
	part("TopicCreated", testTopicCreated)
	part("Scheduled", testScheduledEvents)
	part("Replays", testReplays)
	part("Upkeep", testMaintenance)
	part("Inbox", testInboxes)
	part("StepDownAndPause", testStepDownAndPause)
	part("NodesAndPins", testNodesAndPins)
	part("Slots", testSlots)
	part("Groups", testGroups)
	part("HostileText", testHostileText)
	part("Viewer", testViewer)
	part("Clear", testClearing)
	part("AutoRefresh", testAutoRefresh)
	part("MongoDBAway", testMongoAway)
	if left := s.actions.findMissing(b.offered); len(left) > 0 || len(b.offered) < 20 {
		t.Errorf("the test did not perform %[2]q of the %[1]d actions on the pages", len(b.offered), left)
	}

	if *writeDocs {
		t.Logf("screenshots are in %s", b.dir)
	}
}

func testOverview(s *scene, b *tab) {
	b.openPage("/")
	b.waitForText("slot 0of1")
	b.waitUntil("the owner and its figures", `/Epoch\s*\d/.test(document.body.textContent) && document.querySelector('.s-live, .s-blocked')`)
	b.waitUntil("the counts", fmt.Sprintf(`[...document.querySelectorAll('.tiles a')].some((a) => a.innerText.replace(/\s+/g, ' ').includes('%d dead letters'))`, forbidden+expired))
	b.clickButton("Lease and position")
	for _, want := range []string{"Oplog left", "Lag", "oldest waiting", "Throughput", "Waiting by topic", s.topic + "-missing", "Nodes", "one", "two", "All counts", fmt.Sprintf("%d scheduled", scheduled)} {
		b.waitUntil(fmt.Sprintf("%q on the overview", want), fmt.Sprintf(`document.body.innerText.replace(/\s+/g, ' ').includes(%q)`, want))
	}

	b.waitForText("Problems")
	b.waitUntil("the command that creates the missing topic, with a button that copies it", `document.querySelector('.problem code[data-copy] + .copy') && document.body.innerText.includes('kafka-topics.sh')`)
	b.waitUntil("times in the zone of the reader", `[...document.querySelectorAll('time')].every((e) => e.title.endsWith('Z'))`)
	if n := evaluateScript[int](b, "fetch('/history').then((r) => r.json()).then((h) => h.points.length)"); n < remembered {
		b.t.Errorf("the history has %d minutes, want %d", n, remembered)
	}

	b.waitUntil("a chart", `document.querySelector('#chart-rate canvas') && document.querySelector('#chart-lag canvas')`)
	b.clickButton("6 h")
	b.waitUntil("the range", `document.querySelector('[data-range="21600"]').getAttribute('aria-pressed') === 'true'`)
	b.waitUntil("the charts in words", `/now [\d.,]+, least [\d.,]+, most [\d.,]+/.test(document.getElementById('summary-rate').innerText)`)
	b.waitUntil("a mark of the takeover", `[...document.querySelectorAll('#marks a')].some((a) => /takeover on (one|two)/.test(a.innerText))`)
	b.waitUntil("the value under the pointer", `(() => {
		const over = document.querySelector('#chart-rate .u-over'), box = over.getBoundingClientRect();
		over.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + 10}));
		return /^\d\d:\d\d:\d\d [\d.,]+\/s/.test(document.getElementById('summary-rate').innerText);
	})()`)
	b.clickButton("The same as a table")
	b.waitUntil("the charts as a table", `document.querySelectorAll('#chart-table tbody tr').length > 2 && /\d/.test(document.querySelector('#chart-table tbody').innerText)`)
	b.clickButton("The same as a table")
	b.waitUntil("the first words to be about the watcher", `/^(✓ ok|! warn|✕ fail) Watcher orders: /.test(document.getElementById('figures').innerText)`)
	b.takeScreenshot("overview-light")
	b.checkConsole("overview")
}

// testCharts adds a minute and a mark to the history of an open page, which reads it again after a minute.
func testCharts(s *scene, b *tab) {
	b.openPage("/")
	b.waitUntil("the marks of the history", `document.querySelector('#marks a')`)

	now := time.Now()
	if _, err := s.state.Collection("audit").InsertOne(b.t.Context(), bson.D{
		{Key: "at", Value: now}, {Key: "kind", Value: "gap_closed"}, {Key: "watcher", Value: "orders"}, {Key: "node", Value: "one"}, {Key: "fields", Value: bson.D{}},
	}); err != nil {
		b.t.Fatal(err)
	}
	minute := bson.D{{Key: "t", Value: now}, {Key: "r", Value: 1.0}, {Key: "l", Value: 0.0}, {Key: "p50", Value: 12.0}, {Key: "p99", Value: 4321.0}}
	push := bson.D{{Key: "$push", Value: bson.D{{Key: "samples", Value: minute}}}}
	if _, err := s.state.Collection("history").UpdateOne(b.t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}, push); err != nil {
		b.t.Fatal(err)
	}

	evaluateScript[bool](b, "(() => { const now = Date.now; Date.now = () => now() + 60_000; return true; })()")
	b.waitUntil("the new mark", `[...document.querySelectorAll('#marks a')].some((a) => a.innerText.endsWith('gap closed on one'))`)
	b.waitUntil("the latency of the new minute", `document.getElementById('summary-p99').dataset.all.includes('most 4,321')`)
	b.checkConsole("charts")
}

// testWidthsAndAccess checks each page: no horizontal scrolling and no broken word on small and large screens, no
// serious finding of axe in light, in dark and on a phone, and no message on the console.
func testWidthsAndAccess(s *scene, b *tab) {
	letter := evaluateScript[string](b, `fetch('/dead').then((r) => r.text()).then((t) => new DOMParser().parseFromString(t, 'text/html').querySelector('a[href^="/dead/letter"]').getAttribute('href'))`)
	entry := evaluateScript[string](b, `fetch('/log').then((r) => r.text()).then((t) => new DOMParser().parseFromString(t, 'text/html').querySelector('a[href^="/log/entry"]').getAttribute('href'))`)
	for _, at := range append([]string{"/lookup?q=good-001", "/lookup?conversation=good-001", letter + "&payload=1", "/nodes/node?node=one", entry}, pages...) {
		b.openPage(at)
		b.waitUntil("the page", "document.readyState === 'complete'")
		if at != "/" && !strings.Contains(at, "payload") {
			b.waitUntil("the strip", "document.querySelector('#strip .status')")
		}

		path, _, _ := strings.Cut(at, "?")
		name := strings.ReplaceAll(strings.Trim(path, "/"), "/", "-")
		if name == "" {
			name = "overview"
		}

		for _, width := range []int64{360, 390, 1024, 1280, 2560} {
			b.setWindowSize(width, 900)
			if over := evaluateScript[int](b, "document.documentElement.scrollWidth - document.documentElement.clientWidth"); over > 0 {
				b.t.Errorf("%s scrolls sideways by %d px at %d px: %s", at, over, width, evaluateScript[string](b, `[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(e).position !== 'absolute').slice(0, 4).map((e) => e.outerHTML.slice(0, 120)).join(' | ')`))
			}
			if broken := evaluateScript[[]string](b, brokenWords); len(broken) > 0 {
				b.t.Errorf("%s at %d px: these words are broken: %q", at, width, broken)
			}
			if over := evaluateScript[[]string](b, `[...document.querySelectorAll('td, th, dd, .tiles li')].filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map((e) => e.innerText)`); len(over) > 0 {
				b.t.Errorf("%s at %d px: these texts are wider than their places: %q", at, width, over)
			}
			b.waitUntil("the present page in the list of pages", `[...document.querySelectorAll('.areas [aria-current]')].every((e) => e.getBoundingClientRect().left >= 0 && e.getBoundingClientRect().right <= innerWidth)`)
			if width != 2560 {
				b.takeScreenshot(fmt.Sprintf("%s-%d", name, width))
			}
		}
		if *writeDocs {
			b.takeDark(name)
		}

		b.setWindowSize(360, 900)
		b.checkAccessibility(at + " on a phone")
		b.setWindowSize(1280, 900)
		b.checkAccessibility(at)
		b.setColorScheme("dark")
		b.checkAccessibility(at + " in the dark")
		b.setColorScheme("light")
		b.checkConsole(at)
	}
}

// takeDark saves pictures of the page in dark, on a phone and on a laptop.
func (b *tab) takeDark(name string) {
	b.t.Helper()
	b.setColorScheme("dark")
	for _, width := range []int64{390, 1280} {
		b.setWindowSize(width, 900)
		b.takeScreenshot(fmt.Sprintf("%s-dark-%d", name, width))
	}
	b.setColorScheme("light")
}

// brokenWords are the words and names, of letters, digits, dots and underscores, that stand in more than one line although they have at
// most 24 characters, or 16 on a phone. A line may end at a hyphen. Longer names and ids break where they have to.
const brokenWords = `(() => {
	const broken = new Set(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
	for (let n; (n = walk.nextNode());) {
		if (!n.parentElement.checkVisibility()) continue;
		for (const m of n.data.matchAll(/(?<![^\s-])[("']?[\w.]{2,24}[,:;!?)'"]*(?![^\s-])/g)) {
			if (m[0].length > (innerWidth < 700 ? 16 : 24)) continue;
			range.setStart(n, m.index);
			range.setEnd(n, m.index + m[0].length);
			if (new Set([...range.getClientRects()].map((r) => Math.round(r.top / 4))).size > 1) broken.add(m[0]);
		}
	}
	return [...broken];
})()`

// testKeyboard checks for each page that Tab reaches each link and input, and that the focus is visible.
func testKeyboard(s *scene, b *tab) {
	b.openPage("/")
	// A refresh would replace marked elements.
	b.clickButtonIn("header", "Pause refresh")
	for _, at := range pages {
		b.openPage(at)
		if at == "/" {
			b.waitUntil("the charts and their marks", `document.querySelector('#chart-p99 canvas') && document.querySelector('#marks a')`)
		} else {
			b.waitUntil("the strip", "document.querySelector('#strip .status')")
		}
		b.runActions("Tab", chromedp.KeyEvent(kb.Tab))
		if got := evaluateScript[string](b, "document.activeElement.textContent"); got != "Skip to content" {
			b.t.Errorf("%s: Tab starts at %q, want the skip link", at, got)
		}

		want := evaluateScript[int](b, `(() => { const all = [...document.querySelectorAll('a[href],button,input:not([type=hidden]),select,textarea,summary,[tabindex="0"]')].filter((e) => e.getClientRects().length && !e.disabled && !(e.closest('details:not([open])') && e.tagName !== 'SUMMARY'));
			all.forEach((e, i) => e.dataset.walk = i); window.seen = new Set(); return all.length; })()`)
		// Tab reaches one radio button of a group; the arrow keys reach the others.
		want -= evaluateScript[int](b, `[...document.querySelectorAll('input[type=radio]')].length - new Set([...document.querySelectorAll('input[type=radio]')].map((e) => e.name)).size`)
		note := `(() => { const e = document.activeElement; if (e && e.dataset && e.dataset.walk) window.seen.add(e.dataset.walk); return window.seen.size; })()`
		// The browser draws the outline, and scrolls to the element, at its next frames. A person waits for both.
		const isFocusSeen = `(() => { const e = document.activeElement; if (!e || !e.dataset || !e.dataset.walk) return true; const c = getComputedStyle(e), r = e.getBoundingClientRect(); return c.outlineStyle !== 'none' && parseFloat(c.outlineWidth) >= 2 && r.bottom >= 0 && r.top <= innerHeight; })()`
		// An input of a time has a stop for each of its parts, and one for its calendar.
		parts := 8 * evaluateScript[int](b, `document.querySelectorAll('input[type=datetime-local]').length`)
		// The button that copies a shortened text is a stop after its link.
		copies := evaluateScript[int](b, `[...document.querySelectorAll('.cut:has(.mid) a')].length`)
		got := evaluateScript[int](b, note)
		for range want + parts + copies + 5 {
			b.runActions("Tab", chromedp.KeyEvent(kb.Tab))
			got = evaluateScript[int](b, note)
			if !evaluateScript[bool](b, isFocusSeen) {
				focused := evaluateScript[string](b, "document.activeElement.outerHTML.slice(0, 300)")
				b.waitUntil(at+": the focus to be seen on "+focused, isFocusSeen)
			}
			if got >= want {
				break
			}
		}

		if got < want {
			b.t.Errorf("%s: Tab reaches %d of %d: not %s", at, got, want, evaluateScript[string](b, `[...document.querySelectorAll('[data-walk]')].filter((e) => !window.seen.has(e.dataset.walk)).slice(0, 5).map((e) => e.outerHTML.slice(0, 100)).join(' | ')`))
		}
	}

	b.openPage("/")
	b.clickButtonIn("header", "Refresh paused")
	b.openPage("/")
	b.runActions("the skip link", chromedp.KeyEvent(kb.Tab), chromedp.KeyEvent(kb.Enter))
	b.waitUntil("the content to have the focus", "document.activeElement.id === 'main'")
	b.checkConsole("keyboard")
}

func testColors(s *scene, b *tab) {
	background := "getComputedStyle(document.documentElement).backgroundColor"
	b.setColorScheme("light")
	b.openPage("/")
	light := evaluateScript[string](b, background)
	b.setColorScheme("dark")
	b.waitUntil("the system's dark colours", background+" !== '"+light+"'")
	b.checkAccessibility("dark overview")
	b.takeScreenshot("overview-dark")
	b.clickButtonIn("header", "Theme: system")
	b.clickButtonIn("header", "Theme: dark")
	b.waitUntil("light by the switch", background+" === '"+light+"'")
	b.openPage("/dead?limit=4")
	if got := evaluateScript[string](b, background); got != light {
		b.t.Errorf("the next page has forgotten the switch: %s", got)
	}

	b.clickButtonIn("header", "Theme: light")
	b.checkAccessibility("dark list")
	b.setColorScheme("light")
	b.checkConsole("colours")
}

// testDeadLetters filters dead letters, requeues all matches on all pages, and discards with a typed
// confirmation.
func testDeadLetters(s *scene, b *tab) {
	b.openPage("/dead")
	b.waitForText(fmt.Sprintf("%d in all", forbidden+expired))
	b.runActions("a filter", chromedp.SetValue(`select[name=class]`, "not_allowed"), chromedp.SetValue(`input[name=key]`, "customer-1"))
	b.clickButton("Filter")
	b.waitForText(fmt.Sprintf("%d in all", forbidden/5))
	b.runActions("no key", chromedp.Clear(`input[name=key]`))
	b.clickButton("Filter")
	b.waitForText(fmt.Sprintf("%d in all", forbidden))
	if n := evaluateScript[int](b, "document.querySelectorAll('input[name=pick]').length"); n >= forbidden {
		b.t.Fatalf("all %d are on one page", n)
	}

	// The actions appear with a selection. An old browser always shows them.
	if evaluateScript[bool](b, "document.querySelector('.selection').checkVisibility()") {
		b.t.Error("actions are shown without a selection")
	}
	b.waitUntil("a form without a selection", "(() => { document.querySelector('[data-ticks]').requestSubmit(); return true; })()")
	b.waitForText("no dead letter is selected")
	if at := evaluateScript[string](b, `document.querySelector('select[name=class]').value`); at != "not_allowed" {
		b.t.Errorf("the list has forgotten its filter: class %q", at)
	}
	b.checkAccessibility("a form without a selection")
	b.runActions("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.clickButton("Requeue …")
	b.waitForText(fmt.Sprintf("%d dead letters are not deliverable in this form and left alone", forbidden))
	b.openPage("/dead?class=not_allowed")
	b.runActions("all that match, and a topic", chromedp.Click(`input[name=scope][value=all]`), chromedp.SetValue(`input[name="to-topic"]`, s.topic))
	b.clickButton("Requeue …")
	b.waitForText(fmt.Sprintf("%d dead letters are sent at once, to topic %s only", forbidden, s.topic))
	b.checkAccessibility("confirmation")
	b.takeScreenshot("dead-requeue-confirm")
	if s.countLetters(bson.D{{Key: "requeued", Value: bson.D{{Key: "$exists", Value: true}}}}) != 0 {
		b.t.Error("something was requeued before it was confirmed")
	}
	b.clickButton("Requeue 120")
	b.waitForText(fmt.Sprintf("%d dead letters requeued", forbidden))
	b.takeScreenshot("dead-requeued")
	s.appendForbidden(s.openOutbox(), "again")
	s.waitUntil("the next dead letters", func(context.Context) bool { return s.countLetters(bson.D{}) == 2*forbidden+expired })

	b.openPage("/dead?class=not_allowed&key=customer-4")
	b.runActions("one is ticked, and a topic", chromedp.Click(`tbody tr:nth-child(1) input[name=pick]`), chromedp.SetValue(`input[name="to-topic"]`, s.topic))
	moved := s.envelopeOf(evaluateScript[string](b, `document.querySelector('input[name=pick]:checked').value`))
	b.clickButton("Requeue …")
	b.waitForText("1 dead letter is sent at once, to topic " + s.topic + " only")
	b.clickButton("Requeue 1")
	b.waitForText("1 dead letter requeued")
	s.waitUntil("the event in the other topic", func(context.Context) bool { return s.allSent(moved) })

	b.openPage("/dead?class=not_allowed&key=customer-2")
	b.waitForText(fmt.Sprintf("%d in all", forbidden/5))
	b.runActions("two are ticked", chromedp.Click(`tbody tr:nth-child(1) input[name=pick]`), chromedp.Click(`tbody tr:nth-child(2) input[name=pick]`))
	b.waitForText("2 selected")
	b.clickButton("Discard …")
	b.waitForText("Type discard ")
	phrase := evaluateScript[string](b, "document.querySelector('label code').textContent")
	outside := bson.D{{Key: "archived", Value: nil}}
	before := s.countLetters(outside)
	b.runActions("a wrong phrase", chromedp.SetValue(`input[name=_phrase]`, "discard all"))
	b.clickButtonIn("main form", "Discard")
	b.waitForText("is not the phrase")
	if s.countLetters(outside) != before {
		b.t.Fatal("something was discarded without the phrase")
	}
	b.runActions("the phrase", chromedp.SetValue(`input[name=_phrase]`, phrase))
	b.takeScreenshot("dead-discard-confirm")
	b.clickButtonIn("main form", "Discard")
	b.waitForText("discarded")
	if gone := before - s.countLetters(outside); fmt.Sprintf("discard %d", gone) != phrase {
		b.t.Errorf("%d are gone after %q", gone, phrase)
	}
	// The console shows the responses with status 400 and 409.
	if n := b.clearConsole(); n > 2 {
		b.t.Errorf("the console has %d messages", n)
	}
}

func testEditAndRequeue(s *scene, b *tab) {
	b.openPage("/dead?class=not_allowed&key=customer-3")
	b.runActions("the first letter", chromedp.Click(`tbody tr:nth-child(1) th a`))
	b.waitForText("Edit and requeue")
	if strings.Contains(b.pageText(), "onerror") {
		b.t.Error("the payload is shown without a request for it")
	}

	b.clickButton("Edit and requeue")
	b.clickButton("Requeue as edited …")
	b.waitForText("no field is changed")
	b.waitUntil("the form with the reason", "document.querySelector('#edit').open && document.querySelector('#edit [role=alert]').checkVisibility()")
	b.checkAccessibility("an edit without a change")
	// The console shows the response with status 400.
	if n := b.clearConsole(); n != 1 {
		b.t.Errorf("the console has %d messages, want one", n)
	}
	b.clickButton("Show the payload")
	b.waitForText("onerror")
	if evaluateScript[int](b, "document.images.length") != 0 {
		b.t.Error("text of an event became an element")
	}

	letter := evaluateScript[string](b, "document.querySelector('input[name=pick]').value")
	id := s.envelopeOf(letter)
	b.runActions("a topic that is allowed", chromedp.SetValue(`input[name="set.topic"]`, s.topic))
	b.clickButton("Edit and requeue")
	b.clickButton("Requeue as edited …")
	b.waitForText("Changed: topic")
	b.clickButtonIn("main form", "Requeue as edited")
	b.waitForText("changed: topic")
	s.waitUntil("the edited event in Kafka", func(context.Context) bool {
		return s.countDocuments("outbox", bson.D{{Key: "_id", Value: id}, {Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}) == 1
	})

	b.takeScreenshot("dead-edited")
	b.openPage("/lookup?q=" + id)
	b.waitForText(s.topic + "/")
	b.waitForText("requeued")
	b.checkConsole("edit")
}

func testLookup(s *scene, b *tab) {
	b.openPage("/lookup")
	b.runActions("an id", chromedp.SendKeys(`main input[name=q]`, "good-007"+kb.Enter))
	b.waitUntil("its history and its place in Kafka", fmt.Sprintf(`document.body.innerText.includes(%q) && /\/\d+@\d+/.test(document.body.innerText) && document.querySelector('.timeline li')`, s.topic))
	b.takeScreenshot("lookup")
	b.runActions("its conversation", chromedp.Click(`article a[href*="conversation="]`))
	b.waitForText("Events of the conversation")
	b.waitForText("good-007")

	b.runActions("a key in the header", chromedp.SendKeys(`header input[name=q]`, "customer-3"+kb.Enter))
	b.waitForText("These events have it as their ordering key")
	b.openPage("/lookup?by=key&q=customer-3")
	b.waitForText("good-003")

	b.openPage("/lookup?q=nobody")
	b.waitForText("Nothing was found")

	b.openPage("/waiting?reason=retry")
	b.waitForText("rejected-1")
	b.waitForText("the broker rejected it (87)")

	b.runActions("a tick", chromedp.Click(`input[name=pick][aria-label="Select rejected-1"]`))
	b.clickButton("Retry now …")
	b.confirmAction("1 failed event is due now", "Retry now 1", "tried again now")
	s.waitUntil("the envelope that was rejected in Kafka", func(context.Context) bool { return s.noneWaits("rejected-1") })

	b.openPage("/waiting?reason=retry")
	b.runActions("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.clickButton("Reset attempts …")
	// On a slow machine more envelopes fail, so do not compare the number.
	b.confirmAction("failed events are tried again at once", "Reset attempts", "events are tried again")
	s.waitUntil("the others that were rejected in Kafka", func(context.Context) bool { return s.noneWaits("rejected-2", "rejected-3") })

	b.openPage("/nodes")
	b.waitForText("alive")
	b.checkConsole("look-up")
}

// testTopics shows the owner's deliveries on a page of another process, and follows an event to its lookup.
// testTopicCreated creates a topic. A name that Kafka does not accept is an error at the form.
func testTopicCreated(s *scene, b *tab) {
	const form = `form[action="/confirm/topic-create"]`
	b.openPage("/control")
	b.runActions("a wrong name", chromedp.SetValue(form+" input[name=topic]", "a/b"))
	b.clickButton("Create …")
	b.waitForText("may contain only letters")
	b.clearConsole() // the response with status 400

	name := s.topic + "-made"
	b.openPage("/control")
	b.runActions("a name", chromedp.SetValue(form+" input[name=topic]", name), chromedp.SetValue(form+" input[name=partitions]", "2"))
	b.clickButton("Create …")
	b.waitForText("kafka-topics.sh")
	b.confirmAction("is created in Kafka", "Create the topic", "Topic "+name+" is created.")
	b.checkConsole("a new topic")
}

// testGroups shows a consumer group with a running member, and a handler that the program has paused.
func testGroups(s *scene, b *tab) {
	member, err := consumer.New("billing-"+s.topic, s.db, consumer.WithBrokers(stacktest.Brokers(b.t)...), consumer.WithTopics(s.topic), consumer.WithSkip("*"))
	if err != nil {
		b.t.Fatal(err)
	}
	handled := make(chan struct{})
	once := sync.OnceFunc(func() { close(handled) })
	count := consumer.Func(func(context.Context, *consumer.Message) error { once(); return nil }, "OrderPlaced")
	if err := member.Handle("count", count); err != nil {
		b.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- member.Run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			b.t.Error(err)
		}
	}()
	select {
	case <-handled:
	case <-time.After(patience):
		b.t.Fatal("the consumer has handled nothing")
	}

	b.openPage("/groups")
	b.waitForText("✓ stable")
	b.clickButton("billing-" + s.topic)
	b.waitForText("Members")
	b.waitForText("Partitions")
	if n := evaluateScript[int](b, `document.querySelectorAll('table:last-of-type tbody tr').length`); n != 3 {
		b.t.Errorf("%d partitions, want 3", n)
	}
	member.PauseHandler("count")
	at := evaluateScript[string](b, "location.pathname + location.search")
	b.waitUntil("the paused handler", fmt.Sprintf(`fetch(%q).then((r) => r.text()).then((t) => { window.found = t.includes('paused in 1'); }) && window.found`, at))
	b.openPage(at)
	b.waitForText("paused in 1")
	for _, width := range []int64{360, 1280} {
		b.setWindowSize(width, 900)
		if over := evaluateScript[int](b, "document.documentElement.scrollWidth - document.documentElement.clientWidth"); over > 0 {
			b.t.Errorf("the group scrolls sideways by %d px at %d px", over, width)
		}
		b.checkAccessibility(fmt.Sprintf("a group at %d px", width))
		b.takeScreenshot(fmt.Sprintf("group-%d", width))
	}
	b.checkConsole("groups")
}

func testTopics(s *scene, b *tab) {
	row := fmt.Sprintf(`[...document.querySelectorAll('tbody tr')].find((r) => r.querySelector('th a')?.textContent === %q)`, s.topic)

	b.openPage("/topics")
	b.waitUntil("the topic and its last record", row+` && /\d+@\d+/.test(`+row+`.innerText)`)
	b.waitUntil("the topic that is missing, with its waiting events", fmt.Sprintf(`[...document.querySelectorAll('tbody tr')].some((r) => r.textContent.includes('%s-missing') && r.innerText.includes('%d, oldest'))`, s.topic, parked))
	b.checkAccessibility("topics")
	b.takeScreenshot("topics")

	b.follow(fmt.Sprintf(`tbody a[href$="topic=%s"][href^="/topics/recent"]`, s.topic))
	b.waitUntil("its events", `location.pathname === '/topics/recent' && document.querySelectorAll('tbody tr').length > 0`)
	b.waitForText("The page reads nothing from Kafka")
	b.checkAccessibility("recent events")
	b.takeScreenshot("recent-events")

	id := evaluateScript[string](b, `document.querySelector('tbody th a').textContent`)
	b.follow(`tbody th a`)
	b.waitUntil("its lookup", fmt.Sprintf(`location.pathname === '/lookup' && document.querySelector('article h3')?.textContent.includes(%q)`, id))

	b.checkConsole("topics")
}

func testStepDownAndPause(s *scene, b *tab) {
	const id = "orders/0of1"
	first := s.readSlot(id)
	b.openPage("/")
	b.openQuestion("Step down …", "another node takes over at once")
	b.confirmAction("another node takes over at once", "Step down", "steps down, and does not take over")
	s.waitUntil("the other node", func(context.Context) bool { now := s.readSlot(id); return now.Owner != "" && now.Node != first.Node })
	now := s.readSlot(id)
	b.openPage("/")
	b.waitUntil("the new owner on the page", fmt.Sprintf(`/Epoch\s*%d/.test(document.body.textContent)`, now.Epoch))
	b.openQuestion("Pause …", "No node takes over until it is resumed")
	b.confirmAction("No node takes over until it is resumed", "Pause", "is paused")
	s.waitUntil("the owner to let go", func(context.Context) bool { w := s.readSlot(id); return w.Control.Paused && w.Owner == "" })
	b.takeScreenshot("control-paused")
	b.openQuestion("Resume it", "goes on where it stopped")
	b.confirmAction("goes on where it stopped", "Resume", "goes on.")
	s.waitUntil("an owner", func(context.Context) bool { w := s.readSlot(id); return !w.Control.Paused && w.Owner != "" })

	// An event is passed over: it was delivered before, so only its dead letter is new.
	const form = `form[action="/confirm/skip"]`
	before := s.readSlot(id).Epoch
	b.openPage("/control")
	b.runActions("an event", chromedp.SetValue(form+" input[name=collection]", s.db.Name()+".outbox"), chromedp.SetValue(form+" input[name=id]", "good-002"))
	b.clickButton("Pass over …")
	b.confirmAction("becomes a dead letter of class skipped", "Pass over it", "passes over event good-002")
	if n := s.countLetters(bson.D{{Key: "class", Value: "skipped"}, {Key: "id", Value: "good-002"}}); n != 1 {
		b.t.Errorf("%d dead letters of the event, want 1", n)
	}
	s.waitUntil("the owner after the event", func(context.Context) bool { w := s.readSlot(id); return w.Owner != "" && w.Epoch > before })
	b.openPage("/log")
	for _, kind := range []string{"stepped_down", "paused", "resumed", "dead_requeued", "dead_edited", "dead_discarded", "anonymous"} {
		b.waitForText(kind)
	}

	b.takeScreenshot("log")
	b.checkConsole("step-down and pause")
}

func testAutoRefresh(s *scene, b *tab) {
	b.openPage("/")
	at := "document.getElementById('figures').dataset.at"
	first := evaluateScript[string](b, at)
	focus := "document.activeElement.getAttribute('href')"
	b.waitUntil("the focus on a figure", `(() => { const a = document.querySelector('#live .tiles a[href^="/dead"]'); a.focus(); return document.activeElement === a; })()`)
	b.waitUntil("a refresh", at+" !== '"+first+"'")
	if got := evaluateScript[string](b, focus+" || ''"); got != "/dead" {
		b.t.Errorf("a refresh took the focus to %q", got)
	}

	b.clickButtonIn("header", "Pause refresh")
	b.waitForText("Refresh paused")
	// A refresh that started before the pause may still arrive. The time on a newly opened page does
	// not change.
	b.openPage("/")
	still := evaluateScript[string](b, at)
	evaluateScript[bool](b, "new Promise((done) => setTimeout(() => done(true), 2600))")
	if now := evaluateScript[string](b, at); now != still {
		b.t.Errorf("it was refreshed at %s although it is paused", now)
	}

	b.clickButtonIn("header", "Refresh paused")
	b.waitUntil("a refresh at once", at+" !== '"+still+"'")
	b.checkConsole("auto-refresh")
}

func testMongoAway(s *scene, b *tab) {
	b.openPage("/")

	off := stacktest.FailCommand(b.t, s.app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"find", "aggregate", "count", "getMore"}}, {Key: "errorCode", Value: 50}})
	b.waitUntil("the banner over the figures that are there", "!document.getElementById('stale').hidden && document.getElementById('stale').innerText.includes('Not refreshed since') && document.querySelector('.slot')")
	b.takeScreenshot("stale")

	b.openPage("/dead")
	b.waitForText("The servers did not respond")
	b.waitForText("Try again")
	b.checkAccessibility("error state")
	b.takeScreenshot("error")

	off()
	b.clickButton("Try again")
	b.waitForText("in all")

	b.openPage("/")
	b.waitUntil("the banner gone", "document.getElementById('stale').hidden && document.querySelector('.slot')")
	// The browser logs responses with status 503.
	b.clearConsole()
}

// testHostileText opens each list and each detail with a hostile text in each field that a service, a
// node or an address can fill. If the text became a part of the page, it would run a script.
func testHostileText(s *scene, b *tab) {
	now := time.Now()
	s.setLastHeartbeat("node"+hostile, now, "orders")
	s.insertDocument("outbox", bson.D{
		{Key: "_id", Value: "evil" + hostile},
		{Key: "aggregatetype", Value: "order" + hostile},
		{Key: "aggregateid", Value: "a" + hostile},
		{Key: "type", Value: "T" + hostile},
		{Key: "key", Value: "key" + hostile},
		{Key: "topic", Value: "topic" + hostile},
		{Key: "payload", Value: hostile},
		{Key: "headers", Value: bson.A{bson.D{{Key: "k", Value: "h" + hostile}, {Key: "v", Value: hostile}}}},
	})
	s.insertDocument("outbox", bson.D{
		{Key: "_id", Value: "due" + hostile},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "a"},
		{Key: "type", Value: "Due" + hostile},
		{Key: "payload", Value: hostile},
		{Key: "dueAt", Value: now.Add(time.Hour)},
	})
	if _, err := s.state.Collection("audit").InsertOne(b.t.Context(), bson.D{
		{Key: "at", Value: now},
		{Key: "kind", Value: "kind" + hostile},
		{Key: "watcher", Value: "orders" + hostile},
		{Key: "node", Value: "node" + hostile},
		{Key: "fields", Value: bson.D{{Key: "actor", Value: "actor" + hostile}, {Key: "source", Value: "api/" + hostile}, {Key: "reason", Value: hostile}}},
	}); err != nil {
		b.t.Fatal(err)
	}
	s.waitUntil("the hostile dead letter", func(context.Context) bool {
		return s.countLetters(bson.D{{Key: "id", Value: "evil" + hostile}}) == 1
	})

	q := url.QueryEscape
	list := append([]string{
		"/dead?type=" + q("T"+hostile), "/dead/letter?collection=" + q(s.db.Name()+".outbox") + "&id=" + q("evil"+hostile) + "&payload=1", "/lookup?q=" + q("evil"+hostile), "/lookup?by=key&q=" + q("key"+hostile),
		"/waiting?key=" + q("key"+hostile), "/log?kind=" + q("kind"+hostile), "/scheduled?type=" + q("Due"+hostile), "/sagas?database=" + q(hostile) + "&saga=" + q(hostile), "/inbox?database=" + q(hostile),
		"/sagas?payload=1&database=" + q(s.db.Name()) + "&saga=order_sagas&id=saga-1", "/control?watcher=" + q("orders"+hostile), "/nowhere/" + url.PathEscape(hostile), "/?done=" + q(hostile),
	}, pages...)
	seen := 0
	for _, at := range list {
		b.openPage(at)
		if n := evaluateScript[int](b, "document.querySelectorAll('img, [onerror], body script, iframe').length"); n > 0 {
			b.t.Errorf("%s: text became %d elements", at, n)
		}
		if evaluateScript[bool](b, fmt.Sprintf("document.documentElement.textContent.includes(%q)", hostile)) {
			seen++
		}
		// The console also logs a response with an error status.
		for _, n := range b.consoleMessages() {
			if !strings.Contains(n, "status of 4") {
				b.t.Errorf("%s: console message: %s", at, n)
			}
		}
		b.clearConsole()
	}
	if seen < 8 {
		b.t.Errorf("only %d of %d pages show the text", seen, len(list))
	}
}
