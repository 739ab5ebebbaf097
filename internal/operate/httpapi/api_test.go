package httpapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// findLogged returns the entries of one kind in the log.
func (s *site) findLogged(kind nodes.Kind) []nodes.AuditEntry {
	s.t.Helper()
	list, err := nodes.NewAuditLog(s.state.Collection("audit"), "", "").Latest(s.t.Context(), 1000)
	if err != nil {
		s.t.Fatal(err)
	}
	return slices.DeleteFunc(list, func(e nodes.AuditEntry) bool { return e.Kind != kind })
}

func TestActionsAreWrittenDownWithTheirActor(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	ann := []string{"Authorization", basicLogin("ann", operatorToken)}
	s.mustCall(nil, "POST", "/api/v1/watchers/orders/pause", "", ann...)

	list := s.findLogged(nodes.Paused)
	if len(list) != 1 || list[0].Fields.Lookup("actor").StringValue() != "ann" || list[0].Fields.Lookup("source").StringValue() != "api/token" {
		t.Fatalf("%+v", list)
	}

	d, _, err := lease.Read(t.Context(), s.state.Collection("watchers"), "orders/"+"0of1")
	if err != nil || !d.Control.Paused {
		t.Errorf("%+v, %v", d.Control, err)
	}

	var page admin.Page[admin.AuditEntry]
	s.mustCall(&page, "GET", "/api/v1/audit?actor=ann&kind=paused,resumed", "")
	if len(page.Items) != 1 || page.Total != 1 || page.Items[0].Actor != "ann" || page.Items[0].Source != "api/token" {
		t.Errorf("%+v", page)
	}

	s.mustCall(nil, "POST", "/api/v1/watchers/orders/resume", "", ann...)
	s.mustCall(nil, "POST", "/api/v1/watchers/orders/step-down", `{"hold_s": 0.5, "force": true}`, ann...)
	if list := s.findLogged(nodes.SteppedDown); len(list) != 1 || list[0].Fields.Lookup("hold_ms").AsInt64() != 500 {
		t.Errorf("%+v", list)
	}

	s.mustCall(nil, "POST", "/api/v1/watchers/orders/pin", `{"node":"n9","force":true}`, ann...)
	if p := s.call("POST", "/api/v1/watchers/nobody/pause", "", ann...).requireProblem(t, 404); p.Fix == "" {
		t.Errorf("%+v", p)
	}
}

