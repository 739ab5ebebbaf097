package e2e

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// axe is axe-core from its npm package, with its license files next to it.
//
//go:embed testdata/axe/axe.min.js
var axe string

// findBrowser returns a browser from the PATH, or downloads one.
func findBrowser(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	program, err := devstack.FindBrowser(ctx, devstack.Lines(os.Stderr))
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// tab is one tab of a browser.
type tab struct {
	t   *testing.T
	ctx context.Context
	url string // base URL of the page
	dir string // for screenshots

	mu      sync.Mutex
	console []string        // errors on the console, exceptions, policy violations
	offered map[string]bool // actions that have a form on one of the opened pages
}

// artifactDir returns the directory for screenshots.
func artifactDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", "artifacts", "e2e"))
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// watch logs violations of the content security policy to the console, where checkConsole finds them.
const watch = `document.addEventListener('securitypolicyviolation', (e) => console.error('policy: ' + e.violatedDirective + ' ' + e.blockedURI + ' ' + e.sample))`

// openTab starts a browser and returns at once. The tab is ready when the channel has delivered a nil error.
func openTab(t *testing.T) (*tab, <-chan error) {
	t.Helper()
	b := &tab{t: t, dir: artifactDir(t), offered: map[string]bool{}}
	alloc, closeBrowser := chromedp.NewExecAllocator(t.Context(), append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(findBrowser(t)), chromedp.WSURLReadTimeout(patience), chromedp.WindowSize(1280, 900))...)
	ctx, closeTab := chromedp.NewContext(alloc)
	b.ctx = ctx
	ready, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		err := chromedp.Listen(ctx, b.collectConsole)
		if err == nil {
			_, err = chromedp.Call(ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: watch})
		}
		if err == nil {
			_, err = chromedp.Call(ctx, emulation.SetTimezoneOverride, emulation.SetTimezoneOverrideParams{TimezoneID: reader.String()})
		}
		ready <- err
	}()

	t.Cleanup(func() {
		<-ended
		// Cancel waits until the browser has ended.
		_ = chromedp.Cancel(ctx)
		closeTab()
		closeBrowser()
	})
	return b, ready
}

// collectConsole stores errors and warnings of the console.
func (b *tab) collectConsole(ev any) {
	var text string
	switch e := ev.(type) {
	case *runtime.EventConsoleAPICalled:
		if e.Type != "error" && e.Type != "warning" {
			return
		}
		for _, a := range e.Args {
			text += " " + string(a.Value) + a.Description
		}

	case *runtime.EventExceptionThrown:
		text = fmt.Sprintf("%+v", *e.ExceptionDetails)
	case *log.EventEntryAdded:
		if e.Entry.Level != "error" && e.Entry.Level != "warning" {
			return
		}
		text = e.Entry.Text + " " + e.Entry.URL

	default:
		return
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	b.console = append(b.console, text)
}

// checkConsole fails the test for each stored message, and clears them.
func (b *tab) checkConsole(why string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range b.console {
		b.t.Errorf("%s: console message: %s", why, n)
	}
	b.console = nil
}

// consoleMessages returns the errors and warnings since the last call of checkConsole or clearConsole.
func (b *tab) consoleMessages() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.console)
}

// clearConsole removes the stored messages and returns their number.
func (b *tab) clearConsole() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, b.console = len(b.console), nil
	return n
}

// runActions runs the steps in their order. It repeats a step whose node was replaced by a refresh of the
// page after it was found. The steps before it are not repeated, because a second click would undo the first.
func (b *tab) runActions(what string, steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()

	for _, step := range steps {
		err := chromedp.Do(ctx, step)
		for isNodeGone(err) && ctx.Err() == nil {
			err = chromedp.Do(ctx, step)
		}
		if err != nil {
			b.saveScreenshot("failed")
			b.t.Fatalf("%s: %v", what, err)
		}
	}
}

// isNodeGone reports whether the browser rejected a command, because its node is no longer in the page.
func isNodeGone(err error) bool {
	var rejected *cdproto.Error
	return errors.As(err, &rejected) && strings.Contains(rejected.Message, "node")
}

func (b *tab) openPage(path string) {
	b.t.Helper()
	b.runActions("opening "+path, chromedp.Navigate(b.url+path))
	for _, name := range evaluateScript[[]string](b, "[...document.querySelectorAll('form[method=post]:not([action^=\"/log\"]) button')].map((e) => (e.getAttribute('formaction') || e.form.getAttribute('action')).replace('/confirm/', ''))") {
		b.offered[name] = true
	}
}

// confirmAction confirms the action on the current page and waits for its notice.
func (b *tab) confirmAction(question, button, notice string) {
	b.t.Helper()
	b.waitForText(question)
	b.clickButtonIn("main form", button)
	b.waitUntil(fmt.Sprintf("the notice %q", notice), fmt.Sprintf("document.querySelector('main .banner.ok')?.innerText.includes(%q)", notice))
}

// evaluateScript returns the value of a JavaScript expression in the page.
func evaluateScript[T any](b *tab, js string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](js, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%.200s: %v", js, err)
	}
	return v
}

// waitUntil waits until an expression is true. Errors are ignored, because there is no document while
// the page changes.
func (b *tab) waitUntil(what, js string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	tick := time.NewTicker(40 * time.Millisecond)
	defer tick.Stop()

	for {
		if ok, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("!!("+js+")")); err == nil && ok {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			b.saveScreenshot("failed")
			b.t.Fatalf("waiting for %s timed out; console: %.600q; page: %.600s", what, b.consoleMessages(), b.pageText())
		}
	}
}

