package opspage

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/html"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func (d deskLease) Resume(context.Context) error                          { return d.err }
func (d deskNodes) Remove(context.Context, string, admin.Removable) error { return d.err }
func (d deskReplays) Cancel(context.Context, string) error                { return d.err }
func (d *desk) Purge(context.Context, admin.Purge) (admin.PurgeReport, error) {
	return result[admin.PurgeReport](d)
}

func (d *desk) Clear(context.Context, admin.ClearOrder) (admin.Cleared, error) {
	return result[admin.Cleared](d)
}

func (d deskReplays) Resume(context.Context, string) (admin.ReplayInfo, error) {
	return result[admin.ReplayInfo](d.desk)
}

func (d deskReplays) Plan(context.Context, admin.ReplayOrder) (admin.ReplayPlan, error) {
	return result[admin.ReplayPlan](d.desk)
}

func (d deskReplays) Start(context.Context, admin.ReplayOrder) (admin.ReplayInfo, error) {
	return result[admin.ReplayInfo](d.desk)
}

func (d deskNodes) Release(context.Context, string, time.Duration) ([]string, error) {
	return result[[]string](d.desk)
}

func (d deskSchedule) Cancel(context.Context, admin.ScheduledFilter, func(int64)) (admin.Cancelled, error) {
	return admin.Cancelled{Cancelled: 2}, d.err
}

func (d deskSchedule) Move(context.Context, admin.ScheduledFilter, time.Time, func(int64)) (admin.Rescheduled, error) {
	return result[admin.Rescheduled](d.desk)
}

func (d deskInboxes) Purge(context.Context, admin.InboxPurge) (admin.InboxPurged, error) {
	return result[admin.InboxPurged](d.desk)
}

func (d deskInboxes) Release(context.Context, string, string, bool, admin.Effect) (admin.InboxReleased, error) {
	return result[admin.InboxReleased](d.desk)
}

func (d deskWaiting) Retry(context.Context, admin.WaitingFilter, admin.Attempts, admin.Effect) (admin.FailedOutcome, error) {
	return result[admin.FailedOutcome](d.desk)
}

// wholeSite is the page over it.
func wholeSite(text string, err error) http.Handler {
	d := &desk{text: text, err: err, count: 2}
	fill(reflect.ValueOf(&d.slots).Elem(), text)
	return New(Options{Watcher: text, Node: text, Version: text, UseCases: func(admin.Actor, string, string) UseCases { return d.useCases() }})
}

// request is one that the page serves.
type request struct {
	method, path string
	form         url.Values
}

// allRequests returns all requests that the page serves, with the text in each place that a client controls: each screen
// with each parameter, each action with its confirmation and its execution.
func allRequests(text string) (list []request) {
	q := url.Values{}
	for _, name := range []string{
		"q", "id", "key", "topic", "collection", "message", "type", "aggregate", "class", "source", "requeued", "state", "node", "actor", "kind", "of", "database", "saga",
		"marker", "after", "watcher", "done", "replay", "slot", "what", "document",
	} {
		q.Set(name, text)
	}
	for _, s := range screens {
		path := strings.TrimSuffix(s.path, "{$}")
		list = append(list, request{"GET", path, nil})
		for _, name := range slices.Sorted(maps.Keys(q)) {
			list = append(list, request{"GET", path + "?" + url.Values{name: q[name]}.Encode(), nil})
		}
		with := maps.Clone(q)
		for _, more := range []url.Values{{}, {"payload": {"1"}}, {"by": {"key"}, "payload": {"1"}}, {"from": {text}}, {"since": {text}}} {
			maps.Copy(with, more)
			list = append(list, request{"GET", path + "?" + with.Encode(), nil})
		}
	}
	list = append(list, request{"GET", "/strip?" + q.Encode(), nil}, request{"GET", "/nowhere/" + url.PathEscape(text), nil})

	for _, name := range slices.Sorted(maps.Keys(actions)) {
		form := maps.Clone(q)
		maps.Copy(form, url.Values{
			"pick": {text}, "_count": {"2"}, "_phrase": {text}, "_list": {"q=" + url.QueryEscape(text)}, "version": {"2"}, "delivery": {"2"}, "was.type": {"x"}, "set.type": {text},
			"replace-payload": {"1"}, "payload": {text}, "replace-headers": {"1"}, "headers": {"a: " + text}, text: {text},
		})
		empty := url.Values{}
		timed := maps.Clone(form)
		maps.Copy(timed, url.Values{"from": {"2026-01-01"}, "to": {"2026-01-02"}, "at": {"2030-01-01"}, "older": {"2h"}, "hold": {"2h"}, "rate": {"2"}, "what": {"dead-letters"}, "state": {""}})
		bad := maps.Clone(form)
		maps.Copy(bad, url.Values{"from": {text}, "since": {text}, "older": {text}, "rate": {text}, "version": {text}})
		for _, f := range []url.Values{form, timed, bad, empty} {
			list = append(list, request{"POST", "/confirm/" + name, f}, request{"POST", "/act/" + name, f})
		}
	}
	return append(list, request{"POST", "/confirm/" + url.PathEscape(text), q}, request{"POST", "/act/" + url.PathEscape(text), q})
}

