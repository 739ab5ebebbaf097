package opspage

import (
	"context"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// action is something that changes something. It is asked about with what plan says and carried out by do.
type action struct {
	title  string
	button string
	danger bool   // cannot be taken back
	slots  bool   // may be for one slot alone
	back   string // the page that it belongs to
	plan   func(*call) (preview, error)
	do     func(*call) (notice, error)
}

// preview is what an action would do.
type preview struct {
	Lines   []string
	Count   int64 // of what it would touch; −1 where there is nothing to count
	Rows    []row
	Undo    string // what can be taken back, and what not
	Phrase  string // has to be typed
	Nothing bool   // there is nothing to do
}

// question is a preview on its way to a person.
type question struct {
	preview
	Name   string
	Button string
	Danger bool
	Fields []row
	Said   string // why it is asked again
	Back   string
}

// listField is the field of a form with the query of the list that somebody acts from: its filter and its page.
const listField = "_list"

// listed is the page that an action belongs to, as it was looked at. Only the query comes from the form: it leads nowhere else.
func (c *call) listed(path string, pairs ...any) string {
	link, err := url.Parse(c.v.Link(path, pairs...))
	list, err2 := url.ParseQuery(c.q.Get(listField))
	if err != nil || err2 != nil || len(list) == 0 {
		return c.v.Link(path, pairs...)
	}
	q := link.Query()
	for k, values := range list {
		if k != "done" && k != "watcher" {
			q[k] = values
		}
	}
	link.RawQuery = q.Encode()
	return link.String()
}

// maxForm bounds the form of an action; a payload may be as long as an envelope.
const maxForm = 17 << 20

// form begins the request of an action.
func (p *page) form(w http.ResponseWriter, r *http.Request) (*call, action, context.CancelFunc, bool) {
	c, done, ok := p.begin(w, r, p.o.Act)
	if !ok {
		return nil, action{}, nil, false
	}
	name := r.PathValue("action")
	a, known := actions[name]
	refuse := func(err error) (*call, action, context.CancelFunc, bool) {
		p.fail(w, r, c, err)
		done()
		return nil, action{}, nil, false
	}
	switch {
	case !c.who.Operator():
		return refuse(errRole)
	case !known:
		p.nothing(w, r)
		done()
		return nil, action{}, nil, false
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if t, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); t != "application/x-www-form-urlencoded" {
		return refuse(wrong("an action takes a form, not %q", t))
	}
	if err := r.ParseForm(); err != nil {
		return refuse(wrong("the form cannot be read: %v", err))
	}
	watcher := r.PostForm.Get("watcher")
	if watcher == "" {
		watcher = p.o.Watcher
	}
	c.q, c.v.Query = r.PostForm, url.Values{}
	c.v.Watcher, c.use = watcher, p.o.UseCases(c.who.Actor, watcher, slotOf(c, a))
	c.v.Title, c.v.Area, c.back = a.title, strings.TrimPrefix(a.back, "/"), c.listed(a.back)
	return c, a, done, true
}

// slotOf is the slot that an action is for; "" is all, or an action that has none.
func slotOf(c *call, a action) string {
	if !a.slots {
		return ""
	}
	return c.get(slotField)
}

// confirm asks.
func (p *page) confirm(w http.ResponseWriter, r *http.Request) {
	c, a, done, ok := p.form(w, r)
	if !ok {
		return
	}
	defer done()
	plan, err := a.plan(c)
	if err != nil {
		p.fail(w, r, c, err)
		return
	}
	p.ask(w, http.StatusOK, c, a, r.PathValue("action"), plan, "")
}

func (p *page) ask(w http.ResponseWriter, status int, c *call, a action, name string, plan preview, said string) {
	q := question{preview: plan, Name: name, Button: a.button, Danger: a.danger, Said: said, Back: c.listed(a.back)}
	for k, list := range c.q {
		if strings.HasPrefix(k, "_") && k != listField || k == "watcher" {
			continue
		}
		for _, v := range list {
			q.Fields = append(q.Fields, row{k, v})
		}
	}
	q.Fields = append(q.Fields, row{"_count", strconv.FormatInt(plan.Count, 10)})
	c.v.Data = q
	p.render(w, status, "confirm", "layout", c.v)
}

// act does what was confirmed, and nothing else: if there is more or less of it now, it asks again.
func (p *page) act(w http.ResponseWriter, r *http.Request) {
	c, a, done, ok := p.form(w, r)
	if !ok {
		return
	}
	defer done()
	name := r.PathValue("action")
	plan, err := a.plan(c)
	if err != nil {
		p.fail(w, r, c, err)
		return
	}
	confirmed, err := strconv.ParseInt(c.q.Get("_count"), 10, 64)
	switch {
	case err != nil:
		p.ask(w, http.StatusConflict, c, a, name, plan, "Nothing was done yet: it has to be confirmed.")
		return
	case plan.Nothing:
		p.ask(w, http.StatusConflict, c, a, name, plan, "There is nothing left to do.")
		return
	case confirmed != plan.Count:
		p.ask(w, http.StatusConflict, c, a, name, plan, fmt.Sprintf("Nothing was done: %s were confirmed, and it is %s now.", number(confirmed), number(plan.Count)))
		return
	case plan.Phrase != "" && strings.TrimSpace(c.q.Get("_phrase")) != plan.Phrase:
		p.ask(w, http.StatusConflict, c, a, name, plan, "Nothing was done: what was typed is not the phrase.")
		return
	}
	n, err := a.do(c)
	if err != nil {
		p.fail(w, r, c, err)
		return
	}
	n.who = c.who.Actor.Name
	p.o.Log.Info("an operator acted", "action", name, "actor", n.who, "watcher", c.v.Watcher, "slot", slotOf(c, a))
	http.Redirect(w, r, c.listed(a.back, "done", p.notices.put(&n)), http.StatusSeeOther)
}
