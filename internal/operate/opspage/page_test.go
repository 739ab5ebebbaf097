package opspage

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hostile is what somebody writes into an event to take over the page of an operator.
const hostile = `<i>hostile"' onload=alert(1) javascript:alert(1)</i>{{.}}`

// fill puts text into every string below v, true into flags, 2 into numbers, and two entries into lists.
func fill(v reflect.Value, text string) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(2)
	case reflect.Float64:
		v.SetFloat(2)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), text)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte(`{"payload":"<i>hostile\"</i>","type":"<i>hostile\"</i>","<i>hostile":1}`))
			return
		}

		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), text)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Date(2026, 11, 20, 8, 0, 0, 0, time.UTC)))
			return
		}

		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), text)
			}
		}
	}
}

func newFilled[T any](text string) T {
	var v T
	fill(reflect.ValueOf(&v).Elem(), text)
	return v
}

// desk returns values that are full of text, or err, and records the actions.
type desk struct {
	text      string
	err       error
	rejection error // of an action on letters
	actor     admin.Actor
	watcher   string
	slot      string
	slots     []admin.SlotStatus
	standby   error // of the check for a step-down
	count     int64
	rejected  int64         // letters of count that are not requeued
	archived  *time.Time    // when discarded letters leave the archive; nil: there is none
	payload   bool          // of the last show
	hold      chan struct{} // a discard waits until it is closed

	unknownID string // an id that no event has
	lookups   []string
	did       []string
	filter    admin.DeadFilter
	messages  admin.HandlerWaitingFilter
	edit      admin.DeadEdit
}

// The subjects of a desk.
type (
	deskLease    struct{ *desk }
	deskNodes    struct{ *desk }
	deskActivity struct{ *desk }
	deskLetters  struct{ *desk }
	deskWaiting  struct{ *desk }
	deskHandlers struct{ *desk }
	deskSchedule struct{ *desk }
	deskRecovery struct{ *desk }
	deskReplays  struct{ *desk }
	deskGroups   struct{ *desk }
	deskInboxes  struct{ *desk }
	deskSagas    struct{ *desk }
)

// useCases returns the use-cases of the desk.
func (d *desk) useCases() UseCases {
	return UseCases{
		Operator: d, Lease: deskLease{d}, Nodes: deskNodes{d}, Activity: deskActivity{d}, Letters: deskLetters{d}, Waiting: deskWaiting{d}, Handlers: deskHandlers{d},
		Schedule: deskSchedule{d}, Recovery: deskRecovery{d}, Replays: deskReplays{d}, Groups: deskGroups{d}, Inboxes: deskInboxes{d}, Sagas: deskSagas{d},
	}
}

func result[T any](d *desk) (T, error) {
	if d.err != nil {
		var none T
		return none, d.err
	}
	return newFilled[T](d.text), nil
}

func (d *desk) Overview(context.Context) (admin.Overview, error) {
	o, err := result[admin.Overview](d)
	if err == nil {
		o.Slots[0].Name, o.Slots[0].State = "orders", "live"
		o.Problems[0].Severity, o.Problems[0].Watcher = problems.Warn, "orders"
	}
	return o, err
}

func (d *desk) Acknowledge(context.Context, string) error {
	d.did = append(d.did, "acknowledge")
	return d.err
}

func (d deskActivity) Minutes(context.Context, string, int) ([]admin.Minute, error) {
	return result[[]admin.Minute](d.desk)
}

func (d deskActivity) Topics(context.Context) (admin.TopicList, error) {
	return result[admin.TopicList](d.desk)
}

func (d deskActivity) Recent(context.Context, string) (admin.RecentEvents, error) {
	return result[admin.RecentEvents](d.desk)
}

func (d *desk) Audit(context.Context, admin.AuditFilter, int, string) (admin.Page[admin.AuditEntry], error) {
	return result[admin.Page[admin.AuditEntry]](d)
}

func (d deskWaiting) Topics(context.Context) ([]admin.WaitingTopic, error) {
	return result[[]admin.WaitingTopic](d.desk)
}

func (d deskWaiting) List(context.Context, admin.WaitingFilter, int, string) (admin.Page[admin.WaitingEnvelope], error) {
	return result[admin.Page[admin.WaitingEnvelope]](d.desk)
}

func (d deskGroups) List(context.Context, bool) (admin.GroupList, error) {
	return result[admin.GroupList](d.desk)
}

func (d deskGroups) Show(context.Context, string) (admin.Group, error) {
	return result[admin.Group](d.desk)
}

func (d deskHandlers) List(context.Context, admin.HandlerWaitingFilter, int, string) (admin.Page[admin.HandlerMessage], error) {
	return result[admin.Page[admin.HandlerMessage]](d.desk)
}

func (d deskHandlers) Summary(context.Context, admin.HandlerWaitingFilter) ([]admin.HandlerWaitingGroup, error) {
	return result[[]admin.HandlerWaitingGroup](d.desk)
}

func (d deskHandlers) Retry(_ context.Context, f admin.HandlerWaitingFilter, dry admin.Effect) (admin.HandlerRetried, error) {
	d.messages = f
	if !dry {
		d.did = append(d.did, "handler-retry")
	}
	return admin.HandlerRetried{Matched: d.count, Retried: d.count}, d.err
}

func (d deskHandlers) Discard(_ context.Context, f admin.HandlerWaitingFilter, dry admin.Effect) (admin.HandlerDiscarded, error) {
	d.messages = f
	if !dry {
		d.did = append(d.did, "handler-discard")
	}
	return admin.HandlerDiscarded{Matched: d.count, Discarded: d.count}, d.err
}

func (d *desk) Lookup(_ context.Context, q admin.LookupQuery) (admin.LookupResult, error) {
	switch {
	case q.Text != "":
		d.lookups = append(d.lookups, "text")
	case q.Key != "":
		d.lookups = append(d.lookups, "key")
	default:
		d.lookups = append(d.lookups, "id")
	}
	found, err := result[admin.LookupResult](d)
	found.ByKey = q.Key != "" || q.Text != "" && q.Text == d.unknownID
	return found, err
}

func (d *desk) Conversation(context.Context, admin.ConversationQuery) (admin.Conversation, error) {
	return result[admin.Conversation](d)
}

func (d deskSchedule) List(context.Context, admin.ScheduledFilter, int, string) (admin.Page[admin.Scheduled], error) {
	return result[admin.Page[admin.Scheduled]](d.desk)
}

func (d deskSchedule) Summary(context.Context, admin.ScheduledFilter) ([]admin.ScheduledGroup, error) {
	return result[[]admin.ScheduledGroup](d.desk)
}

func (d deskSagas) Types(context.Context) ([]admin.SagaType, error) {
	return result[[]admin.SagaType](d.desk)
}

func (d deskSagas) List(context.Context, string, string, int, string) (admin.Page[admin.Saga], error) {
	return result[admin.Page[admin.Saga]](d.desk)
}

