package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

// pages are all that a person can open without naming a thing.
var pages = []string{"/", "/pending", "/dead?limit=8", "/lookup", "/nodes", "/log", "/scheduled", "/sagas", "/inbox", "/control"}

// One scene and one browser for all: the parts follow each other as a night does.
func TestPage(t *testing.T) {
	began := time.Now()
	b, ready := openTab(t) // before anything is started for nothing
	s := openScene(t)
	b.url = s.url
	if err := <-ready; err != nil {
		t.Fatal(err)
	}

	t.Logf("the scene is set after %.1f s", time.Since(began).Seconds())
	part := func(name string, f func(*scene, *tab)) {
		if t.Failed() {
			return // what follows builds on it
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

	part("Overview", overview)
	part("WidthsAndAccess", widthsAndAccess)
	part("Keyboard", keyboard)
	part("Colours", colours)
	part("DeadLetters", deadLetters)
	part("EditAndRequeue", editAndRequeue)
	part("LookUp", lookUp)
	part("Scheduled", scheduledEvents)
	part("Replays", replays)
	part("Upkeep", upkeep)
	part("Inbox", inboxes)
	part("StepDownAndPause", stepDownAndPause)
	part("NodesAndPins", nodesAndPins)
	part("Slots", slots)
	part("Viewer", viewer)
	part("Clear", clearing)
	part("AutoRefresh", autoRefresh)
	part("MongoDBAway", mongoAway)
	if left := s.deeds.left(b.offered); len(left) > 0 || len(b.offered) < 20 {
		t.Errorf("of %d actions that the page offers nobody carried out %q", len(b.offered), left)
	}

	t.Logf("screenshots are in %s", b.dir)
}

func overview(s *scene, b *tab) {
	b.open("/")
	b.says("slot 0of1")
	b.until("the owner and its figures", `/Epoch\s*\d/.test(document.body.innerText) && document.querySelector('.s-live, .s-blocked')`)
	b.until("the counts", fmt.Sprintf(`[...document.querySelectorAll('.tiles a')].some((a) => a.innerText.replace(/\s+/g, ' ').includes('%d dead letters'))`, forbidden+expired))
	for _, want := range []string{"Oplog left", "Lag of the oldest", "Throughput", "Pending by topic", s.topic + "-missing", "Nodes", "one", "two", "Checks", fmt.Sprintf("%d scheduled", scheduled)} {
		if !strings.Contains(strings.Join(strings.Fields(b.text()), " "), want) {
			b.t.Errorf("the overview does not say %q", want)
		}
	}
	b.until("a chart", `document.querySelector('#chart-rate canvas') && document.querySelector('#chart-lag canvas')`)
	b.shot("overview-light")
	b.quiet("overview")
}

// widthsAndAccess looks at every page: no scrolling sideways from a telephone to a wall, nothing serious for axe, nothing in
// the console.
func widthsAndAccess(s *scene, b *tab) {
	letter := eval[string](b, `fetch('/dead').then((r) => r.text()).then((t) => new DOMParser().parseFromString(t, 'text/html').querySelector('a[href^="/dead/letter"]').getAttribute('href'))`)
	for _, at := range append([]string{"/lookup?q=good-001", letter + "&payload=1"}, pages...) {
		b.open(at)
		b.until("the page", "document.readyState === 'complete'")
		if at != "/" && !strings.Contains(at, "payload") {
			b.until("the strip", "document.querySelector('#strip .status')")
		}

		path, _, _ := strings.Cut(at, "?")
		name := strings.ReplaceAll(strings.Trim(path, "/"), "/", "-")
		if name == "" {
			name = "overview"
		}

		for _, width := range []int64{360, 2560} {
			b.size(width, 900)
			if over := eval[int](b, "document.documentElement.scrollWidth - document.documentElement.clientWidth"); over > 0 {
				b.t.Errorf("%s scrolls sideways by %d px at %d px: %s", at, over, width, eval[string](b, `[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(e).position !== 'absolute').slice(0, 4).map((e) => e.outerHTML.slice(0, 120)).join(' | ')`))
			}
			if at == "/" || strings.HasPrefix(at, "/dead?") || width == 360 && strings.HasPrefix(at, "/dead/letter") {
				b.shot(fmt.Sprintf("%s-%d", name, width))
			}
		}

		b.size(1280, 900)
		b.accessible(at)
		b.quiet(at)
	}
}

// keyboard reaches every action with Tab, in the order of the document, and sees where it is.
func keyboard(s *scene, b *tab) {
	for _, at := range []string{"/dead?limit=4", "/control"} {
		b.open(at)
		b.do("Tab", chromedp.KeyEvent(kb.Tab))
		if got := eval[string](b, "document.activeElement.textContent"); got != "Skip to content" {
			b.t.Errorf("%s: Tab begins at %q", at, got)
		}

		want := eval[int](b, `(() => { const all = [...document.querySelectorAll('a[href],button,input:not([type=hidden]),select,textarea,summary,[tabindex="0"]')].filter((e) => e.getClientRects().length && !e.disabled && !(e.closest('details:not([open])') && e.tagName !== 'SUMMARY'));
			all.forEach((e, i) => e.dataset.walk = i); window.seen = new Set(); return all.length; })()`)
		// Of radio buttons of one name Tab reaches one; arrows reach the others.
		want -= eval[int](b, `[...document.querySelectorAll('input[type=radio]')].length - new Set([...document.querySelectorAll('input[type=radio]')].map((e) => e.name)).size`)
		note := `(() => { const e = document.activeElement; if (e && e.dataset && e.dataset.walk) { window.seen.add(e.dataset.walk); const c = getComputedStyle(e); if (c.outlineStyle === 'none' || parseFloat(c.outlineWidth) < 2) window.dim = (window.dim || '') + e.outerHTML.slice(0, 80); } return window.seen.size; })()`
		got := eval[int](b, note)
		for range want + 5 {
			b.do("Tab", chromedp.KeyEvent(kb.Tab))
			if got = eval[int](b, note); got >= want {
				break
			}
		}

		if got < want {
			b.t.Errorf("%s: Tab reaches %d of %d: not %s", at, got, want, eval[string](b, `[...document.querySelectorAll('[data-walk]')].filter((e) => !window.seen.has(e.dataset.walk)).slice(0, 5).map((e) => e.outerHTML.slice(0, 100)).join(' | ')`))
		}
		if dim := eval[string](b, "window.dim || ''"); dim != "" {
			b.t.Errorf("%s: focus is not seen on %.300s", at, dim)
		}
	}

	b.open("/")
	b.do("the skip link", chromedp.KeyEvent(kb.Tab), chromedp.KeyEvent(kb.Enter))
	b.until("the content to have the focus", "document.activeElement.id === 'main'")
	b.quiet("keyboard")
}

func colours(s *scene, b *tab) {
	background := "getComputedStyle(document.documentElement).backgroundColor"
	b.colours("light")
	b.open("/")
	light := eval[string](b, background)
	b.colours("dark")
	b.until("the system's dark colours", background+" !== '"+light+"'")
	b.accessible("dark overview")
	b.shot("overview-dark")
	b.pressIn("header", "Theme: system")
	b.pressIn("header", "Theme: dark")
	b.until("light by the switch", background+" === '"+light+"'")
	b.open("/dead?limit=4")
	if got := eval[string](b, background); got != light {
		b.t.Errorf("the next page has forgotten the switch: %s", got)
	}

	b.pressIn("header", "Theme: light")
	b.accessible("dark list")
	b.colours("light")
	b.quiet("colours")
}

// deadLetters filters, requeues everything that matches on all pages, and discards with a typed confirmation.
func deadLetters(s *scene, b *tab) {
	b.open("/dead")
	b.says(fmt.Sprintf("%d in all", forbidden+expired))
	b.do("a filter", chromedp.SetValue(`select[name=class]`, "not_allowed"), chromedp.SetValue(`input[name=key]`, "customer-1"))
	b.press("Filter")
	b.says(fmt.Sprintf("%d in all", forbidden/5))
	b.do("no key", chromedp.Clear(`input[name=key]`))
	b.press("Filter")
	b.says(fmt.Sprintf("%d in all", forbidden))
	if n := eval[int](b, "document.querySelectorAll('input[name=pick]').length"); n >= forbidden {
		b.t.Fatalf("all %d are on one page", n)
	}

	b.press("Requeue …")
	b.says("no letter is ticked")
	b.do("back", chromedp.NavigateBack())
	b.do("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.press("Requeue …")
	b.says(fmt.Sprintf("%d letters are given back to the outbox", forbidden))
	b.accessible("confirmation")
	b.shot("dead-requeue-confirm")
	if s.count("outbox_dead", bson.D{{Key: "replayed", Value: bson.D{{Key: "$exists", Value: true}}}}) != 0 {
		b.t.Error("something was requeued before it was confirmed")
	}
	b.press("Requeue 120")
	b.says(fmt.Sprintf("%d letters requeued", forbidden))
	b.shot("dead-requeued")
	// The topic is still not allowed: each dies again, as the next delivery.
	s.until("the second deaths", func(context.Context) bool { return s.count("outbox_dead", bson.D{}) >= 2*forbidden+expired })

	b.open("/dead?class=not_allowed&key=customer-2")
	b.says(fmt.Sprintf("%d in all", forbidden/5))
	b.do("two are ticked", chromedp.Click(`tbody tr:nth-child(1) input[name=pick]`), chromedp.Click(`tbody tr:nth-child(2) input[name=pick]`))
	b.says("(2)")
	b.press("Discard …")
	b.says("Type discard ")
	phrase := eval[string](b, "document.querySelector('label code').textContent")
	before := s.count("outbox_dead", bson.D{})
	b.do("a wrong phrase", chromedp.SetValue(`input[name=_phrase]`, "discard all"))
	b.pressIn("main form", "Discard")
	b.says("is not the phrase")
	if s.count("outbox_dead", bson.D{}) != before {
		b.t.Fatal("something was discarded without the phrase")
	}
	b.do("the phrase", chromedp.SetValue(`input[name=_phrase]`, phrase))
	b.shot("dead-discard-confirm")
	b.pressIn("main form", "Discard")
	b.says("discarded")
	if gone := before - s.count("outbox_dead", bson.D{}); fmt.Sprintf("discard %d", gone) != phrase {
		b.t.Errorf("%d are gone after %q", gone, phrase)
	}
	if n := b.forget(); n > 2 { // the answers 400 and 409 on the way
		b.t.Errorf("the console said %d things", n)
	}
}

func editAndRequeue(s *scene, b *tab) {
	b.open("/dead?class=not_allowed&key=customer-3")
	b.do("the first letter", chromedp.Click(`tbody tr:nth-child(1) th a`))
	b.says("Edit and requeue")
	if strings.Contains(b.text(), "onerror") {
		b.t.Error("the payload is shown to somebody who has not asked for it")
	}

	b.press("Show the payload")
	b.says("onerror")
	if eval[int](b, "document.images.length") != 0 {
		b.t.Error("text of an event became an element")
	}

	id := eval[string](b, "document.querySelector('input[name=pick]').value")
	b.do("a topic that is allowed", chromedp.SetValue(`input[name="set.topic"]`, s.topic))
	b.press("Requeue as edited …")
	b.says("Changed: topic")
	b.pressIn("main form", "Requeue as edited")
	b.says("changed: topic")
	s.until("the edited event in Kafka", func(context.Context) bool {
		return s.count("outbox", bson.D{{Key: "_id", Value: id}, {Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}) == 1
	})

	b.shot("dead-edited")
	b.open("/lookup?q=" + id)
	b.says("offset")
	b.says("requeued")
	b.quiet("edit")
}

func lookUp(s *scene, b *tab) {
	b.open("/lookup")
	b.do("an id", chromedp.SendKeys(`input[name=q]`, "good-007"+kb.Enter))
	b.until("its history and its place in Kafka", fmt.Sprintf(`document.body.innerText.includes(%q) && /partition \d+ offset \d+/.test(document.body.innerText) && document.querySelector('.timeline li')`, s.topic))
	b.shot("lookup")
	b.open("/lookup?by=key&q=customer-3")
	b.says("good-003")
	b.open("/lookup?q=nobody")
	b.says("Nothing is known of it")
	b.open("/pending?state=retry")
	b.says("refused-1")
	b.says("the broker refused it (87)")
	b.do("a tick", chromedp.Click(`input[name=pick][value=refused-1]`))
	b.press("Retry now …")
	b.confirm("1 failed envelope is due now", "Retry now 1", "tried again now")
	s.until("the envelope that was refused in Kafka", func(context.Context) bool { return s.sent("refused-1") })
	b.open("/pending?state=retry")
	b.do("all that match", chromedp.Click(`input[name=scope][value=all]`))
	b.press("Reset attempts …")
	b.confirm("failed envelopes are tried again at once", "Reset attempts", "envelopes are tried again") // on a slow machine others fail, too
	s.until("the others that were refused in Kafka", func(context.Context) bool { return s.sent("refused-2", "refused-3") })
	b.open("/nodes")
	b.says("alive")
	b.quiet("look-up")
}

func stepDownAndPause(s *scene, b *tab) {
	const id = "orders/0of1"
	first := s.slot(id)
	b.open("/")
	b.press("Step down …")
	b.confirm("another node takes over at once", "Step down", "was told to step down")
	s.until("the other node", func(context.Context) bool { now := s.slot(id); return now.Owner != "" && now.Node != first.Node })
	now := s.slot(id)
	b.open("/")
	b.until("the new owner on the page", fmt.Sprintf(`/Epoch\s*%d/.test(document.body.innerText)`, now.Epoch))
	b.press("Pause …")
	b.confirm("Nobody takes over until it is resumed", "Pause", "is paused")
	s.until("the owner to let go", func(context.Context) bool { w := s.slot(id); return w.Control.Paused && w.Owner == "" })
	b.shot("control-paused")
	b.press("Resume it")
	b.confirm("goes on where it stopped", "Resume", "goes on.")
	s.until("an owner", func(context.Context) bool { w := s.slot(id); return !w.Control.Paused && w.Owner != "" })
	b.open("/log")
	for _, kind := range []string{"stepped_down", "paused", "resumed", "dead_requeued", "dead_edited", "dead_discarded", "anonymous"} {
		b.says(kind)
	}

	b.shot("log")
	b.quiet("step-down and pause")
}

func autoRefresh(s *scene, b *tab) {
	b.open("/")
	at := "document.getElementById('figures').dataset.at"
	first := eval[string](b, at)
	focus := "document.activeElement.getAttribute('href')"
	b.until("the focus on a figure", `(() => { const a = document.querySelector('#live .tiles a[href^="/dead"]'); a.focus(); return document.activeElement === a; })()`)
	b.until("a refresh", at+" !== '"+first+"'")
	if got := eval[string](b, focus+" || ''"); got != "/dead" {
		b.t.Errorf("a refresh took the focus to %q", got)
	}

	b.pressIn("header", "Pause refresh")
	b.says("Refresh paused")
	// What is under way when it is paused may still arrive; the time of a page that is opened anew does not move at all.
	b.open("/")
	still := eval[string](b, at)
	eval[bool](b, "new Promise((done) => setTimeout(() => done(true), 2600))")
	if now := eval[string](b, at); now != still {
		b.t.Errorf("it was refreshed at %s although it is paused", now)
	}

	b.pressIn("header", "Refresh paused")
	b.until("a refresh at once", at+" !== '"+still+"'")
	b.quiet("auto-refresh")
}

func mongoAway(s *scene, b *tab) {
	b.open("/")
	off := stacktest.FailCommand(b.t, s.app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"find", "aggregate", "count", "getMore"}}, {Key: "errorCode", Value: 50}})
	b.until("the banner over the figures that are there", "!document.getElementById('stale').hidden && document.getElementById('stale').innerText.includes('Not refreshed since') && document.querySelector('.slot')")
	b.shot("stale")
	b.open("/dead")
	b.says("The servers did not answer")
	b.says("Try again")
	b.accessible("error state")
	b.shot("error")
	off()
	b.press("Try again")
	b.says("in all")
	b.open("/")
	b.until("the banner gone", "document.getElementById('stale').hidden && document.querySelector('.slot')")
	b.forget() // what the browser says of answers 503
}
