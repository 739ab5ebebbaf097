package opspage

import (
	"crypto/rand"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// action is an action of operators. The page shows the preview of plan, and calls its run after the
// confirmation.
type action struct {
	title  string
	button string
	danger bool   // cannot be undone
	slots  bool   // may be restricted to one slot
	back   string // path of the page to which it belongs
	plan   func(*call) (preview, error)
}

// preview is the expected result of an action.
type preview struct {
	Lines   []string
	Count   int64 // of the affected entries; −1 if there is nothing to count
	Total   int64 // for the progress, if Count has another number, which the action need not reach; 0: Count
	Rows    []row
	Undo    string // whether and how the action can be undone
	Phrase  string // to be typed as a confirmation; "" requires none
	Nothing bool   // there is nothing to do

	run func() (notice, error) // carries the action out
}

// question is a preview that is shown for confirmation.
type question struct {
	preview
	Name   string
	Button string
	Danger bool
	Fields []row
	Said   string // why the page asks again
	Back   string
}

// Fields of a form with the place from which a person acts.
const (
	listField   = "_list"   // the query of the list
	screenField = "_screen" // the path of the screen, if it is not the one to which the action belongs
	onceField   = "_once"   // the id of a question, which is confirmed once
)

// maxForm bounds the form of an action. A payload may be as large as an envelope.
const maxForm = 17 << 20

// linkBack returns the link to the page to which the action belongs, with the query of the list from
// which the person acts. Only the query comes from the form, so that it cannot lead to another page.
func (c *call) linkBack(path string, pairs ...any) string {
	link := c.v.Link(path, pairs...)
	address, err := url.Parse(link)
	list, listErr := url.ParseQuery(c.q.Get(listField))
	if err != nil || listErr != nil || len(list) == 0 {
		return link
	}

	query := address.Query()
	for name, values := range list {
		if name != "done" && name != "watcher" {
			query[name] = values
		}
	}
	address.RawQuery = query.Encode()
	return address.String()
}

// linkResult returns the link to the page that shows the result of the action. A letter from whose page a person acts may be gone, so
// its list shows the result.
func (c *call) linkResult(pairs ...any) string {
	if c.from != c.action.back {
		return c.v.Link(c.action.back, pairs...)
	}
	return c.linkBack(c.action.back, pairs...)
}

// handleAction returns a handler that parses the form of an action, plans the action, and calls
// respond.
func (p *page) handleAction(respond func(http.ResponseWriter, *http.Request, *call, preview)) http.HandlerFunc {
	return p.handle(p.o.Act, func(response http.ResponseWriter, request *http.Request, call *call) {
		action, known := actions[request.PathValue("action")]
		if !known && call.who.Operator() {
			p.serveNotFound(response, request, call)
			return
		}

		err := p.parseActionForm(response, request, call, action)
		if err != nil {
			p.serveProblem(response, request, call, err)
			return
		}
		// The action of a first click may have changed already what a second click would plan.
		if started, known := p.tasks.FindOnce(call.q.Get(onceField), call.who.Actor.Name); known {
			p.finishAction(response, request, call, started)
			return
		}

		plan, err := action.plan(call)
		if err != nil {
			p.showAgain(response, request, call, err)
			return
		}
		respond(response, request, call, plan)
	})
}

// showAgain shows the page with the form again, with the reason why the action cannot be planned, and with the entered values.
func (p *page) showAgain(response http.ResponseWriter, request *http.Request, call *call, err error) {
	problem := newProblem(err)
	screen := findScreen(call.from)
	if screen == nil || problem.Status >= http.StatusInternalServerError {
		p.serveProblem(response, request, call, err)
		return
	}

	problem.Title = "Nothing was done"
	again := *call
	again.q, _ = url.ParseQuery(call.q.Get(listField))
	again.v.Query, again.v.Entered = again.q, call.q
	again.v.Path, again.v.Title = screen.address(), screen.title
	again.v.Said, again.v.SaidInForm = problem, screen.saysInForm && call.from == call.action.back
	p.renderScreen(response, request, screen, &again, problem.Status)
}

// parseActionForm sets the fields of the call that depend on the form.
func (p *page) parseActionForm(response http.ResponseWriter, request *http.Request, call *call, action action) error {
	// The listener checks the role as well, but a page that is mounted elsewhere must be safe too.
	if !call.who.Operator() {
		return errRole
	}

	request.Body = http.MaxBytesReader(response, request.Body, maxForm)
	if mediaType, _, _ := mime.ParseMediaType(request.Header.Get("Content-Type")); mediaType != "application/x-www-form-urlencoded" {
		return invalidInput("an action requires a form, not %q", mediaType)
	}
	if err := request.ParseForm(); err != nil {
		return invalidInput("the form cannot be parsed: %v", err)
	}

	// From here on, everything reads the fields of the form, not the query of its address.
	call.q = request.PostForm
	call.action = action
	watcher := call.q.Get("watcher")
	if watcher == "" {
		watcher = p.o.Watcher
	}
	call.use = p.o.UseCases(call.who.Actor, watcher, call.slot())

	call.v.Query = url.Values{}
	call.v.Watcher = watcher
	call.v.Title = action.title
	if screen := findScreen(action.back); screen != nil {
		call.v.Area = screen.area
	}

	// Only the path of a screen is accepted, so that the form cannot lead to another site.
	call.from = action.back
	if screen := findScreen(call.q.Get(screenField)); screen != nil {
		call.from = screen.address()
	}
	call.back = call.linkBack(call.from)
	return nil
}

// slot returns the slot to which the action is restricted, or "" for all slots.
func (c *call) slot() string {
	if !c.action.slots {
		return ""
	}
	return c.value(slotField)
}

// confirm shows the preview of an action.
func (p *page) confirm(response http.ResponseWriter, request *http.Request, call *call, plan preview) {
	p.ask(response, http.StatusOK, request, call, plan, "")
}

// ask shows a preview with the reason why the page asks again, if there is one.
func (p *page) ask(response http.ResponseWriter, status int, request *http.Request, call *call, plan preview, reason string) {
	question := question{
		preview: plan,
		Name:    request.PathValue("action"),
		Button:  call.action.button,
		Danger:  call.action.danger,
		Said:    reason,
		Back:    call.back,
	}

	// Fields with an underscore belong to the confirmation itself.
	for name, values := range call.q {
		if strings.HasPrefix(name, "_") && name != listField && name != screenField || name == "watcher" {
			continue
		}
		for _, v := range values {
			question.Fields = append(question.Fields, row{name, v})
		}
	}
	// If the number has changed, the action shows the preview again.
	question.Fields = append(question.Fields, row{"_count", strconv.FormatInt(plan.Count, 10)}, row{onceField, rand.Text()})
	call.v.Data = question
	p.render(response, status, "confirm", "layout", call.v)
}

// executeAction executes a confirmed action. If it would affect another number of entries now, executeAction asks again.
func (p *page) executeAction(response http.ResponseWriter, request *http.Request, call *call, plan preview) {
	if reason := call.checkConfirmation(plan); reason != "" {
		p.ask(response, http.StatusConflict, request, call, plan, reason)
		return
	}

	p.finishAction(response, request, call, p.startTask(call, plan, request.PathValue("action")))
}

// checkConfirmation returns the reason why the page must ask again, or "".
func (c *call) checkConfirmation(plan preview) string {
	confirmed, err := strconv.ParseInt(c.q.Get("_count"), 10, 64)
	switch {
	case err != nil:
		return "Nothing was done yet: it has to be confirmed."
	case plan.Nothing:
		return "There is nothing left to do."

	// The list has changed since the preview, so the person has confirmed another action.
	case confirmed != plan.Count:
		return fmt.Sprintf("Nothing was done: %s were confirmed, but there are %s now.",
			formatNumber(confirmed), formatNumber(plan.Count))
	case plan.Phrase != "" && strings.TrimSpace(c.q.Get("_phrase")) != plan.Phrase:
		return "Nothing was done: the typed text is not the phrase."
	}
	return ""
}