func (d deskSagas) Show(_ context.Context, _, _, _ string, payload bool) (admin.Saga, error) {
	d.payload = payload
	return result[admin.Saga](d.desk)
}

func (d deskInboxes) List(context.Context) ([]admin.InboxCounts, error) {
	return result[[]admin.InboxCounts](d.desk)
}

func (d deskInboxes) Marks(context.Context, string, string) ([]admin.InboxMark, error) {
	return result[[]admin.InboxMark](d.desk)
}

func (d deskReplays) List(context.Context, int) ([]admin.ReplayInfo, error) {
	return result[[]admin.ReplayInfo](d.desk)
}
func (d *desk) Collections(context.Context, string) ([]string, error) { return result[[]string](d) }
func (d deskLetters) List(_ context.Context, f admin.DeadFilter, _ int, _ string) (admin.Page[admin.DeadLetter], error) {
	d.filter = f
	p, err := result[admin.Page[admin.DeadLetter]](d.desk)
	p.Next = ""
	return p, err
}

func (d deskLetters) Summary(context.Context, admin.DeadFilter) ([]admin.DeadGroup, error) {
	return result[[]admin.DeadGroup](d.desk)
}

func (d deskLetters) Show(_ context.Context, _ admin.DeadRef, payload admin.Detail) (admin.DeadLetter, error) {
	d.payload = bool(payload)
	l, err := result[admin.DeadLetter](d.desk)
	l.Requeued = nil
	return l, err
}

func (d deskLetters) Requeue(_ context.Context, f admin.DeadFilter, o admin.DeadOptions, _ func(int64)) (admin.DeadOutcome, error) {
	d.filter = f
	out, err := result[admin.DeadOutcome](d.desk)
	out.Matched, out.Rejected = d.count, d.rejected
	if !o.DryRun {
		d.did = append(d.did, "requeue")
	}
	return out, errors.Join(err, d.rejection)
}

func (d deskLetters) Discard(_ context.Context, f admin.DeadFilter, dry admin.Effect, did func(int64)) (admin.DeadDiscarded, error) {
	d.filter = f
	if !dry && d.hold != nil {
		did(7)
		<-d.hold
	}
	if !dry {
		d.did = append(d.did, "discard")
	}
	return admin.DeadDiscarded{Matched: d.count, Discarded: d.count, ArchivedUntil: d.archived}, errors.Join(d.err, d.rejection)
}

func (d deskLetters) Edit(_ context.Context, _ admin.DeadRef, e admin.DeadEdit, o admin.DeadOptions) (admin.DeadEdited, error) {
	d.edit = e
	if !o.DryRun {
		d.did = append(d.did, "edit")
	}
	return result[admin.DeadEdited](d.desk)
}

func (d deskActivity) CreateTopic(_ context.Context, order admin.TopicOrder) (admin.TopicCreated, error) {
	if !order.DryRun {
		d.did = append(d.did, fmt.Sprintf("create %s %d", order.Topic, order.Partitions))
	}
	return admin.TopicCreated{Topic: order.Topic, Partitions: order.Partitions, Command: "kafka-topics.sh --create --topic '" + order.Topic + "'"}, d.err
}

func (d deskRecovery) PassOver(_ context.Context, order admin.SkipOrder) (admin.SkippedEvent, error) {
	found := admin.SkippedEvent{Collection: "shop.outbox", ID: "e-7", Bytes: 120, Letter: "dead-1"}
	if !order.DryRun {
		d.did = append(d.did, strings.TrimSpace("skip "+order.Collection+" "+order.ID+" "+d.slot))
	}
	return found, d.err
}

func (d deskLease) Slots(context.Context) ([]admin.SlotStatus, error) { return d.slots, d.err }

func (d deskLease) CheckStandby(context.Context, time.Duration) error {
	return cmp.Or(d.err, d.standby)
}

func (d deskLease) StepDown(_ context.Context, order admin.StepDownOrder) error {
	d.did = append(d.did, fmt.Sprintf("step down for %s, force %t", order.Hold, order.Force))
	return d.err
}

func (d deskNodes) List(context.Context) ([]admin.Node, error) { return result[[]admin.Node](d.desk) }

func (d deskLease) Pause(context.Context) error {
	d.did = append(d.did, strings.TrimSpace("pause "+d.watcher+" "+d.slot))
	return d.err
}

func (d deskLease) Pin(_ context.Context, node string) error {
	d.did = append(d.did, strings.TrimSpace("pin "+node+" "+d.slot))
	return d.err
}

type caller = admin.Caller

var (
	operator = caller{Actor: admin.Actor{Name: "ada", Source: "page/token"}, Role: admin.RoleOperator, Payloads: true}
	viewer   = caller{Actor: admin.Actor{Name: "bob", Source: "page/token"}, Role: admin.RoleViewer}
)

// newSite returns the page of a desk.
func newSite(d *desk) http.Handler {
	return New(Options{Watcher: "orders", Node: "n1", Version: "v1", UseCases: func(a admin.Actor, w, slot string) UseCases {
		d.actor, d.watcher, d.slot = a, w, slot
		return d.useCases()
	}})
}

func sendRequest(t *testing.T, h http.Handler, who *caller, method, target string, form url.Values, header ...string) (*http.Response, string) {
	t.Helper()
	var body io.Reader
	if form != nil {
		body = strings.NewReader(form.Encode())
	}

	r := httptest.NewRequestWithContext(t.Context(), method, target, body)
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	if who != nil {
		r = r.WithContext(admin.WithCaller(r.Context(), *who))
	}

	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result(), w.Body.String()
}

// allAddresses returns addresses that show each template with all of its parts.
func allAddresses() []string {
	x := url.QueryEscape(hostile)
	return []string{
		"/", "/strip", "/waiting/handlers?group=" + x + "&key=" + x, "/waiting?topic=" + x + "&key=" + x + "&collection=" + x, "/dead?message=" + x + "&topic=" + x + "&key=" + x + "&stand=any",
		"/dead/letter?id=" + x + "&collection=" + x, "/dead/letter?payload=1&id=" + x, "/lookup?q=" + x, "/lookup?by=key&q=" + x, "/lookup?conversation=" + x, "/topics", "/topics/recent?topic=" + x, "/nodes", "/nodes/node?node=" + x, "/log/entry?id=" + x, "/log?kind=" + x + "&node=" + x + "&actor=" + x + "&of=" + x,
		"/scheduled?type=" + x + "&id=" + x, "/sagas?database=" + x + "&saga=" + x, "/sagas?payload=1&database=" + x + "&saga=" + x + "&id=" + x, "/groups", "/groups?group=" + x, "/inbox?database=" + x, "/control", "/nowhere/" + url.PathEscape(hostile), "/?watcher=" + x,
	}
}

