package e2e

import (
	"fmt"
	"strings"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// testNavigation checks the groups and counts of the navigation, and the link to the documentation.
func testNavigation(s *scene, b *tab) {
	for _, at := range []string{"/", "/sagas"} {
		b.openPage(at)
		b.waitUntil("the counts next to the areas", fmt.Sprintf(`(() => {
			const of = (name) => document.querySelector('.areas [data-count=' + name + ']');
			return of('dead').innerText === '%d' && Number(of('waiting').innerText) >= %d && Number(of('problems').innerText) > 0;
		})()`, forbidden+expired, parked+rejected))
	}

	if n := evaluateScript[int](b, `[...document.querySelectorAll('nav.areas ul')].filter((e) => e.getAttribute('aria-label')).length`); n < 3 {
		b.t.Errorf("the navigation has %d groups with a name", n)
	}

	if to := evaluateScript[string](b, `[...document.querySelectorAll('header a')].find((e) => e.innerText === 'Documentation').href`); !strings.HasSuffix(to, "/docs/operations.md") {
		b.t.Errorf("the documentation is at %s", to)
	}

	b.checkConsole("navigation")
}

// testTerms opens the meaning of a term with the keyboard. A refresh closes no part that is unfolded.
func testTerms(s *scene, b *tab) {
	b.openPage("/")
	// The charts move the cards below them.
	b.waitUntil("the charts", `document.querySelector('#chart-p99 canvas') && document.querySelector('#marks a')`)
	b.clickButton("Lease and position")
	refreshed := `document.getElementById('figures').dataset.at`
	first := evaluateScript[string](b, refreshed)
	b.waitUntil("a refresh", refreshed+" !== '"+first+"'")
	b.waitUntil("the part to stay unfolded", `[...document.querySelectorAll('.slot .term')].some((e) => e.innerText === 'Epoch' && e.checkVisibility())`)

	b.waitUntil("the focus on a term", `(() => { const e = [...document.querySelectorAll('.slot .term')].find((e) => e.innerText === 'Lag'); e.focus(); return document.activeElement === e; })()`)
	b.runActions("Enter", chromedp.KeyEvent(kb.Enter))
	open := `document.querySelector('.meaning:popover-open')`
	b.waitUntil("the meaning", open+`?.innerText.includes('The age of the oldest event')`)
	b.takeScreenshot("term")
	b.runActions("Escape", chromedp.KeyEvent(kb.Escape))
	b.waitUntil("the meaning to close", "!"+open)

	// Each meaning is at its term, and fits into the window.
	terms := `[...document.querySelectorAll('main .term, main .help')].filter((e) => e.checkVisibility())`
	for _, width := range []int64{360, 1280} {
		b.setWindowSize(width, 900)
		for i := range evaluateScript[int](b, terms+".length") {
			b.waitUntil(fmt.Sprintf("the meaning of term %d at %d pixels", i, width), fmt.Sprintf(`(() => {
				const e = %s[%d];
				e.scrollIntoView({block: 'center'});
				const p = document.getElementById(e.getAttribute('popovertarget'));
				if (!p.matches(':popover-open')) e.click();
				const at = e.getBoundingClientRect(), m = p.getBoundingClientRect();
				const near = Math.min(Math.abs(m.top - at.bottom), Math.abs(at.top - m.bottom)) < 20 && m.left <= at.right && m.right >= at.left;
				const fits = m.left >= 0 && m.right <= innerWidth && m.top >= 0 && m.bottom <= innerHeight;
				if (near && fits) p.hidePopover();
				return near && fits;
			})()`, terms, i))
		}
		b.takeScreenshot(fmt.Sprintf("terms-%d", width))
	}
	b.checkConsole("terms")
}

// testRows opens the details of an entry of each list, by a click into its row and by its link.
func testRows(s *scene, b *tab) {
	for at, want := range map[string]string{
		"/dead?class=not_allowed": "/dead/letter",
		"/waiting?state=retry":    "/lookup",
		"/scheduled":              "/lookup",
		"/nodes":                  "/nodes/node",
		"/log":                    "/log/entry",
		"/sagas":                  "/sagas?database=",
		"/inbox":                  "/inbox?collection=",

		"/sagas?saga=order_sagas&database=" + s.db.Name(): "/sagas?database=" + s.db.Name() + "&id=saga-1",
	} {
		there := fmt.Sprintf(`(location.pathname + location.search).startsWith(%q) && document.readyState === 'complete'`, want)
		b.openPage(at)
		b.waitUntil("a click into a row of "+at, `(() => { const e = [...document.querySelectorAll('tbody tr')].findLast((e) => e.querySelector('[data-open]')).querySelector('td:last-child'); setTimeout(() => e.click()); return true; })()`)
		b.waitUntil("the details of a row of "+at, there)
		b.openPage(at)
		b.waitUntil("the link of a row", `(() => { const e = [...document.querySelectorAll('tbody [data-open]')].at(-1); e.focus(); return document.activeElement === e; })()`)
		b.runActions("Enter", chromedp.KeyEvent(kb.Enter))
		b.waitUntil("the details by the keyboard, from "+at, there)
	}

	b.openPage("/lookup?q=good-001")
	b.clickButton("Copy")
	b.waitForText("Copied")

	b.openPage("/nodes/node?node=one")
	b.waitForText("alive")
	b.clickButton("node_started")
	b.waitForText("All entries of this kind")
	b.clickButton("Five minutes before and after")
	b.waitForText("in all")
	b.checkConsole("rows")
}

// testTables checks that a row is one line of 32 pixels, that no column is empty, and that a shortened text can be read and copied.
func testTables(s *scene, b *tab) {
	b.setWindowSize(1280, 900)
	b.openPage("/waiting?reason=parked")
	b.waitUntil("the events that wait", fmt.Sprintf("document.querySelectorAll('[data-ticks] tbody tr').length === %d", parked))
	if height := evaluateScript[float64](b, `(() => { const r = [...document.querySelectorAll('[data-ticks] tbody tr')].map((e) => e.getBoundingClientRect()); return r.at(-1).bottom - r[0].top; })()`); height > parked*33 {
		b.t.Errorf("%d rows have %.0f pixels", parked, height)
	}

	empty := `[...document.querySelectorAll('main table')].flatMap((t) => [...t.querySelectorAll('thead th')].filter((e, i) => t.tBodies[0].rows.length && !e.querySelector('input') && ![...t.tBodies[0].rows].some((r) => r.cells[i].querySelector('svg') || !['', '–'].includes(r.cells[i].innerText.trim()))).map((e) => e.innerText))`
	for _, at := range append([]string{"/waiting?reason=parked"}, pages...) {
		b.openPage(at)
		if columns := evaluateScript[[]string](b, empty); len(columns) > 0 {
			b.t.Errorf("%s: columns without a value: %q", at, columns)
		}
	}

	b.openPage("/waiting?reason=parked")
	b.waitUntil("a shortened topic with its full name", fmt.Sprintf(`(() => {
		const e = [...document.querySelectorAll('[data-ticks] tbody .mid')].find((e) => e.title === %q);
		return e && e.textContent === e.title && e.firstChild.scrollWidth > e.firstChild.clientWidth && e.lastChild.innerText === '-missing';
	})()`, s.topic+"-missing"))
	// A refresh would replace the button. Only a click of the mouse may copy.
	b.clickButtonIn("header", "Pause refresh")
	b.openPage("/waiting?reason=parked")
	// The strip moves the list, and so what is under the pointer.
	b.waitUntil("the strip", "document.querySelector('#strip .status')")
	b.waitUntil("a button that copies the name under the pointer", `(() => {
		[...document.querySelectorAll('[data-ticks] td .mid')].find((e) => e.title.length > 12).dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
		return document.querySelector('.floating');
	})()`)
	evaluateScript[bool](b, "document.addEventListener('copy', (e) => { document.body.dataset.copied = e.clipboardData.getData('text/plain') + '|' + document.querySelector('.floating').parentElement.querySelector('.mid').title; }), true")
	b.runActions("a click on it", chromedp.Click(`.floating`))
	b.waitForText("Copied")
	if copied, name, _ := strings.Cut(evaluateScript[string](b, "document.body.dataset.copied"), "|"); copied != name || name == "" {
		b.t.Errorf("copied %q, want %q", copied, name)
	}

	// The button also appears at the link with the focus, and is the next stop of Tab.
	b.openPage("/waiting?reason=parked")
	b.waitUntil("the focus on the link of a row", `(() => { const e = document.querySelector('[data-ticks] tbody .cut a'); e.focus(); return document.activeElement === e; })()`)
	b.waitUntil("a button at the link", `document.querySelector('.floating')?.parentElement === document.activeElement.closest('.cut')`)
	b.runActions("Tab and Enter", chromedp.KeyEvent(kb.Tab), chromedp.KeyEvent(kb.Enter))
	b.waitUntil("the name to be copied", `document.activeElement.matches('.floating') && document.activeElement.innerText === 'Copied'`)
	b.runActions("Tab", chromedp.KeyEvent(kb.Tab))
	b.waitUntil("the button at the next link", `document.querySelector('.floating')?.parentElement === document.activeElement.closest('.cut') && !document.activeElement.matches('.floating')`)
	b.clickButtonIn("header", "Refresh paused")
	b.checkConsole("tables")
}

// testTimes filters by a time that the reader types in the own zone.
func testTimes(s *scene, b *tab) {
	from := time.Now().Add(-time.Hour).Truncate(time.Minute)
	b.openPage("/log")
	b.clickButton("More conditions")
	b.runActions("a time", chromedp.SetValue(`input[name=from]`, formatInput(from)))
	b.clickButton("Filter")
	b.waitUntil("the time in UTC in the address", fmt.Sprintf(`location.search === '?' + new URLSearchParams({from: %q})`, from.UTC().Format(time.RFC3339)))
	b.waitUntil("the same time in the form", fmt.Sprintf(`document.querySelector('input[name=from]').value === %q`, formatInput(from)))
	b.waitForText("took_over")
	b.clickButton("Clear")
	b.waitUntil("the list without a condition", "location.search === '' && document.readyState === 'complete'")
	b.runActions("the last hour", chromedp.SetValue(`select[name=since]`, "1h"))
	b.clickButton("Filter")
	b.waitUntil("the condition", `location.search === '?since=1h'`)
	b.waitForText("took_over")

	// Before the script has run, times are in UTC and have no title.
	b.waitUntil("the times of the reader's zone", `document.querySelector('tbody time[title]')`)
	shown := evaluateScript[string](b, `document.querySelector('tbody time').innerText`)
	exact, err := time.Parse(time.RFC3339, evaluateScript[string](b, `document.querySelector('tbody time').title`))
	if err != nil || shown != exact.In(reader).Format(time.DateTime) {
		b.t.Errorf("%v is shown as %q: %v", exact, shown, err)
	}
	b.checkConsole("times")
}

// testSelection ticks a range of letters with Shift, and leaves the question with Escape.
func testSelection(s *scene, b *tab) {
	b.openPage("/dead?limit=8")
	b.runActions("the first box", chromedp.Click(`tbody tr:nth-child(2) input[name=pick]`))
	b.waitUntil("Shift and a click on another box", `(() => { document.querySelector('tbody tr:nth-child(5) input[name=pick]').dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true, shiftKey: true})); return true; })()`)
	b.waitForText("4 selected")

	b.clickButton("Discard …")
	b.waitForText("moved into the archive")
	b.waitUntil("the focus on the question", "document.activeElement.getAttribute('aria-label') === 'Effect of this action'")

	// Before the script has run, the key has no effect.
	b.waitUntil("the script", "document.readyState === 'complete'")
	b.runActions("Escape", chromedp.KeyEvent(kb.Escape))
	b.waitUntil("the list", `location.pathname === '/dead' && document.querySelector('input[name=pick]')`)

	if n := s.countLetters(bson.D{}); n != forbidden+expired {
		b.t.Errorf("%d dead letters are left", n)
	}
	b.checkConsole("selection")
}
