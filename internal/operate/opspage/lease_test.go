package opspage

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// newSplitDesk returns a desk of a watcher with two slots, of which one is paused and one has a pin.
func newSplitDesk() *desk {
	return &desk{text: "x", count: 3, slots: []admin.SlotStatus{
		{Name: "orders", Slot: "0of2", State: "live", Owner: "n1/a", Node: "n1", ExpiresInMS: 900, Epoch: 4, Pin: "n1"},
		{Name: "orders", Slot: "1of2", State: "paused", Node: "n2", Epoch: 7, Paused: true},
	}}
}

// splitView is the overview of such a watcher.
type splitView struct{ *desk }

func (d splitView) Overview(context.Context) (admin.Overview, error) {
	return admin.Overview{Watcher: "orders", Slots: d.slots, Nodes: []admin.Node{
		{Node: "n1", Watchers: []string{"orders"}},
		{Node: "n2", Watchers: []string{"orders"}, Stale: true},
		{Node: "elsewhere", Watchers: []string{"payments"}},
	}}, nil
}

// If the form of an action on the lease names a slot, its question, its execution, its notice and its undo concern only
// that slot.
func TestN28_ActionsNameTheirSlot(t *testing.T) {
	t.Parallel()
	d := newSplitDesk()
	h := newSite(d)
	form := url.Values{"slot": {"0of2"}}
	r, body := sendRequest(t, h, &operator, "POST", "/confirm/pause", form)
	for _, want := range []string{"Slot 0of2 of watcher orders stops", "The other slots are left as they are", "live, on node n1, epoch 4, pinned to n1", `name="slot" value="0of2"`} {
		if r.StatusCode != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%d: the question does not contain %q", r.StatusCode, want)
		}
	}
	if d.slot != "0of2" {
		t.Errorf("the use-cases are for slot %q", d.slot)
	}
	if _, body = sendRequest(t, h, &operator, "POST", "/confirm/pause", url.Values{}); !strings.Contains(body, "This is for all 2 slots") || d.slot != "" {
		t.Errorf("without a slot it is for %q", d.slot)
	}

	form.Set("_count", "-1")
	r, _ = sendRequest(t, h, &operator, "POST", "/act/pause", form)
	if r.StatusCode != http.StatusSeeOther || !slices.Equal(d.did, []string{"pause orders 0of2"}) {
		t.Fatalf("%d, did %v", r.StatusCode, d.did)
	}

	_, body = sendRequest(t, newSite(d), &operator, "GET", r.Header.Get("Location"), nil)
	if strings.Contains(body, "is paused") {
		t.Error("the other process reports an action that it did not do")
	}

	_, body = sendRequest(t, h, &operator, "GET", r.Header.Get("Location"), nil)
	if !regexp.MustCompile(`(?s)Slot 0of2 of watcher orders is paused.*action="/confirm/resume".*name="slot" value="0of2"`).MatchString(body) {
		t.Error("the notice does not offer to resume the slot")
	}

	d.did = nil
	sendRequest(t, h, &operator, "POST", "/act/pin", url.Values{"slot": {"1of2"}, "node": {"n2"}, "_count": {"-1"}})
	if !slices.Equal(d.did, []string{"pin n2 1of2"}) {
		t.Errorf("did %v", d.did)
	}
	if sendRequest(t, h, &operator, "POST", "/confirm/dead-requeue", url.Values{"slot": {"0of2"}, "scope": {"all"}}); d.slot != "" {
		t.Error("an action that is on no slot has one")
	}
}