// No text of an event, a node or an address becomes part of the document, in any field.
func TestHostileTextIsText(t *testing.T) {
	t.Parallel()
	for _, who := range []caller{operator, viewer} {
		who.Actor.Name = hostile
		h := newSite(&desk{text: hostile})
		for _, at := range allAddresses() {
			_, body := sendRequest(t, h, &who, "GET", at, nil)
			for _, raw := range []string{"<i>hostile", `hostile"`, `hostile\"'`} {
				if strings.Contains(body, raw) {
					i := strings.Index(body, raw)
					t.Errorf("%s as %s: raw text in the document: …%s…", at, who.Role, body[max(0, i-80):min(len(body), i+80)])
				}
			}
			if !strings.HasPrefix(at, "/nowhere/") && at != "/strip" && !strings.Contains(body, "hostile") {
				t.Errorf("%s: the text is not shown at all", at)
			}
		}
	}

	d := &desk{text: hostile, count: 2}
	form := url.Values{"pick": {hostile}, "message": {hostile}, hostile: {hostile}}
	_, body := sendRequest(t, newSite(d), &operator, "POST", "/confirm/dead-requeue", form)
	if strings.Contains(body, "<i>hostile") || strings.Contains(body, `hostile"`) || !strings.Contains(body, "hostile") {
		t.Errorf("the question holds raw text, or none: %s", body)
	}

	_, body = sendRequest(t, newSite(&desk{err: errors.New(hostile)}), &operator, "GET", "/dead", nil)
	if strings.Contains(body, "<i>hostile") || !strings.Contains(body, "hostile") {
		t.Errorf("an error holds raw text, or none: %s", body)
	}
}

var inline = regexp.MustCompile(`(?i)<style|\sstyle=|\son[a-z]+=|<script(?:[^>]*)>[^<]|javascript:`)

// The policy allows no script and no style in a document, and there is none.
func TestNothingIsInline(t *testing.T) {
	t.Parallel()
	h := newSite(&desk{text: "x"})
	for _, at := range allAddresses() {
		if at = strings.ReplaceAll(at, url.QueryEscape(hostile), "x"); strings.HasPrefix(at, "/nowhere") {
			at = "/nowhere"
		}

		r, body := sendRequest(t, h, &operator, "GET", at, nil)
		if m := inline.FindString(body); m != "" {
			t.Errorf("%s: %q", at, m)
		}

		csp := r.Header.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"} {
			if !strings.Contains(csp, want) {
				t.Errorf("%s: the policy %q lacks %q", at, csp, want)
			}
		}

		if strings.Contains(csp, "unsafe") || r.Header.Get("Cache-Control") != "no-store" || r.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: headers %v", at, r.Header)
		}
	}
}

// A viewer sees everything but payloads and has no form that acts; an action that is sent all the same is rejected.
func TestViewersLookAndDoNotAct(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 3}
	h := newSite(d)

	for _, at := range allAddresses() {
		_, body := sendRequest(t, h, &viewer, "GET", at, nil)
		for _, form := range []string{"formaction=", "Requeue …", "Retry now", "Pause …", "Purge …"} {
			if strings.Contains(body, form) {
				t.Errorf("%s: a viewer is offered %q", at, form)
			}
		}
		if d.payload {
			t.Fatalf("%s: a payload was read for somebody who may not see any", at)
		}
	}

	for name := range actions {
		for _, way := range []string{"/confirm/", "/act/"} {
			r, _ := sendRequest(t, h, &viewer, "POST", way+name, url.Values{"scope": {"all"}, "_count": {"3"}, "node": {"n"}})
			if r.StatusCode != http.StatusForbidden {
				t.Errorf("%s%s: %d for a viewer", way, name, r.StatusCode)
			}
		}
	}

	if len(d.did) > 0 {
		t.Errorf("a viewer did %v", d.did)
	}
	if r, _ := sendRequest(t, h, nil, "GET", "/", nil); r.StatusCode != http.StatusForbidden {
		t.Errorf("%d without a caller", r.StatusCode)
	}

	sendRequest(t, h, &operator, "GET", "/dead/letter?id=1", nil)
	if d.payload {
		t.Error("a payload was read without a request for it")
	}
	if sendRequest(t, h, &operator, "GET", "/dead/letter?id=1&payload=1", nil); !d.payload {
		t.Error("a requested payload was not read")
	}
}

// The page rejects requests that a page of another origin makes a browser send. A GET never acts.
func TestForeignPagesCannotAct(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 1, slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1"}}}
	h := newSite(d)

	form := url.Values{"_count": {"-1"}}
	for _, header := range [][]string{{"Sec-Fetch-Site", "cross-site"}, {"Sec-Fetch-Site", "same-site"}, {"Origin", "https://evil.example"}} {
		if r, _ := sendRequest(t, h, &operator, "POST", "http://relay.example/act/pause", form, header...); r.StatusCode != http.StatusForbidden {
			t.Errorf("%v: %d", header, r.StatusCode)
		}
	}

	for name := range actions {
		for _, way := range []string{"/confirm/", "/act/"} {
			if r, _ := sendRequest(t, h, &operator, "GET", way+name+"?_count=-1", nil); r.StatusCode < 400 {
				t.Errorf("GET %s%s: %d", way, name, r.StatusCode)
			}
		}
	}

	if r, _ := sendRequest(t, h, &operator, "POST", "/act/pause", form, "Content-Type", "text/plain"); r.StatusCode != http.StatusBadRequest {
		t.Errorf("a form of another type: %d", r.StatusCode)
	}
	if len(d.did) > 0 {
		t.Fatalf("it did %v", d.did)
	}

	r, _ := sendRequest(t, h, &operator, "POST", "http://relay.example/act/pause", form, "Sec-Fetch-Site", "same-origin")
	if r.StatusCode != http.StatusSeeOther || !slices.Equal(d.did, []string{"pause orders"}) {
		t.Errorf("the page's own form: %d, %v", r.StatusCode, d.did)
	}
}