// The actions on the lease apply to all slots of a watcher, or to the slot in the request. The log names them.
func TestN28_LeaseActionsTakeASlot(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	docs := s.state.Collection("watchers")
	for _, slot := range []string{"0of2", "1of2"} {
		if _, err := docs.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "split/" + slot}, {Key: "owner", Value: nil}, {Key: "node", Value: "n1"}, {Key: "expiresAt", Value: time.UnixMilli(0)}}); err != nil {
			t.Fatal(err)
		}
	}

	const at = "/api/v1/watchers/split/"
	control := func(slot string) lease.Control {
		t.Helper()
		d, _, err := lease.Read(t.Context(), docs, "split/"+slot)
		if err != nil {
			t.Fatal(err)
		}
		return d.Control
	}

	s.mustCall(nil, "POST", at+"pause?slot=1of2", "")
	s.mustCall(nil, "POST", at+"pin?slot=1of2", `{"node":"n9","force":true}`)
	if p := s.call("POST", at+"step-down?slot=1of2", `{"hold_s":60}`).requireProblem(t, 409); !strings.Contains(p.Fix, "force") || !strings.Contains(p.Detail, "nothing of it is sent for 1m0s") {
		t.Errorf("a step-down without a standby: %+v", p)
	}
	s.mustCall(nil, "POST", at+"step-down?slot=1of2", `{"hold_s":60,"force":true}`)
	if c := control("0of2"); c.Paused || c.Pin != "" || !c.StepDownUntil.IsZero() {
		t.Errorf("the other slot has %+v", c)
	}
	if c := control("1of2"); !c.Paused || c.Pin != "n9" || c.StepDownNode != "n1" {
		t.Errorf("the slot has %+v", c)
	}
	for _, kind := range []nodes.Kind{nodes.Paused, "pinned", nodes.SteppedDown} {
		if list := s.findLogged(kind); len(list) != 1 || list[0].Fields.Lookup("slot").StringValue() != "1of2" || list[0].Watcher != "split" {
			t.Errorf("%s: the log contains %+v", kind, list)
		}
	}

	s.mustCall(nil, "POST", at+"pause", "")
	s.mustCall(nil, "POST", at+"resume?slot=1of2", "")
	if !control("0of2").Paused || control("1of2").Paused {
		t.Error("pause is not for all slots, or resume not for one")
	}
	s.mustCall(nil, "POST", "/api/v1/recover?watcher=split&slot=0of2", `{}`)
	n, err := docs.CountDocuments(t.Context(), bson.D{{Key: "gap.reason", Value: lease.GapRequested}})
	if err != nil || n != 1 {
		t.Errorf("%d sweeps are ordered, %v", n, err)
	}

	// An adoption is counted like in the CLI before it is ordered.
	if _, err := s.outbox.InsertMany(t.Context(), []any{bson.D{{Key: "_id", Value: "c1"}}, bson.D{{Key: "_id", Value: "c2"}}}); err != nil {
		t.Fatal(err)
	}
	s.mustCall(nil, "POST", "/api/v1/recover", `{}`)
	var dry, adopted recovered
	s.mustCall(&dry, "POST", "/api/v1/recover/accept-copy", `{"dry_run":true}`)
	if !dry.DryRun || dry.Ordered || dry.Envelopes != 2 || len(dry.Collections) != 1 || len(s.findLogged("copy_accepted")) != 0 {
		t.Errorf("the dry run returns %+v", dry)
	}
	if s.mustCall(&adopted, "POST", "/api/v1/recover/accept-copy?watcher=split&slot=1of2", ""); !adopted.Ordered || len(s.findLogged("copy_accepted")) != 1 {
		t.Errorf("the adoption returns %+v", adopted)
	}

	for _, slot := range []string{"2of2", "x", "0of2of2", "-1of2"} {
		s.call("POST", at+"pause?slot="+slot, "").requireProblem(t, 422)
	}
	if p := s.call("POST", at+"pause?slot=0of3", "").requireProblem(t, 404); !strings.Contains(p.Fix, "slot") {
		t.Errorf("%+v", p)
	}
	s.call("POST", "/api/v1/recover?watcher=split&slot=0of3", `{}`).requireProblem(t, 422)
	s.call("POST", at+"step-down", `{"hold_s":0}`).requireProblem(t, 422)
}