// What would change nothing is not offered to be confirmed, and not done.
func TestOrdersThatAreThereAreNotGivenAgain(t *testing.T) {
	t.Parallel()
	d := newSplitDesk()
	h := newSite(d)
	one := func(w admin.SlotStatus) { d.slots = []admin.SlotStatus{w} }
	for name, w := range map[string]admin.SlotStatus{
		"pause":     {Paused: true},
		"resume":    {},
		"unpin":     {},
		"pin":       {Pin: "n1"},
		"step-down": {Owner: "n1/a", ExpiresInMS: -5},
	} {
		one(w)
		form := url.Values{"node": {"n1"}}
		if _, body := sendRequest(t, h, &operator, "POST", "/confirm/"+name, form); !strings.Contains(body, "This action would change nothing") || strings.Contains(body, `action="/act/`) {
			t.Errorf("%s is offered although nothing would come of it", name)
		}
		form.Set("_count", "-1")
		if r, _ := sendRequest(t, h, &operator, "POST", "/act/"+name, form); r.StatusCode != http.StatusConflict || len(d.did) > 0 {
			t.Errorf("%s: %d, did %v", name, r.StatusCode, d.did)
		}
	}

	one(admin.SlotStatus{Owner: "n1/a", ExpiresInMS: 5})
	if r, _ := sendRequest(t, h, &operator, "POST", "/confirm/step-down", url.Values{"hold": {"0s"}}); r.StatusCode != http.StatusBadRequest {
		t.Errorf("a step-down for no time: %d", r.StatusCode)
	}
}

// A step-down that would stop the delivery states that, and requires a phrase. So a standby that stops before the confirmation is noticed.
func TestAStepDownWithoutAStandbyNeedsAPhrase(t *testing.T) {
	t.Parallel()
	d := newSplitDesk()
	h := newSite(d)
	form := url.Values{"_count": {"-1"}}
	if _, body := sendRequest(t, h, &operator, "POST", "/confirm/step-down", form); strings.Contains(body, "_phrase") || !strings.Contains(body, "another node takes over at once") {
		t.Errorf("with a standby: %s", body)
	}

	d.standby = fmt.Errorf("%w orders/0of2, so nothing of it is sent for 30s", admin.ErrNoStandby)
	r, body := sendRequest(t, h, &operator, "POST", "/act/step-down", form)
	if r.StatusCode != http.StatusConflict || !strings.Contains(body, "so nothing of it is sent for 30s") || strings.Contains(body, "another node takes over") || len(d.did) > 0 {
		t.Errorf("without the phrase: %d, did %v: %s", r.StatusCode, d.did, body)
	}
	form.Set("_phrase", "stop orders")
	sendRequest(t, h, &operator, "POST", "/act/step-down", form)
	d.standby = nil
	sendRequest(t, h, &operator, "POST", "/act/step-down", url.Values{"_count": {"-1"}})
	if want := []string{"step down for 30s, force true", "step down for 30s, force false"}; !slices.Equal(d.did, want) {
		t.Errorf("did %v, want %v", d.did, want)
	}
}

// Each slot has a row with what can be done to it; a watcher of one slot has none, and a viewer no actions.
func TestN28_EachSlotHasItsRow(t *testing.T) {
	t.Parallel()
	d := newSplitDesk()
	h := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		u := d.useCases()
		u.Operator = splitView{d}
		return u
	}})

	_, body := sendRequest(t, h, &operator, "GET", "/control", nil)
	rows := regexp.MustCompile(`(?s)<tr data-slot="([^"]+)">(.*?)</tr>`).FindAllStringSubmatch(body, -1)
	if len(rows) != 2 || rows[0][1] != "0of2" || rows[1][1] != "1of2" {
		t.Fatalf("%d rows in %s", len(rows), body)
	}

	for i, c := range []struct{ has, not []string }{
		{[]string{`value="0of2"`, "/confirm/pause", "/confirm/unpin", "/confirm/step-down"}, []string{"/confirm/resume", "/confirm/pin"}},
		{[]string{`value="1of2"`, "/confirm/resume", "/confirm/pin", "n2 (stale)"}, []string{"/confirm/unpin", "elsewhere"}},
	} {
		for _, want := range c.has {
			if !strings.Contains(rows[i][2], want) {
				t.Errorf("slot %s lacks %q", rows[i][1], want)
			}
		}
		for _, no := range c.not {
			if strings.Contains(rows[i][2], no) {
				t.Errorf("slot %s offers %q", rows[i][1], no)
			}
		}
	}
	if _, body = sendRequest(t, h, &viewer, "GET", "/control", nil); strings.Contains(body, "/confirm/") || !strings.Contains(body, `data-slot="1of2"`) {
		t.Error("a viewer sees no slots, or actions")
	}
	if _, body = sendRequest(t, h, &operator, "GET", "/", nil); !strings.Contains(body, "1 of 2 slots live, 1 paused by an operator") {
		t.Error("the overview does not show one paused slot of two")
	}

	d.slots = d.slots[:1]
	if _, body = sendRequest(t, h, &operator, "GET", "/control", nil); strings.Contains(body, "data-slot") {
		t.Error("the only slot has a row")
	}
}