// Each action first shows a page for the confirmation. It executes exactly the confirmed request.
func TestActionsAreConfirmed(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 12}
	h := newSite(d)

	form := url.Values{"scope": {"all"}, "topic": {"orders"}, "class": {"expired"}}
	r, body := sendRequest(t, h, &operator, "POST", "/confirm/dead-discard", form)
	if r.StatusCode != http.StatusOK || !strings.Contains(body, "12 dead letters are removed for good") || !strings.Contains(body, "discard 12") || !strings.Contains(body, "cannot be taken back") {
		t.Fatalf("%d %s", r.StatusCode, body)
	}

	rejected := func(why string, change func(url.Values)) {
		t.Helper()
		f := url.Values{"_count": {"12"}, "_phrase": {"discard 12"}}
		for k, v := range form {
			f[k] = v
		}
		change(f)
		r, body := sendRequest(t, h, &operator, "POST", "/act/dead-discard", f)
		if r.StatusCode != http.StatusConflict || !strings.Contains(body, "othing") {
			t.Errorf("%s: %d", why, r.StatusCode)
		}
		if len(d.did) > 0 {
			t.Fatalf("%s: done", why)
		}
	}

	rejected("not confirmed", func(f url.Values) { f.Del("_count") })
	rejected("phrase not typed", func(f url.Values) { f.Del("_phrase") })
	rejected("there were fewer", func(f url.Values) { f.Set("_count", "11"); f.Set("_phrase", "discard 11") })
	d.count = 0
	rejected("nothing left", func(f url.Values) { f.Set("_count", "0"); f.Set("_phrase", "discard 0") })
	d.count = 12

	form.Set("_count", "12")
	form.Set("_phrase", "discard 12")
	r, _ = sendRequest(t, h, &operator, "POST", "/act/dead-discard", form)
	if r.StatusCode != http.StatusSeeOther || !slices.Equal(d.did, []string{"discard"}) || d.actor.Name != "ada" {
		t.Fatalf("%d, did %v as %v", r.StatusCode, d.did, d.actor)
	}
	if f := d.filter; f.Topic != "orders" || f.Class != "expired" || !f.All || f.RequeueStatus != "false" {
		t.Errorf("by the filter %+v", f)
	}

	to := r.Header.Get("Location")
	if _, body = sendRequest(t, h, &operator, "GET", to, nil); !strings.Contains(body, "12 dead letters discarded") {
		t.Errorf("%s does not show the action", to)
	}
	if _, body = sendRequest(t, h, &viewer, "GET", to, nil); strings.Contains(body, "12 dead letters discarded") {
		t.Error("another person sees the notice of the action")
	}

	for _, bad := range []url.Values{{}, {"scope": {"selected"}}, {"scope": {"all"}, "from": {"yesterday"}}, {"scope": {"all"}, "since": {"-1h"}}} {
		if r, _ := sendRequest(t, h, &operator, "POST", "/confirm/dead-requeue", bad); r.StatusCode != http.StatusBadRequest {
			t.Errorf("%v: %d", bad, r.StatusCode)
		}
	}
}

// Two clicks on the button of a question send its form twice.
func TestAQuestionIsConfirmedOnce(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 12}
	h := newSite(d)
	form := url.Values{"scope": {"all"}, "topic": {"orders"}}
	_, body := sendRequest(t, h, &operator, "POST", "/confirm/dead-discard", form)
	once := regexp.MustCompile(`name="_once" value="(\w+)"`).FindStringSubmatch(body)
	if once == nil {
		t.Fatalf("the question has no id: %s", body)
	}

	form["_count"], form["_phrase"], form["_once"] = []string{"12"}, []string{"discard 12"}, once[1:]
	for range 2 {
		r, _ := sendRequest(t, h, &operator, "POST", "/act/dead-discard", form)
		if _, body := sendRequest(t, h, &operator, "GET", r.Header.Get("Location"), nil); !strings.Contains(body, "12 dead letters discarded") {
			t.Errorf("%d: %s", r.StatusCode, body)
		}
	}
	if !slices.Equal(d.did, []string{"discard"}) {
		t.Errorf("did %v", d.did)
	}
}

// The action of the first click has discarded some of the letters when the second click comes.
func TestASecondClickShowsTheRunningAction(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 12, hold: make(chan struct{})}
	defer close(d.hold)
	h := New(Options{Watcher: "orders", Patience: time.Millisecond, UseCases: func(admin.Actor, string, string) UseCases { return d.useCases() }})
	form := url.Values{"scope": {"all"}, "topic": {"orders"}, "_count": {"12"}, "_phrase": {"discard 12"}, "_once": {"q1"}}
	for range 2 {
		r, body := sendRequest(t, h, &operator, "POST", "/act/dead-discard", form)
		if at := r.Header.Get("Location"); r.StatusCode != http.StatusSeeOther || !strings.HasPrefix(at, "/task?id=") {
			t.Errorf("%d to %q: %s", r.StatusCode, at, body)
		}
		d.count = 5
	}
}

// With an archive, a discard can be taken back, and letters in the archive are requeued from there.
func TestADiscardMovesIntoTheArchive(t *testing.T) {
	t.Parallel()
	until := time.Date(2031, 5, 1, 12, 0, 0, 0, time.UTC)
	d := &desk{text: "x", count: 2, archived: &until}
	h := newSite(d)
	_, body := sendRequest(t, h, &operator, "POST", "/confirm/dead-discard", url.Values{"pick": {"a", "b"}})
	for _, want := range []string{"2 dead letters are moved into the archive", "until 2031-05-01 12:00:00 UTC", "Until then they can be requeued"} {
		if !strings.Contains(body, want) {
			t.Errorf("the question lacks %q: %s", want, body)
		}
	}

	_, body = sendRequest(t, h, &operator, "GET", "/dead?requeued=archived", nil)
	if !d.filter.Archived || d.filter.RequeueStatus != "any" || !strings.Contains(body, "Remove for good …") || !strings.Contains(body, `value="archived" selected`) {
		t.Errorf("the archive: filter %+v", d.filter)
	}
	if sendRequest(t, h, &operator, "POST", "/confirm/dead-requeue", url.Values{"pick": {"a"}, "requeued": {"archived"}}); !d.filter.Archived {
		t.Errorf("a requeue from the archive: filter %+v", d.filter)
	}
}

// An action that takes longer than a moment shows its progress, to the person who acted alone, and then its result.
func TestALongActionShowsItsProgress(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 12, hold: make(chan struct{})}
	h := New(Options{Watcher: "orders", Patience: time.Millisecond, UseCases: func(admin.Actor, string, string) UseCases { return d.useCases() }})
	form := url.Values{"scope": {"all"}, "topic": {"orders"}, "_count": {"12"}, "_phrase": {"discard 12"}}
	r, _ := sendRequest(t, h, &operator, "POST", "/act/dead-discard", form)
	at := r.Header.Get("Location")
	if r.StatusCode != http.StatusSeeOther || !strings.HasPrefix(at, "/task?id=") {
		t.Fatalf("%d to %q", r.StatusCode, at)
	}

	var body string
	stacktest.Eventually(t, "the progress", func() bool {
		_, body = sendRequest(t, h, &operator, "GET", at, nil)
		return strings.Contains(body, `<progress max="12" value="7"`) && strings.Contains(body, "7 of 12")
	})
	if !strings.Contains(body, "Discard dead letters: running") {
		t.Errorf("the page of the progress: %s", body)
	}
	for _, c := range []struct {
		who *caller
		at  string
	}{{&viewer, at}, {&operator, "/task?id=other"}, {&operator, "/task"}} {
		if r, _ := sendRequest(t, h, c.who, "GET", c.at, nil); r.StatusCode != http.StatusBadRequest {
			t.Errorf("%s sees %s: %d", c.who.Actor.Name, c.at, r.StatusCode)
		}
	}

	close(d.hold)
	stacktest.Eventually(t, "the result", func() bool {
		_, body = sendRequest(t, h, &operator, "GET", at, nil, "HX-Request", "true")
		return strings.Contains(body, "12 dead letters discarded")
	})
	if strings.Contains(body, "<progress") || !strings.Contains(body, "Back") {
		t.Errorf("after the end: %s", body)
	}
}