func TestDeadLettersOverHTTP(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	for i := range 5 {
		s.insertDead(fmt.Sprint("d", i))
	}
	var got, all admin.Page[admin.DeadLetter]
	after := ""
	for range 3 {
		s.mustCall(&got, "GET", "/api/v1/dead?limit=2&class=record_rejected&after="+url.QueryEscape(after), "")
		all.Items = append(all.Items, got.Items...)
		if after = got.Next; got.Total != 5 {
			t.Errorf("total %d", got.Total)
		}
		got = admin.Page[admin.DeadLetter]{}
	}
	if len(all.Items) != 5 || after != "" {
		t.Errorf("%d letters, next %q", len(all.Items), after)
	}
	s.mustCall(&got, "POST", "/api/v1/dead/search", `{"filter":{"ids":["d1","d2"]},"limit":1}`)
	if len(got.Items) != 1 || got.Total != 2 || got.Next == "" {
		t.Errorf("%+v", got)
	}
	s.call("GET", "/api/v1/dead?after=xyz", "").requireProblem(t, 422)
	s.call("GET", "/api/v1/dead?class=bad", "").requireProblem(t, 422)
	s.call("POST", "/api/v1/dead/requeue", `{"filter":{}}`).requireProblem(t, 422)
	s.call("POST", "/api/v1/dead/discard", `{"filter":{}}`).requireProblem(t, 422)

	var out admin.DeadOutcome
	s.mustCall(&out, "POST", "/api/v1/dead/requeue", `{"filter":{"ids":["d1","d2"]},"dry_run":true}`)
	if !out.DryRun || out.Matched != 2 {
		t.Errorf("%+v", out)
	}
	if p := s.call("POST", "/api/v1/dead/requeue", `{"filter":{"ids":["d1","d2"]},"expect":3}`).requireProblem(t, 409); !strings.Contains(p.Detail, "nothing was done") {
		t.Errorf("%+v", p)
	}
	for _, body := range []string{`{"filter":{"all":true},"to_topic":"a/b"}`, `{"filter":{"all":true},"to_topic":"orders.v2","handlers":["pay"]}`} {
		s.call("POST", "/api/v1/dead/requeue", body).requireProblem(t, 422)
	}
	s.mustCall(&out, "POST", "/api/v1/dead/requeue", `{"filter":{"ids":["d1","d2"]},"to_topic":"orders.v2","expect":2}`)
	if entry := s.findLogged("dead_requeued"); len(entry) != 1 || !strings.Contains(fmt.Sprint(entry[0].Fields), "orders.v2") {
		t.Errorf("the audit log has %+v, want the topic", entry)
	}
	if out.Requeued != 2 || len(s.findLogged("dead_requeued")) != 1 {
		t.Errorf("%+v", out)
	}
	var gone admin.DeadDiscarded
	s.mustCall(&gone, "POST", "/api/v1/dead/discard", `{"filter":{"class":"record_rejected","requeued":"false"},"expect":3}`)
	if gone.Discarded != 3 || len(s.findLogged("dead_discarded")) != 1 {
		t.Errorf("%+v", gone)
	}
}

func TestAnEditNamesTheVersionThatItWasMadeFrom(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	s.insertDead("a/b c?", bson.E{Key: "payload", Value: planted})
	path := "/api/v1/dead/letter?id=" + url.QueryEscape("a/b c?")

	r := s.call("GET", path, "")
	tag := r.header.Get("ETag")
	if r.status != 200 || tag != `"0"` || strings.Contains(string(r.body), planted) {
		t.Fatalf("%d %s %s", r.status, tag, r.body)
	}

	if p := s.call("PATCH", path, `{"fields":{"topic":"x"}}`).requireProblem(t, 428); p.Fix == "" {
		t.Errorf("%+v", p)
	}
	s.call("PATCH", path, `{"fields":{"topic":"x"}}`, "If-Match", `"7"`).requireProblem(t, 412)
	s.call("PATCH", path, `{"fields":{"topic":"x"}}`, "If-Match", "*").requireProblem(t, 412)
	s.call("PATCH", path, `{"fields":{"nosuch":"x"}}`, "If-Match", tag).requireProblem(t, 422)
	s.call("PATCH", path, `{"payload":"a","payload_base64":"YQ=="}`, "If-Match", tag).requireProblem(t, 422)
	s.call("PATCH", path, `{"payload_base64":"%"}`, "If-Match", tag).requireProblem(t, 422)
	s.call("PATCH", "/api/v1/dead/letter?id=none", `{"fields":{"topic":"x"}}`, "If-Match", tag).requireProblem(t, 404)

	var e admin.DeadEdited
	s.mustCall(&e, "PATCH", path, `{"payload":"new","fields":{"topic":"x"}}`, "If-Match", tag)
	if e.Delivery != 1 || !slices.Equal(e.Edited, []string{"payload", "topic"}) {
		t.Errorf("%+v", e)
	}
	s.call("PATCH", path, `{"payload":"again"}`, "If-Match", tag).requireProblem(t, 409) // it was requeued

	if list := s.findLogged("dead_edited"); len(list) != 1 || strings.Contains(string(list[0].Fields), "new") {
		t.Errorf("%+v", list)
	}
}