// Who acts on a filtered list is back at that list, after the deed as after thinking better of it.
func TestTheFilterIsStillThereAfterwards(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 2}
	h := newSite(d)
	_, body := sendRequest(t, h, &operator, "GET", "/dead?topic=a%26b&limit=5&done=1", nil)
	if !strings.Contains(body, `name="_list" value="limit=5&amp;topic=a%26b"`) {
		t.Fatal("the form does not contain its list")
	}

	form := url.Values{"scope": {"all"}, "topic": {"a&b"}, "_list": {"limit=5&topic=a%26b&done=x&watcher=y"}}
	_, body = sendRequest(t, h, &operator, "POST", "/confirm/dead-requeue", form)
	if !strings.Contains(body, `href="/dead?limit=5&amp;topic=a%26b"`) || !strings.Contains(body, `name="_list"`) {
		t.Errorf("no way back to the list: %s", body)
	}

	form.Set("_count", "2")
	r, _ := sendRequest(t, h, &operator, "POST", "/act/dead-requeue", form)
	to, err := url.Parse(r.Header.Get("Location"))
	if err != nil || to.Host != "" || to.Path != "/dead" || to.Query().Get("topic") != "a&b" || len(to.Query()["done"]) != 1 || to.Query().Has("watcher") {
		t.Errorf("back at %s", to)
	}

	form.Set("_list", "//evil.example/?x=%zz")
	if r, _ = sendRequest(t, h, &operator, "POST", "/act/dead-requeue", form); !strings.HasPrefix(r.Header.Get("Location"), "/dead?done=") {
		t.Errorf("a made-up list leads to %s", r.Header.Get("Location"))
	}
	if _, body = sendRequest(t, h, &operator, "POST", "/confirm/dead-requeue", url.Values{"_list": {"topic=t"}}); !strings.Contains(body, `name="topic" value="t"`) {
		t.Error("after a mistake, the list has lost its filter")
	}
}

// failing is a desk with three failed envelopes.
type failing struct {
	counted admin.WaitingFilter
	tried   *admin.WaitingFilter
}

func (d *failing) Topics(context.Context) ([]admin.WaitingTopic, error) { return nil, nil }

func (d *failing) List(context.Context, admin.WaitingFilter, int, string) (admin.Page[admin.WaitingEnvelope], error) {
	return admin.Page[admin.WaitingEnvelope]{}, nil
}

func (d *failing) Retry(_ context.Context, f admin.WaitingFilter, _ admin.Attempts, dry admin.Effect) (admin.FailedOutcome, error) {
	if d.counted = f; !dry {
		d.tried = &f
	}
	return admin.FailedOutcome{Failed: 3, Done: 3}, nil
}

// The action retries all matching envelopes, not only the ones on the visible page, and only the selected ones if some are selected.
func TestAllThatFailedAreTriedAgain(t *testing.T) {
	t.Parallel()
	d := &failing{}
	h := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases { return UseCases{Waiting: d} }})
	form := url.Values{"scope": {"all"}, "topic": {"t"}}
	if _, body := sendRequest(t, h, &operator, "POST", "/confirm/retry", form); !strings.Contains(body, "3 failed events are due now") || d.counted.Topic != "t" || d.tried != nil {
		t.Errorf("by %+v, tried %v: %s", d.counted, d.tried, body)
	}

	form.Set("_count", "3")
	if sendRequest(t, h, &operator, "POST", "/act/retry", form); d.tried == nil || d.tried.Topic != "t" || len(d.tried.IDs) != 0 {
		t.Errorf("tried %v", d.tried)
	}

	for _, bad := range []url.Values{{}, {"scope": {"selected"}}} {
		if r, _ := sendRequest(t, h, &operator, "POST", "/confirm/retry", bad); r.StatusCode != http.StatusBadRequest {
			t.Errorf("%v: %d", bad, r.StatusCode)
		}
	}
}
