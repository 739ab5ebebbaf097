package opspage

import (
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

// listField is the form field with the query of the list from which a person acts.
const listField = "_list"

// maxForm bounds the form of an action. A payload may be as large as an envelope.
const maxForm = 17 << 20

// linkBack returns the link to the page to which the action belongs, with the query of the list from
// which the person acts. Only the query comes from the form, so that it cannot lead to another page.
func (c *call) linkBack(path string, pairs ...any) string {
	link := c.v.Link(path, pairs...)
	u, err := url.Parse(link)
	list, listErr := url.ParseQuery(c.q.Get(listField))
	if err != nil || listErr != nil || len(list) == 0 {
		return link
	}

	q := u.Query()
	for name, values := range list {
		if name != "done" && name != "watcher" {
			q[name] = values
		}
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// handleAction returns a handler that parses the form of an action, plans the action, and calls
// respond.
func (p *page) handleAction(respond func(http.ResponseWriter, *http.Request, *call, preview)) http.HandlerFunc {
	return p.handle(p.o.Act, func(w http.ResponseWriter, r *http.Request, c *call) {
		a, known := actions[r.PathValue("action")]
		if !known && c.who.Operator() {
			p.serveNotFound(w, r, c)
			return
		}

		err := p.parseActionForm(w, r, c, a)
		if err != nil {
			p.serveProblem(w, r, c, err)
			return
		}
		plan, err := a.plan(c)
		if err != nil {
			p.serveProblem(w, r, c, err)
			return
		}
		respond(w, r, c, plan)
	})
}

// parseActionForm sets the fields of the call that depend on the form.
func (p *page) parseActionForm(w http.ResponseWriter, r *http.Request, c *call, a action) error {
	// The listener checks the role as well, but a page that is mounted elsewhere must be safe too.
	if !c.who.Operator() {
		return errRole
	}

	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if t, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); t != "application/x-www-form-urlencoded" {
		return invalidInput("an action requires a form, not %q", t)
	}
	if err := r.ParseForm(); err != nil {
		return invalidInput("the form cannot be parsed: %v", err)
	}

	// From here on, everything reads the fields of the form, not the query of its address.
	c.q = r.PostForm
	c.action = a
	watcher := c.q.Get("watcher")
	if watcher == "" {
		watcher = p.o.Watcher
	}
	c.use = p.o.UseCases(c.who.Actor, watcher, c.slot())

	c.v.Query = url.Values{}
	c.v.Watcher = watcher
	c.v.Title = a.title
	c.v.Area = strings.TrimPrefix(a.back, "/")
	c.back = c.linkBack(a.back)
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
func (p *page) confirm(w http.ResponseWriter, r *http.Request, c *call, plan preview) {
	p.ask(w, http.StatusOK, r, c, plan, "")
}

// ask shows a preview with the reason why the page asks again, if there is one.
func (p *page) ask(w http.ResponseWriter, status int, r *http.Request, c *call, plan preview, reason string) {
	q := question{
		preview: plan,
		Name:    r.PathValue("action"),
		Button:  c.action.button,
		Danger:  c.action.danger,
		Said:    reason,
		Back:    c.back,
	}

	// Fields with an underscore belong to the confirmation itself.
	for name, values := range c.q {
		if strings.HasPrefix(name, "_") && name != listField || name == "watcher" {
			continue
		}
		for _, v := range values {
			q.Fields = append(q.Fields, row{name, v})
		}
	}
	// If the number has changed, the action shows the preview again.
	q.Fields = append(q.Fields, row{"_count", strconv.FormatInt(plan.Count, 10)})
	c.v.Data = q
	p.render(w, status, "confirm", "layout", c.v)
}

// executeAction executes a confirmed action. If it would affect another number of entries now, executeAction asks again.
func (p *page) executeAction(w http.ResponseWriter, r *http.Request, c *call, plan preview) {
	if reason := c.checkConfirmation(plan); reason != "" {
		p.ask(w, http.StatusConflict, r, c, plan, reason)
		return
	}

	n, err := plan.run()
	if err != nil {
		p.serveProblem(w, r, c, err)
		return
	}

	n.actor = c.who.Actor.Name
	p.o.Log.Info("an operator acted",
		"action", r.PathValue("action"), "actor", n.actor, "watcher", c.v.Watcher, "slot", c.slot())
	http.Redirect(w, r, c.linkBack(c.action.back, "done", p.notices.store(&n)), http.StatusSeeOther)
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