func TestPayloadsAreShownToWhoAsksAndMay(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	s.insertDead("j", bson.E{Key: "payload", Value: `{"card": "` + planted + `", "n": 12345678901234567890}`},
		bson.E{Key: "headers", Value: bson.A{bson.D{{Key: "k", Value: "Authorization"}, {Key: "v", Value: bson.Binary{Data: []byte(planted)}}}, bson.D{{Key: "k", Value: "x"}, {Key: "v", Value: bson.Binary{Data: []byte("kept")}}}}})
	s.insertDead("b", bson.E{Key: "payload", Value: bson.Binary{Data: []byte(planted)}})
	r := s.call("GET", "/api/v1/dead/letter?id=j&payload=true", "")
	if r.status != 200 || strings.Contains(string(r.body), planted) || !strings.Contains(string(r.body), "12345678901234567890") || !strings.Contains(string(r.body), "a2VwdA==") {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := s.call("GET", "/api/v1/dead/letter?id=b&payload=true", ""); r.status != 200 || strings.Contains(string(r.body), "aHVudGVy") {
		t.Errorf("%d %s", r.status, r.body)
	}
	for _, path := range []string{"/api/v1/dead", "/api/v1/dead/letter?id=j", "/api/v1/lookup?id=j", "/api/v1/audit", "/api/v1/overview", "/api/v1/dead/summary"} {
		if r := s.call("GET", path, ""); r.status != 200 || strings.Contains(string(r.body), planted) {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
	}

	if strings.Contains(s.log.String(), planted) || strings.Contains(s.log.String(), operatorToken) {
		t.Error("the log has a secret")
	}
}

func TestReplaysAreCarriedOutByTheProcess(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	old := uint32(time.Now().Add(-time.Hour).Unix())
	if _, err := s.outbox.InsertOne(t.Context(), bson.D{
		{Key: "_id", Value: "r1"}, {Key: "ts", Value: bson.Timestamp{T: old, I: 1}}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "OrderPlaced"}, {Key: "payload", Value: "x"},
	}); err != nil {
		t.Fatal(err)
	}

	if _, err := s.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: uint32(time.Now().Unix())}}}}}); err != nil {
		t.Fatal(err)
	}
	s.call("POST", "/api/v1/replays", `{}`).requireProblem(t, 422)
	var plan admin.ReplayPlan
	s.mustCall(&plan, "POST", "/api/v1/replays/plan", `{"ids":["r1"]}`, "Authorization", "Bearer "+viewerToken)
	if plan.Found != 1 || len(plan.Topics) != 1 || plan.Topics[0].Name != "outbox.event.order" {
		t.Fatalf("%+v", plan)
	}
	var info admin.ReplayInfo
	s.mustCall(&info, "POST", "/api/v1/replays", `{"ids":["r1"]}`)
	stacktest.Eventually(t, "the envelope is queued", func() bool {
		s.mustCall(&info, "GET", "/api/v1/replays/"+info.ID, "")
		return info.Queued > 0
	})

	if info.Outstanding != 1 {
		t.Errorf("%+v", info)
	}
	s.call("GET", "/api/v1/replays/none", "").requireProblem(t, 404)
	s.call("GET", "/api/v1/replays/"+info.ID+"?watcher=other", "").requireProblem(t, 404)
	if p := s.call("POST", "/api/v1/replays?watcher=other", `{"ids":["r1"]}`).requireProblem(t, 422); !strings.Contains(p.Detail, "rules of watcher orders only") {
		t.Errorf("%+v", p)
	}
}

func TestLiveFigures(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+livePath, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+viewerToken)
	res, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	lines, seen, name := bufio.NewScanner(res.Body), 0, ""
	lines.Buffer(nil, 1<<20)
	for seen < 2 && lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
			name = rest
		}
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			var o admin.Overview
			if err := json.Unmarshal([]byte(data), &o); err != nil || name != "overview" || len(o.Slots) != 1 {
				t.Fatalf("%s: %v %s", name, err, data)
			}
			seen++
		}
	}

	if seen < 2 {
		t.Fatalf("%d events, %v", seen, lines.Err())
	}
}