// The confirmation turns "since" into a time, so the executed request does not move with the clock.
func TestAWindowIsPinnedWhenItIsConfirmed(t *testing.T) {
	t.Parallel()
	_, body := sendRequest(t, newSite(&desk{text: "x", count: 1}), &operator, "POST", "/confirm/dead-requeue", url.Values{"scope": {"all"}, "since": {"2h"}})
	if strings.Contains(body, `name="since"`) || !regexp.MustCompile(`name="from" value="20[0-9-]+T[0-9:]+Z"`).MatchString(body) {
		t.Error(body)
	}
}

func TestEditContainsOnlyChangedFields(t *testing.T) {
	t.Parallel()

	d := &desk{text: "x"}
	form := url.Values{
		"id": {"e1"}, "collection": {"shop.outbox"}, "delivery": {"1"}, "version": {"7"}, "_count": {"-1"},
		"was.type": {"A"}, "set.type": {"A"}, "was.topic": {"old"}, "set.topic": {"new"}, "was.key": {"k"}, "set.key": {""},
		"payload": {"ignored"}, "headers": {"ignored"},
	}

	if r, body := sendRequest(t, newSite(d), &operator, "POST", "/act/dead-edit", form); r.StatusCode != http.StatusSeeOther {
		t.Fatalf("%d %s", r.StatusCode, body)
	}
	e := d.edit
	if e.Version != 7 || len(e.Fields) != 1 || e.Fields["topic"] != "new" || !slices.Equal(e.Unset, []string{"key"}) || e.Payload != nil || e.Headers != nil {
		t.Errorf("%+v", e)
	}

	form.Set("replace-payload", "1")
	form.Set("payload", "{\r\n}")
	form.Set("replace-headers", "1")
	form.Set("headers", "a: 1\r\nb:2")
	sendRequest(t, newSite(d), &operator, "POST", "/act/dead-edit", form)
	if e = d.edit; string(e.Payload) != "{\n}" || !slices.Equal(e.Headers, [][2]string{{"a", "1"}, {"b", "2"}}) {
		t.Errorf("%+v", e)
	}

	form.Del("version")
	if r, _ := sendRequest(t, newSite(d), &operator, "POST", "/act/dead-edit", form); r.StatusCode != http.StatusBadRequest {
		t.Errorf("an edit of no version: %d", r.StatusCode)
	}
}

// Errors have their own state, on the page and for the block that is fetched again.
func TestErrorStates(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err    error
		status int
	}{
		{context.DeadlineExceeded, http.StatusServiceUnavailable},
		{admin.ErrUnavailable, http.StatusServiceUnavailable},
		{listing.ErrCursor, http.StatusBadRequest},
		{admin.ErrInUse, http.StatusConflict},
	} {
		h := newSite(&desk{err: c.err})
		for _, at := range []string{"/", "/waiting", "/dead", "/nodes", "/log", "/scheduled", "/sagas", "/inbox", "/control", "/lookup?q=1", "/nodes/node?node=n", "/log/entry?id=1"} {
			r, body := sendRequest(t, h, &operator, "GET", at, nil)
			if r.StatusCode != c.status || !strings.Contains(body, `role="alert"`) || !strings.Contains(body, c.err.Error()) || !strings.Contains(body, "Try again") {
				t.Errorf("%s with %v: %d", at, c.err, r.StatusCode)
			}
		}

		r, body := sendRequest(t, h, &operator, "GET", "/", nil, "HX-Request", "true")
		if r.StatusCode != c.status || strings.Contains(body, "<") || !strings.HasPrefix(r.Header.Get("Content-Type"), "text/plain") {
			t.Errorf("fetched again with %v: %d %s", c.err, r.StatusCode, body)
		}
	}
}

// An empty list shows a text about that.
func TestEmptyStates(t *testing.T) {
	t.Parallel()
	empty := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		return UseCases{
			Operator: nothing{}, Nodes: noNodes{}, Letters: noLetters{}, Waiting: noneWaits{}, Handlers: noMessages{}, Groups: noGroups{}, Schedule: emptySchedule{}, Inboxes: noInboxes{}, Sagas: noSagas{},
			Activity: noActivity{}, Replays: noReplays{},
		}
	}})

	for at, want := range map[string]string{
		"/": "has never run", "/waiting": "Nothing waits", "/waiting/handlers": "No handler retries a message", "/dead": "Events that cannot be sent or handled appear here", "/dead?type=x": "No dead letter matches", "/lookup": "An id finds one event",
		"/lookup?q=x": "Nothing was found", "/nodes": "No node has sent a heartbeat", "/log": "The audit log has no entry. The start of a node adds one", "/log?kind=paused": "No entry matches", "/scheduled": "No event is scheduled", "/groups": "No consumer group reads a topic", "/sagas": "contains sagas", "/sagas?database=d&saga=s": "A message that begins one adds it", "/inbox": "contains an inbox", "/control": "has never run",
		"/nodes/node?node=x": "No node x has sent a heartbeat", "/log/entry?id=x": "The audit log has no entry x", "/inbox?database=d": "stores one with the first message",
		"/topics": "The first event of a topic adds it", "/topics/recent": "An event appears here as soon as Kafka has acknowledged it", "/topics/recent?topic=x": "for this topic",
		"/waiting?watcher=other": "Nothing waits", "/waiting?topic=x": "No waiting event matches",
	} {
		if r, body := sendRequest(t, empty, &operator, "GET", at, nil); r.StatusCode != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d without %q", at, r.StatusCode, want)
		}
	}
}

// The page with the replays shows how one comes about, also in the block that the script requests again.
func TestNoReplayWasStarted(t *testing.T) {
	t.Parallel()
	desk := &desk{text: "x"}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		use := desk.useCases()
		use.Replays = noReplays{}
		return use
	}})

	for _, header := range [][]string{nil, {"HX-Request", "true"}} {
		if _, body := sendRequest(t, site, &operator, "GET", "/control", nil, header...); !strings.Contains(body, "A replay sends delivered events again") {
			t.Errorf("with headers %v: %s", header, body)
		}
	}
}

// nothing has no data at all.
type (
	nothing       struct{ operatorUseCases }
	noNodes       struct{ nodeUseCases }
	noLetters     struct{ letterUseCases }
	noneWaits     struct{ waitingUseCases }
	noMessages    struct{ handlerUseCases }
	noGroups      struct{ groupUseCases }
	emptySchedule struct{ scheduleUseCases }
	noInboxes     struct{ inboxUseCases }
	noSagas       struct{ sagaUseCases }
	noActivity    struct{ activityUseCases }
	noReplays     struct{ replayUseCases }
)

func (noActivity) Topics(context.Context) (list admin.TopicList, err error) { return }

func (noActivity) Recent(context.Context, string) (events admin.RecentEvents, err error) { return }

func (noReplays) List(context.Context, int) (list []admin.ReplayInfo, err error) { return }

func (noInboxes) Marks(context.Context, string, string) (marks []admin.InboxMark, err error) { return }