// parseSkeleton returns a document without its text: elements and the names of their attributes. Each address in it must lead into the
// page, or to the documentation.
func parseSkeleton(t *testing.T, r request, body string) (out []string) {
	t.Helper()
	z := html.NewTokenizer(strings.NewReader(body))

	for {
		switch z.Next() {
		case html.ErrorToken:
			return out
		case html.CommentToken, html.DoctypeToken:
			out = append(out, "<!>")
		case html.EndTagToken, html.StartTagToken, html.SelfClosingTagToken:
			tok := z.Token()
			at := tok.Type.String() + tok.Data

			for _, a := range tok.Attr {
				at += " " + a.Key
				switch a.Key {
				case "href", "src", "action", "formaction", "hx-get", "hx-post":
					if u, err := url.Parse(a.Val); a.Val != manual && (err != nil || u.Scheme != "" || u.Host != "") {
						t.Errorf("%s %s leads to %q", r.method, r.path, a.Val)
					}
				}
			}
			out = append(out, at)
		default: // Text may differ.
		}
	}
}

// shownPage has the parts of a response of the page: its status, its redirect, and the elements of the
// document.
type shownPage struct {
	status   int
	location string
	elements []string
}

// askAndFollow sends a request, and follows a redirect to the page with the notice.
func askAndFollow(t *testing.T, h http.Handler, who caller, r request) shownPage {
	t.Helper()
	res, body := sendRequest(t, h, &who, r.method, r.path, r.form)
	to := res.Header.Get("Location")
	if to != "" {
		if u, err := url.Parse(to); err != nil || u.Host != "" || u.Scheme != "" || !strings.HasPrefix(to, "/") || strings.HasPrefix(to, "//") {
			t.Errorf("%s %s redirects to %q", r.method, r.path, to)
		}
		_, body = sendRequest(t, h, &who, "GET", to, nil)
	}
	return shownPage{res.StatusCode, to, parseSkeleton(t, r, body)}
}

// The texts of events, nodes, addresses and forms remain text: they change no element and no attribute of any screen,
// question, notice or problem.
func TestHostileTextChangesNoElement(t *testing.T) {
	t.Parallel()
	const plain = "plain text"
	texts := []string{
		plain,
		"\"><img src=x onerror=alert(1)>' autofocus onfocus='alert(1) `${alert(1)}` </title></textarea></script><svg onload=alert(1)><!-- --><b> {{.}} &lt;b&gt;&#60;b> \u2028\u202e",
		"javascript:alert(1)//", "//evil.example/<script src=//evil.example></script>",
	}
	requests := make([][]request, len(texts))
	for k, text := range texts {
		requests[k] = allRequests(text)
	}

	for name, fail := range map[string]func(text string) error{
		"":          func(string) error { return nil },
		"failing":   errors.New,
		"rejecting": func(text string) error { return &admin.InvalidError{Reason: text} },
	} {
		sites, callers := make([]http.Handler, len(texts)), make([]caller, len(texts))
		for k, text := range texts {
			sites[k], callers[k] = wholeSite(text, fail(text)), operator
			callers[k].Actor.Name = text
		}

		shown := 0
		for i := range requests[0] {
			want := askAndFollow(t, sites[0], callers[0], requests[0][i])
			for k := 1; k < len(texts); k++ {
				r := requests[k][i]
				got := askAndFollow(t, sites[k], callers[k], r)
				if got.status != want.status || (got.location == "") != (want.location == "") {
					t.Errorf("%s %s %s with %q: %d, and %d with plain text", name, r.method, r.path, texts[k], got.status, want.status)
					continue
				}

				if !slices.Equal(got.elements, want.elements) {
					j := 0
					for j < min(len(got.elements), len(want.elements)) && got.elements[j] == want.elements[j] {
						j++
					}
					t.Errorf("%s %s %s with %q: %q instead of %q", name, r.method, r.path, texts[k], got.elements[j:min(j+3, len(got.elements))], want.elements[j:min(j+3, len(want.elements))])
				}
			}
			if want.status < 400 {
				shown++
			}
		}
		if name == "" && shown < len(screens)*20+len(actions) {
			t.Errorf("only %d of %d requests show anything but a problem", shown, len(requests[0]))
		}
	}
}