func (b *tab) pageText() string {
	ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
	defer cancel()
	s, _ := chromedp.Run(ctx, chromedp.Evaluate[string]("document.body.innerText"))
	return s
}

// waitForText waits for a text on the page.
func (b *tab) waitForText(text string) {
	b.t.Helper()
	b.waitUntil(fmt.Sprintf("the text %q", text), fmt.Sprintf("document.body.innerText.includes(%q)", text))
}

// clickButton clicks the first visible button or link with this text in the main content.
func (b *tab) clickButton(text string) {
	b.t.Helper()
	b.clickButtonIn("main", text)
}

// openQuestion follows a button of a page that refreshes itself until the page with the question appears. A mouse click can miss, because a
// refresh moves the button.
func (b *tab) openQuestion(text, question string) {
	b.t.Helper()
	b.waitUntil(fmt.Sprintf("the question %q", question), fmt.Sprintf(`(() => {
		if (document.body.innerText.includes(%q)) return true;
		if (Date.now() - (window.pressedAt || 0) < 2000) return false;
		const at = [...document.querySelectorAll('main button, main a')].find((e) => e.textContent.trim().startsWith(%q) && e.offsetParent);
		if (at) { window.pressedAt = Date.now(); at.click(); }
		return false;
	})()`, question, text))
}

// follow follows a link of a page that refreshes itself. A refresh between the two halves of a mouse click would lose the click.
func (b *tab) follow(link string) {
	b.t.Helper()
	b.waitUntil("the link "+link, fmt.Sprintf(`(() => { const e = document.querySelector(%q); if (e) setTimeout(() => e.click()); return e; })()`, link))
}

// clickButtonIn is clickButton within the elements of a selector. It sends a mouse click.
func (b *tab) clickButtonIn(within, text string) {
	b.t.Helper()
	mark := fmt.Sprintf(`(() => {
		document.querySelectorAll('[data-press]').forEach((e) => e.removeAttribute('data-press'));
		const at = [...document.querySelectorAll(%q + ' button, ' + %q + ' a, ' + %q + ' summary')].find((e) => e.textContent.trim().startsWith(%q) && e.offsetParent);
		if (at) at.dataset.press = '1';
		return !!at;
	})()`, within, within, within, text)
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	for {
		b.waitUntil("a button "+text, mark)
		err := chromedp.Do(ctx, chromedp.Click(`[data-press]`))
		if err == nil {
			return
		}

		// A refresh of the page may replace the button after it was found and before it is clicked.
		if !isNodeGone(err) || ctx.Err() != nil {
			b.saveScreenshot("failed")
			b.t.Fatalf("clicking %q: %v", text, err)
		}
	}
}

// takeScreenshot waits until the page is complete, and saves a screenshot of it if the documentation is written. Without a
// graphics card a browser needs up to a second for a picture, and no test looks at it.
func (b *tab) takeScreenshot(name string) {
	b.t.Helper()
	b.waitUntil("the complete page", `document.readyState === 'complete' && !document.querySelector('#strip > .muted')`)
	if *writeDocs {
		b.saveScreenshot(name)
	}
}

// saveScreenshot saves a screenshot of the whole page. It tries again, because a browser may not respond
// while it draws a page for the first time.
func (b *tab) saveScreenshot(name string) {
	b.t.Helper()
	var png []byte
	var err error
	for range 4 {
		ctx, cancel := context.WithTimeout(b.ctx, patience/4)
		png, err = chromedp.Run(ctx, chromedp.FullScreenshot(100))
		cancel()
		if err == nil {
			break
		}
	}

	if err == nil {
		err = os.WriteFile(filepath.Join(b.dir, name+".png"), png, 0o644)
	}
	if title := documented[name]; err == nil && *writeDocs && title != "" {
		err = writeSmall(filepath.Join("..", "..", "docs", "img", title+".png"), png)
	}
	if err != nil {
		b.t.Errorf("taking the screenshot %s: %v", name, err)
	}
}

// setWindowSize sets the size of the window in pixels.
func (b *tab) setWindowSize(width, height int64) {
	b.t.Helper()
	b.runActions("a window of another size", chromedp.EmulateViewport(width, height))
}

// testColors has the system prefer dark or light.
func (b *tab) setColorScheme(scheme string) {
	b.t.Helper()
	if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}); err != nil {
		b.t.Fatal(err)
	}
}

// violation is a finding of axe.
type violation struct {
	ID     string
	Impact string
	Help   string
	Nodes  []string
}

// checkAccessibility fails the test for each serious or critical finding of axe.
func (b *tab) checkAccessibility(where string) {
	b.t.Helper()
	if !evaluateScript[bool](b, "!!window.axe") {
		evaluateScript[bool](b, axe+";true")
	}
	found := evaluateScript[[]violation](b, `axe.run(document, {resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']}).then((r) => r.violations.filter((v) => v.impact === 'serious' || v.impact === 'critical')
		.map((v) => ({ID: v.id, Impact: v.impact, Help: v.help, Nodes: v.nodes.slice(0, 3).map((n) => n.html + ' ' + (n.failureSummary || ''))})))`)
	for _, v := range found {
		b.t.Errorf("%s: %s %s: %s\n  %s", where, v.Impact, v.ID, v.Help, strings.Join(v.Nodes, "\n  "))
	}
}
