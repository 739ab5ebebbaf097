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

	"github.com/outrelay/outrelay/internal/devstack"
)

// axe-core as its npm package has it, its licences beside it.
//
//go:embed testdata/axe/axe.min.js
var axe string

// findBrowser returns a browser on the PATH or fetches one, as the servers are fetched.
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
	url string // of the page
	dir string // of screenshots

	mu      sync.Mutex
	noise   []string        // errors of the console, exceptions, violations of the policy
	offered map[string]bool // names of actions that the pages which were opened have forms for
}

// artifacts is where screenshots are left.
func artifacts(t *testing.T) string {
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

// watch has violations of the policy end up in the console, where they are counted.
const watch = `document.addEventListener('securitypolicyviolation', (e) => console.error('policy: ' + e.violatedDirective + ' ' + e.blockedURI + ' ' + e.sample))`

// openTab starts a browser. It is ready when the channel has told so: what it needs is started meanwhile.
func openTab(t *testing.T) (*tab, <-chan error) {
	t.Helper()
	b := &tab{t: t, dir: artifacts(t), offered: map[string]bool{}}
	alloc, closeBrowser := chromedp.NewExecAllocator(t.Context(), append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(findBrowser(t)), chromedp.WSURLReadTimeout(patience), chromedp.WindowSize(1280, 900))...)
	ctx, closeTab := chromedp.NewContext(alloc)
	b.ctx = ctx
	ready, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		err := chromedp.Listen(ctx, b.hear)
		if err == nil {
			_, err = chromedp.Call(ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: watch})
		}
		ready <- err
	}()

	t.Cleanup(func() {
		<-ended
		_ = chromedp.Cancel(ctx) // waits for the browser's end
		closeTab()
		closeBrowser()
	})
	return b, ready
}

// hear keeps what the page should not say.
func (b *tab) hear(ev any) {
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
	b.noise = append(b.noise, text)
}

// quiet checks that nothing was said, and forgets it.
func (b *tab) quiet(why string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range b.noise {
		b.t.Errorf("%s: the console says %s", why, n)
	}
	b.noise = nil
}

// heard returns the errors and warnings since the last call of quiet or forget.
func (b *tab) heard() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.noise)
}

// forget drops what the console said.
func (b *tab) forget() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, b.noise = len(b.noise), nil
	return n
}

func (b *tab) do(what string, steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, steps...); err != nil {
		b.shot("failed")
		b.t.Fatalf("%s: %v", what, err)
	}
}

func (b *tab) open(path string) {
	b.t.Helper()
	b.do("opening "+path, chromedp.Navigate(b.url+path))
	for _, name := range eval[[]string](b, "[...document.querySelectorAll('form[method=post] button')].map((e) => (e.getAttribute('formaction') || e.form.getAttribute('action')).replace('/confirm/', ''))") {
		b.offered[name] = true
	}
}

// confirm carries out what the page that is shown asks about, and waits for what is said of it afterwards.
func (b *tab) confirm(asks, button, said string) {
	b.t.Helper()
	b.says(asks)
	b.pressIn("main form", button)
	b.until(fmt.Sprintf("the notice %q", said), fmt.Sprintf("document.querySelector('main .banner.ok')?.innerText.includes(%q)", said))
}

// eval is the value of an expression in the page.
func eval[T any](b *tab, js string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](js, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%.200s: %v", js, err)
	}
	return v
}

// until waits for an expression to be true. It may fail on the way: a page that is left has no document for a moment.
func (b *tab) until(what, js string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	again := time.NewTicker(40 * time.Millisecond)
	defer again.Stop()
	for {
		if ok, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("!!("+js+")")); err == nil && ok {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			b.shot("failed")
			b.t.Fatalf("waiting for %s; the console says: %.600q; the page says: %.600s", what, b.heard(), b.text())
		}
	}
}

func (b *tab) text() string {
	ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
	defer cancel()
	s, _ := chromedp.Run(ctx, chromedp.Evaluate[string]("document.body.innerText"))
	return s
}

// says waits for a text on the page.
func (b *tab) says(text string) {
	b.t.Helper()
	b.until(fmt.Sprintf("the text %q", text), fmt.Sprintf("document.body.innerText.includes(%q)", text))
}

// press clicks the first visible button or link of that text in the content.
func (b *tab) press(text string) {
	b.t.Helper()
	b.pressIn("main", text)
}

// pressIn is press within what a selector names. It is a click as of a mouse.
func (b *tab) pressIn(within, text string) {
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
		b.until("a button "+text, mark)
		err := chromedp.Do(ctx, chromedp.Click(`[data-press]`))
		if err == nil {
			return
		}

		// A refresh of the page may replace the button after it was found and before it is pressed.
		var gone *cdproto.Error
		if !errors.As(err, &gone) || ctx.Err() != nil {
			b.shot("failed")
			b.t.Fatalf("pressing %s: %v", text, err)
		}
	}
}

// shot leaves a screenshot of the whole page. A browser that draws a page for the first time may not answer; then it is
// asked again.
func (b *tab) shot(name string) {
	b.t.Helper()
	var png []byte
	var err error
	for range 4 {
		ctx, cancel := context.WithTimeout(b.ctx, patience/4)
		if _, err = chromedp.Run(ctx, chromedp.Evaluate[bool](`new Promise((done) => { const look = () => document.readyState === 'complete' ? done(true) : setTimeout(look, 20); look(); })`, chromedp.EvalAwaitPromise)); err == nil {
			png, err = chromedp.Run(ctx, chromedp.FullScreenshot(100))
		}
		cancel()
		if err == nil {
			break
		}
	}

	if err == nil {
		err = os.WriteFile(filepath.Join(b.dir, name+".png"), png, 0o644)
	}
	if err != nil {
		b.t.Errorf("a screenshot of %s: %v", name, err)
	}
}

// size makes the window that wide.
func (b *tab) size(width, height int64) {
	b.t.Helper()
	b.do("a window of another size", chromedp.EmulateViewport(width, height))
}

// colours has the system prefer dark or light.
func (b *tab) colours(scheme string) {
	b.t.Helper()
	if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}); err != nil {
		b.t.Fatal(err)
	}
}

// violation is what axe found.
type violation struct {
	ID     string
	Impact string
	Help   string
	Nodes  []string
}

// accessible checks that axe finds nothing serious.
func (b *tab) accessible(where string) {
	b.t.Helper()
	if !eval[bool](b, "!!window.axe") {
		eval[bool](b, axe+";true")
	}
	found := eval[[]violation](b, `axe.run(document, {resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']}).then((r) => r.violations.filter((v) => v.impact === 'serious' || v.impact === 'critical')
		.map((v) => ({ID: v.id, Impact: v.impact, Help: v.help, Nodes: v.nodes.slice(0, 3).map((n) => n.html + ' ' + (n.failureSummary || ''))})))`)
	for _, v := range found {
		b.t.Errorf("%s: %s %s: %s\n  %s", where, v.Impact, v.ID, v.Help, strings.Join(v.Nodes, "\n  "))
	}
}
