package opspage

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// All lists have the same form: inputs for times instead of typed text, and the values of the address in it.
func TestFiltersShowTheirConditions(t *testing.T) {
	t.Parallel()
	h := newSite(&desk{text: "x"})
	for at, want := range map[string][]string{
		"/dead?topic=orders&since=2h&from=2026-11-20T08:00:00Z": {`name="topic" value="orders"`, `<option value="2h" selected>2h</option>`, `value="2026-11-20T08:00"`, `<details id="more-filter" open>`},
		"/dead?since=1h":                {`<option value="1h" selected>last hour</option>`, `<details id="more-filter">`},
		"/log?kind=took_over":           {`<option value="took_over" selected>took_over</option>`},
		"/log?from=2026-11-20+09:00:30": {`value="2026-11-20T09:00:30"`},
		"/waiting?reason=parked":        {`<option value="parked" selected>parked</option>`},
		"/scheduled?type=PaymentDue":    {`name="type" value="PaymentDue"`, `name="from"`},
		"/lookup?q=e1&by=key":           {`<option value="key" selected>an ordering key</option>`},
		"/sagas?database=d&saga=s":      {`<input type="hidden" name="saga" value="s">`},
	} {
		r, body := sendRequest(t, h, &operator, http.MethodGet, at, nil)
		body = strings.Join(strings.Fields(body), " ")
		for _, text := range append(want, `class="filter"`) {
			if r.StatusCode != http.StatusOK || !strings.Contains(body, text) {
				t.Errorf("%s: %d without %s", at, r.StatusCode, text)
			}
		}
	}

	if got := formatInput("yesterday"); got != "" {
		t.Errorf("a text that is no time is shown as %q", got)
	}
}

// The list of all dead letters can be filtered by each class of a letter.
func TestTheClassFilterHasTheClassesOfTheList(t *testing.T) {
	t.Parallel()
	relay, handlers := admin.Classes(), admin.HandlerClasses()

	for source, want := range map[string][]string{"": slices.Concat(relay, handlers), admin.FromRelay: relay, admin.FromHandler: handlers} {
		_, body := sendRequest(t, newSite(&desk{}), &operator, http.MethodGet, "/dead?source="+source, nil)
		_, choices, _ := strings.Cut(body, `<select name="class">`)
		choices, _, _ = strings.Cut(choices, "</select>")
		for _, class := range slices.Concat(relay, handlers) {
			wanted := 0
			if slices.Contains(want, class) {
				wanted = 1
			}
			if n := strings.Count(choices, `<option value="`+class+`">`); n != wanted {
				t.Errorf("source %q: class %s is %d choices, want %d", source, class, n, wanted)
			}
		}
	}
}

// A text without a choice is an id first. If no event has this id, it is a key.
func TestLookupTriesTheKeyAfterTheID(t *testing.T) {
	t.Parallel()

	for at, want := range map[string]string{
		"/lookup?q=customer-7":        "text",
		"/lookup?q=customer-7&by=id":  "id",
		"/lookup?q=customer-7&by=key": "key",
		"/lookup?q=e-1":               "text",
	} {
		d := &desk{text: "x", unknownID: "customer-7"}
		r, body := sendRequest(t, newSite(d), &operator, http.MethodGet, at, nil)
		if got := strings.Join(d.lookups, ", "); r.StatusCode != http.StatusOK || got != want {
			t.Errorf("%s: %d, looked up as %s, want %s", at, r.StatusCode, got, want)
		}
		if explained := strings.Contains(body, "No event has the id"); explained != (at == "/lookup?q=customer-7") {
			t.Errorf("%s: the page explains that the text is a key: %v", at, explained)
		}
	}
}

// The button shows the number of letters that are requeued, without the rejected ones.
func TestTheButtonShowsTheNumberThatChanges(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 22, rejected: 15}
	form := url.Values{"scope": {"all"}}
	r, body := sendRequest(t, newSite(d), &operator, http.MethodPost, "/confirm/dead-requeue", form)
	if r.StatusCode != http.StatusOK || !strings.Contains(body, "7 dead letters are sent at once") || !strings.Contains(body, "Requeue 7<") || !strings.Contains(body, `name="_count" value="7"`) {
		t.Errorf("%d: %s", r.StatusCode, body)
	}

	d.rejected = 22
	if _, body = sendRequest(t, newSite(d), &operator, http.MethodPost, "/confirm/dead-requeue", form); !strings.Contains(body, "This action would change nothing") {
		t.Errorf("nothing can be requeued: %s", body)
	}

	at := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC).Format(time.RFC3339)
	_, body = sendRequest(t, newSite(&desk{text: "x"}), &operator, http.MethodPost, "/confirm/reschedule", url.Values{"pick": {"a", "b", "c"}, "due": {at}})
	if !strings.Contains(body, "Reschedule 2<") || !strings.Contains(body, "1 of the selected events are not scheduled any more") {
		t.Errorf("reschedule of three, two of which are scheduled: %s", body)
	}
}