func TestLiveClientsAreBounded(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	// A timeout would end the first request before the last one has arrived.
	s.client.Timeout = 0

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range maxLive + 1 {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+livePath, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+operatorToken)

		res, err := s.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = res.Body.Close() })

		if want := map[bool]int{true: 503, false: 200}[i == maxLive]; res.StatusCode != want {
			t.Fatalf("client %d: %d; want %d", i, res.StatusCode, want)
		}
	}
}

func TestAStopEndsWhoFollows(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	dep := admin.New(admin.Operator{State: s.state, Watcher: "orders"})
	srv, err := ListenAdmin(AdminOptions{Listen: "127.0.0.1:0", Operator: dep, Log: discard(), Access: Access{Anonymous: admin.RoleViewer, Local: true, Rate: 100}})
	if err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- srv.Run(ctx) }()

	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+srv.Addr()+livePath, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()

	stop()
	if err := <-ended; err != nil {
		t.Errorf("%v", err)
	}
}

func TestClearWantsItsPhrase(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	s.insertDead("1")

	var out admin.Cleared
	s.mustCall(&out, "POST", "/api/v1/clear", `{"what":["dead","audit"],"dry_run":true}`)
	if out.Confirm != "clear orders" || out.Found != 1 || out.Removed != 0 {
		t.Errorf("%+v", out)
	}

	s.call("POST", "/api/v1/clear", `{"what":["dead"]}`).requireProblem(t, 409)
	s.call("POST", "/api/v1/clear", `{"what":["everything"],"confirm":"clear orders"}`).requireProblem(t, 422)
	if p := s.call("POST", "/api/v1/clear", `{"what":["dead"],"confirm":"clear orders"}`).requireProblem(t, 409); !strings.Contains(p.Detail, "owns slot") {
		t.Errorf("%+v", p)
	}

	s.mustCall(&out, "POST", "/api/v1/clear", `{"what":["dead"],"confirm":"clear orders","force":true}`)
	if out.Removed != 1 || len(s.findLogged("clearing")) != 1 || len(s.findLogged("cleared")) != 1 {
		t.Errorf("%+v", out)
	}
}

func TestProblemsOfUseCasesHaveTheirStatus(t *testing.T) {
	t.Parallel()

	for _, c := range []struct {
		err  error
		want int
	}{
		{fmt.Errorf("x: %w", mongodb.ErrNotFound), 404},
		{listing.ErrCursor, 422},
		{&admin.InvalidError{Reason: "no"}, 422},
		{admin.ErrInUse, 409},
		{admin.ErrCompacted, 409},
		{&mongodb.PrivilegeError{Action: "find", On: "a.b", Err: errors.New("x")}, 424},
		{context.DeadlineExceeded, 503},
		{admin.ErrReplaysFull, 503},
		{errors.New("mongodb://u:" + planted + "@h is meant"), 422},
	} {
		var p *ErrorBody
		if !errors.As(problemOf(c.err), &p) || p.Status != c.want || strings.Contains(p.Detail, planted) {
			t.Errorf("%v: %+v; want %d", c.err, p, c.want)
		}
	}
}

// The event at which the stream stands becomes a dead letter, and the owner gets the order to pass over it.
func TestAnEventIsPassedOverHTTP(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	var skipped admin.SkippedEvent
	s.mustCall(&skipped, "POST", "/api/v1/recover/skip", `{"dry_run":true}`)
	if !skipped.DryRun || skipped.ID != "standing" || skipped.Letter != "" {
		t.Errorf("plan: %+v", skipped)
	}

	s.mustCall(&skipped, "POST", "/api/v1/recover/skip?slot=0of1", `{}`)
	if skipped.Letter == "" || skipped.Collection != s.ns || len(s.findLogged("event_skipped")) != 1 {
		t.Errorf("skipped: %+v, %d entries", skipped, len(s.findLogged("event_skipped")))
	}
	var list struct {
		Items []struct {
			Class string `json:"class"`
		} `json:"items"`
	}
	s.mustCall(&list, "GET", "/api/v1/dead?class=skipped", "")
	if len(list.Items) != 1 || list.Items[0].Class != "skipped" {
		t.Errorf("letters: %+v", list)
	}
}