func (noSagas) List(context.Context, string, string, int, string) (page admin.Page[admin.Saga], err error) {
	return
}

func (nothing) Overview(context.Context) (o admin.Overview, err error) { return }

func (noNodes) List(context.Context) (n []admin.Node, err error) { return }

func (noneWaits) Topics(context.Context) (p []admin.WaitingTopic, err error) { return }

func (nothing) Lookup(context.Context, admin.LookupQuery) (f admin.LookupResult, err error) { return }

func (noSagas) Types(context.Context) (s []admin.SagaType, err error) { return }

func (noInboxes) List(context.Context) (s []admin.InboxCounts, err error) { return }

func (noneWaits) List(context.Context, admin.WaitingFilter, int, string) (p admin.Page[admin.WaitingEnvelope], err error) {
	return
}

func (noMessages) List(context.Context, admin.HandlerWaitingFilter, int, string) (p admin.Page[admin.HandlerMessage], err error) {
	return
}

func (noGroups) List(context.Context, bool) (g admin.GroupList, err error) { return }

func (noLetters) List(context.Context, admin.DeadFilter, int, string) (p admin.Page[admin.DeadLetter], err error) {
	return
}

func (nothing) Audit(context.Context, admin.AuditFilter, int, string) (p admin.Page[admin.AuditEntry], err error) {
	return
}

func (emptySchedule) List(context.Context, admin.ScheduledFilter, int, string) (p admin.Page[admin.Scheduled], err error) {
	return
}

// The fragment that the page fetches again has no document around it. Each content of a file has its own
// name.
func TestFragmentsAndFiles(t *testing.T) {
	t.Parallel()

	h := newSite(&desk{text: "x"})
	for _, at := range []string{"/", "/waiting", "/waiting/handlers", "/nodes", "/control", "/strip"} {
		if _, body := sendRequest(t, h, &operator, "GET", at, nil, "HX-Request", "true"); strings.Contains(body, "<html") || len(body) < 50 {
			t.Errorf("%s: %.200s", at, body)
		}
	}

	_, body := sendRequest(t, h, &operator, "GET", "/", nil)
	links := regexp.MustCompile(`(?:src|href)="(/static/[^"]+)"`).FindAllStringSubmatch(body, -1)
	if len(links) < 6 {
		t.Fatalf("%d files", len(links))
	}
	for _, l := range links {
		r, text := sendRequest(t, h, &operator, "GET", l[1], nil)
		if r.StatusCode != http.StatusOK || text == "" || !strings.Contains(r.Header.Get("Cache-Control"), "immutable") {
			t.Errorf("%s: %d %s", l[1], r.StatusCode, r.Header)
		}
	}

	for _, licence := range []string{"htmx", "uplot"} {
		if r, text := sendRequest(t, h, &operator, "GET", "/static/vendor/"+licence+"/LICENSE", nil); r.StatusCode != http.StatusOK || len(text) < 200 {
			t.Errorf("the licence of %s is not there", licence)
		}
	}
	if r, _ := sendRequest(t, h, &operator, "GET", "/static/../page.go", nil); r.StatusCode == http.StatusOK {
		t.Error("a file outside of the static ones")
	}
}

// An action on nothing, and a value that cannot be used, is a sentence on the page with the form, with the filter of the list and the
// entered values.
func TestBadInputIsReportedWhereItWasEntered(t *testing.T) {
	t.Parallel()
	site := newSite(&desk{text: "x", count: 1})
	for _, c := range []struct {
		action string
		form   url.Values
		want   []string
	}{
		{"dead-requeue", url.Values{"_list": {"class=expired"}}, []string{"no dead letter is selected", `value="expired" selected`, "Select all"}},
		{"retry", url.Values{"_list": {"topic=orders"}}, []string{"no event is selected", `value="orders"`}},
		{"reschedule", url.Values{"pick": {"1"}}, []string{"the new due time is missing", "Scheduled events by"}},
		{"step-down", url.Values{"hold": {"soon"}}, []string{"is not a duration", `name="hold" value="soon"`}},
		{"replay", url.Values{"rate": {"fast"}, "id": {"one"}}, []string{"is not a number of events per second", "<textarea name=\"id\" rows=\"2\">one</textarea>"}},
		{
			"dead-edit",
			url.Values{"_list": {"id=1"}, "id": {"1"}, "version": {"1"}, "was.topic": {"a"}, "set.topic": {"a"}},
			[]string{"no field is changed", `<details id="edit" class="edit" open>`},
		},
		{
			"dead-edit",
			url.Values{"_list": {"id=1"}, "id": {"1"}, "version": {"1"}, "replace-headers": {"1"}, "headers": {"no colon"}, "set.topic": {"typed"}},
			[]string{"is not name: value", ">no colon</textarea>", `name="set.topic" value="typed"`},
		},
	} {
		response, body := sendRequest(t, site, &operator, "POST", "/confirm/"+c.action, c.form)
		if response.StatusCode != http.StatusBadRequest || strings.Contains(body, "The request is not valid") || strings.Count(body, `role="alert"`) != 2 {
			t.Errorf("%s %v: status %d with %d alerts", c.action, c.form, response.StatusCode, strings.Count(body, `role="alert"`))
		}
		for _, want := range c.want {
			if !strings.Contains(body, want) {
				t.Errorf("%s %v: the page lacks %q", c.action, c.form, want)
			}
		}
	}

	// The page of a letter has the reason at its top, because its form is not the form that edits the letter.
	desk := &desk{text: "x", count: 1, rejection: invalidInput("topic a/b is not valid")}
	site = newSite(desk)
	letter := url.Values{"_screen": {"/dead/letter"}, "_list": {"collection=shop.outbox&id=letter-1"}, "pick": {"letter-1"}, "to-topic": {"a/b"}}
	for _, action := range []string{"dead-requeue", "dead-discard"} {
		response, body := sendRequest(t, site, &operator, "POST", "/confirm/"+action, letter)
		if response.StatusCode != http.StatusBadRequest || strings.Count(body, "topic a/b is not valid") != 1 || strings.Contains(body, `<details id="edit" class="edit" open>`) ||
			!strings.Contains(body, `name="to-topic" value="a/b"`) || !strings.Contains(body, "<h1>Dead letter</h1>") {
			t.Errorf("%s on the page of a letter: %d %s", action, response.StatusCode, body)
		}
	}
	desk.rejection = nil
	if _, body := sendRequest(t, site, &operator, "POST", "/confirm/dead-discard", letter); !strings.Contains(body, `data-escape href="/dead/letter?collection=shop.outbox&amp;id=letter-1"`) {
		t.Errorf("the question does not lead back to the letter: %s", body)
	}
	letter.Set("_count", "1")
	if response, _ := sendRequest(t, site, &operator, "POST", "/act/dead-discard", letter); !strings.HasPrefix(response.Header.Get("Location"), "/dead?done=") {
		t.Errorf("the result is at %q", response.Header.Get("Location"))
	}
	letter.Set("_screen", "https://evil.example/")
	if _, body := sendRequest(t, site, &operator, "POST", "/confirm/dead-discard", letter); strings.Contains(body, `href="https://evil`) {
		t.Error("a form leads to another site")
	}

	response, body := sendRequest(t, site, &operator, "GET", "/dead?since=soon", nil)
	if response.StatusCode != http.StatusBadRequest || !strings.Contains(body, "The filter cannot be used") || !strings.Contains(body, `name="topic"`) {
		t.Errorf("a filter that cannot be used: %d %s", response.StatusCode, body)
	}
}

// A fresh installation has empty lists, and no error.
func TestFirstRunHasNoErrors(t *testing.T) {
	t.Parallel()
	site := newSite(&desk{err: fmt.Errorf("watcher orders: %w", admin.ErrNoCollections)})
	for at, want := range map[string]string{
		"/dead": "Events that cannot be sent or handled appear here", "/waiting": "Nothing waits", "/scheduled": "No event is scheduled", "/lookup?q=1": "Nothing was found",
	} {
		if response, body := sendRequest(t, site, &operator, "GET", at, nil); response.StatusCode != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: status %d without %q", at, response.StatusCode, want)
		}
	}
	if response, _ := sendRequest(t, site, &operator, "GET", "/dead?collection=shop.nothing", nil); response.StatusCode == http.StatusOK {
		t.Error("a collection that does not exist has an empty list")
	}
}

// A table has no column without a value, and no word of a cell is cut in the document.
func TestTablesHaveNoEmptyColumns(t *testing.T) {
	t.Parallel()
	long := "outbox.event.invoice-of-a-long-name-missing"
	if parts := splitMiddle(long); parts.Head+parts.Tail != long || parts.Tail != "-missing" {
		t.Errorf("parts of a long name: %+v", parts)
	}
	if parts := splitMiddle("short"); parts != (halves{Head: "short"}) {
		t.Errorf("parts of a short name: %+v", parts)
	}

	list := []admin.WaitingEnvelope{{ID: "1"}, {ID: "2", Attempts: 3, Topics: []string{}}}
	filled, err := findFilled(list, "ID", "Attempts", "NextAt", "Topics")
	if err != nil || !filled["ID"] || !filled["Attempts"] || filled["NextAt"] || filled["Topics"] {
		t.Errorf("columns with a value: %v, %v", filled, err)
	}
	if _, err := findFilled(list, "Nothing"); err == nil {
		t.Error("a column that does not exist is no error")
	}

	minutes := []admin.TopicFigures{{Recent: []int32{0, 0}}}
	if filled, err := findFilled(minutes, "Recent"); err != nil || filled["Recent"] {
		t.Errorf("a chart without a bar is a column: %v", err)
	}

	chart := newSpark([]int32{0, 1, 100, 50})
	if want := []sparkBar{{5, 19, 1}, {10, 0, 20}, {15, 10, 10}}; chart == nil || chart.Width != 20 || !slices.Equal(chart.Bars, want) || chart.Text != "151 records in the last 12 minutes" {
		t.Errorf("bars: %+v, want %v", chart, want)
	}
	if newSpark([]int32{0, 0}) != nil || newSpark(nil) != nil {
		t.Error("no record has a chart")
	}

	chart = newLatencySpark([]float64{0, 1, 5}, []float64{0, 2, 20})
	under, bars := []sparkBar{{5, 18, 2}, {10, 0, 20}}, []sparkBar{{5, 19, 1}, {10, 15, 5}}
	if chart == nil || !slices.Equal(chart.Under, under) || !slices.Equal(chart.Bars, bars) || chart.Text != "p50 at most 5 ms and p99 at most 20 ms in a minute of the last 9" {
		t.Errorf("latencies: %+v, want %v and %v", chart, under, bars)
	}
	if newLatencySpark(nil, nil) != nil || newLatencySpark([]float64{0}, []float64{0}) != nil {
		t.Error("no latency has a chart")
	}
}

// A column with the cause of a failure or of a wait has one heading. The cells repeat it for narrow screens.
func TestTheCauseHasOneHeading(t *testing.T) {
	t.Parallel()
	others := regexp.MustCompile(`(?:<th scope="col"[^>]*>|data-label=")(Cause|Error|Failure reason|Last error|Last failure|Why)["<]`)
	cell := regexp.MustCompile(`data-label="([^"]*)">(?:{{with .Target}})?{{template "end" (?:\(or )?\.(?:Reason|Why)\b`)
	found := 0

	for _, name := range []string{"dead", "groups", "handlers", "letter", "parts", "waiting", "topics"} {
		text, err := files.ReadFile("templates/" + name + ".html")
		if err != nil {
			t.Fatal(err)
		}
		if heading := others.FindSubmatch(text); heading != nil {
			t.Errorf("%s: the cause has the heading %s", name, heading[1])
		}
		for _, match := range cell.FindAllSubmatch(text, -1) {
			found++
			if string(match[1]) != "Reason" {
				t.Errorf("%s: the label of the cause is %s", name, match[1])
			}
		}
	}
	if found != 6 {
		t.Errorf("the lists have %d columns with a cause, want 6", found)
	}
}

// oneLetter has one dead letter.
type oneLetter struct {
	letterUseCases
	letter admin.DeadLetter
}

func (o oneLetter) Show(context.Context, admin.DeadRef, admin.Detail) (admin.DeadLetter, error) {
	return o.letter, nil
}

// The page of a letter names the aggregate: that of a message of a handler, and that of an envelope.
func TestALetterShowsItsAggregate(t *testing.T) {
	t.Parallel()
	for source, letter := range map[string]admin.DeadLetter{
		admin.FromHandler: {AggregateID: "o-17"},
		admin.FromRelay:   {Envelope: json.RawMessage(`{"aggregateid":"o-17"}`)},
	} {
		site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases { return UseCases{Letters: oneLetter{letter: letter}} }})
		_, body := sendRequest(t, site, &viewer, "GET", "/dead/letter?id=1&source="+source, nil)
		if !strings.Contains(body, `<dt>Aggregate id</dt><dd><span class="id" data-copy="the aggregate id">o-17</span></dd>`) {
			t.Errorf("source %s: the page of a letter lacks the aggregate id", source)
		}
	}
}

// Each class of a dead letter has a next step.
func TestEachClassHasARemedy(t *testing.T) {
	t.Parallel()
	for _, class := range slices.Concat(admin.Classes(), admin.HandlerClasses()) {
		if (letter{DeadLetter: admin.DeadLetter{Class: class}}).Remedy() == "" {
			t.Errorf("class %s has no remedy", class)
		}
	}
}

// The charts get the minutes, and the takeovers, pauses and gaps with links to their entries.
func TestHistoryHasMarks(t *testing.T) {
	t.Parallel()
	_, body := sendRequest(t, newSite(&desk{text: "took_over"}), &viewer, "GET", "/history", nil)
	var got history
	if err := json.Unmarshal([]byte(body), &got); err != nil || len(got.Points) != 2 || got.Points[0][3] != 2 || len(got.Marks) != 2 {
		t.Fatalf("%v: %s", err, body)
	}
	if m := got.Marks[0]; m.Text != "takeover on took_over" || m.Link != "/log/entry?id=took_over" || m.At == 0 {
		t.Errorf("mark: %+v", m)
	}
}

// An action on messages of handlers names the selected messages, or all that match, and the filter of the list.
func TestActionsOnMessagesOfHandlers(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 2}
	site := newSite(d)
	form := url.Values{"group": {"billing"}, "handler": {"charge"}, "pick": {"orders/0@7", "orders/0@9"}}
	if _, body := sendRequest(t, site, &operator, "POST", "/confirm/handler-retry", form); !strings.Contains(body, "2 messages are tried again at once") || len(d.did) > 0 {
		t.Errorf("the question, did %v: %s", d.did, body)
	}
	form.Set("_count", "2")
	response, _ := sendRequest(t, site, &operator, "POST", "/act/handler-retry", form)
	if f := d.messages; f.Group != "billing" || f.Handler != "charge" || !slices.Equal(f.IDs, form["pick"]) || f.All || !slices.Equal(d.did, []string{"handler-retry"}) {
		t.Errorf("by %+v, did %v", f, d.did)
	}
	if at := response.Header.Get("Location"); !strings.HasPrefix(at, "/waiting/handlers?done=") {
		t.Errorf("back at %s", at)
	}

	if _, body := sendRequest(t, site, &operator, "POST", "/confirm/handler-discard", url.Values{"scope": {"all"}}); !strings.Contains(body, "2 messages are discarded without another attempt") || !d.messages.All {
		t.Errorf("all messages, by %+v: %s", d.messages, body)
	}
	if response, body := sendRequest(t, site, &operator, "POST", "/confirm/handler-retry", url.Values{}); response.StatusCode != http.StatusBadRequest || !strings.Contains(body, "no message is selected") {
		t.Errorf("no message: %d", response.StatusCode)
	}
}

func TestDownload(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x"}
	r, body := sendRequest(t, newSite(d), &viewer, "GET", "/dead/download?payload=1&topic=x", nil)
	if r.StatusCode != http.StatusOK || strings.Count(body, "\n") != 2 || d.payload || d.filter.Topic != "x" {
		t.Errorf("%d, filter %+v: %s", r.StatusCode, d.filter, body)
	}
}

// A browser removes the line breaks of a text field, and people do not see blanks at its ends. An unchanged field stays as it is.
func TestAnEditKeepsFieldsThatAreNotChanged(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x"}
	form := url.Values{
		"id": {"e1"}, "version": {"0"}, "_count": {"-1"}, "was.key": {" 42"}, "set.key": {" 42"},
		"was.subject": {"a\r\nb "}, "set.subject": {"ab "}, "was.type": {"Paid"}, "set.type": {" Refunded "},
		"replace-payload": {"1"}, "payload": {"{}"},
	}
	if r, body := sendRequest(t, newSite(d), &operator, "POST", "/act/dead-edit", form); r.StatusCode != http.StatusSeeOther {
		t.Fatalf("%d %s", r.StatusCode, body)
	}

	if len(d.edit.Fields) != 1 || d.edit.Fields["type"] != "Refunded" || len(d.edit.Unset) > 0 || string(d.edit.Payload) != "{}" {
		t.Errorf("%+v, want the type and the payload", d.edit)
	}
}

// brokenLetters fails after 3,000 letters.
type brokenLetters struct{ deskLetters }

func (b brokenLetters) Discard(ctx context.Context, f admin.DeadFilter, effect admin.Effect, did func(int64)) (admin.DeadDiscarded, error) {
	if effect == admin.DryRun {
		return b.deskLetters.Discard(ctx, f, effect, did)
	}
	did(3000)
	return admin.DeadDiscarded{Matched: 5000, Discarded: 3000}, errors.New("the primary is gone")
}

// The part of an action that was done before it failed stays done, so its page states how much that is.
func TestAnActionThatFailsHalfwayStatesWhatItDid(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x", count: 5000}
	use := d.useCases()
	use.Letters = brokenLetters{deskLetters{d}}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases { return use }})
	form := url.Values{"scope": {"all"}, "topic": {"orders"}, "_count": {"5000"}, "_phrase": {"discard 5000"}}
	_, body := sendRequest(t, site, &operator, "POST", "/act/dead-discard", form)
	for _, want := range []string{"the primary is gone", "3,000 done until then"} {
		if !strings.Contains(body, want) {
			t.Errorf("the page lacks %q: %s", want, body)
		}
	}
}

// manyLetters has more letters than a page.
type manyLetters struct {
	letterUseCases
	pages int
}

func (m manyLetters) List(_ context.Context, _ admin.DeadFilter, limit int, after string) (admin.Page[admin.DeadLetter], error) {
	number, _ := strconv.Atoi(after)
	page := admin.Page[admin.DeadLetter]{Items: make([]admin.DeadLetter, limit), Total: int64(m.pages * limit)}
	if number+1 < m.pages {
		page.Next = strconv.Itoa(number + 1)
	}
	return page, nil
}

// A file that looks complete has all letters: people discard them after the download.
func TestADownloadHasAllLetters(t *testing.T) {
	t.Parallel()
	const pages = 11
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases { return UseCases{Letters: manyLetters{pages: pages}} }})
	r, body := sendRequest(t, site, &viewer, "GET", "/dead/download", nil)
	if lines := strings.Count(body, "\n"); r.StatusCode != http.StatusOK || lines != pages*admin.MaxPage {
		t.Errorf("%d with %d letters, want %d", r.StatusCode, lines, pages*admin.MaxPage)
	}
}

func TestFiguresForPeople(t *testing.T) {
	t.Parallel()
	for got, want := range map[string]string{
		formatNumber(1234567): "1,234,567", formatNumber(int64(-1234)): "−1,234", formatNumber(0): "0", formatRate(0.04): "0/s", formatRate(3.26): "3.3/s", formatRate(1234.5): "1,235/s",
		formatSpan(0.034): "0.03 s", formatSpan(61): "61 s", formatSpan(600): "10 min", formatSpan(9000): "2 h 30 min", formatSpan(-5): "−5 s", formatSpan(400000): "4 d",
		formatLogValue("up_ms", []byte("8102")): "8.1 s", formatLogValue("tasks", []byte(`["relay", "cleaner"]`)): "relay, cleaner", formatLogValue("position", []byte(`{"$timestamp":{"t":1795000000,"i":1}}`)): "2026-11-18 11:06:40Z",
		formatBytes(512): "512 B", formatBytes(2048): "2.0 KiB", formatBytes(3 << 20): "3.0 MiB", formatValue([]byte(`{"$date":"2026-11-20T08:00:00Z"}`)): "2026-11-20T08:00:00Z", formatValue([]byte(`"a"`)): "a", formatValue([]byte("null")): "",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
