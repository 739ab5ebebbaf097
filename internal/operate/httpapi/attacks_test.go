package httpapi

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// TestNoOperationIsOpenToNobodyOrAForeignPage tries every operation of the description without a login, and with an
// operator's login as a page of another site would have a browser send it.
func TestNoOperationIsOpenToNobodyOrAForeignPage(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	rejected := map[string]int{}
	s := openSite(t, func(o *AdminOptions) {
		o.Rejected = func(reason string) {
			mu.Lock()
			defer mu.Unlock()
			rejected[reason]++
		}
	})

	n := 0
	for path, item := range readSpec(t).Paths {
		for method := range item {
			n++
			method, at := strings.ToUpper(method), strings.NewReplacer("{watcher}", "orders", "{id}", "x").Replace(path)
			s.call(method, at, "{}", "Authorization", "").requireProblem(t, 401)
			s.call(method, at, "{}", "Authorization", "Bearer guessed").requireProblem(t, 401)
			s.call(method, at, "{}", "Host", "rebound.example").requireProblem(t, 421)
			for _, header := range [][]string{
				{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Dest", "script"},
				{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"},
				{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "cors", "Sec-Fetch-Dest", "empty"},
			} {
				s.call(method, at, "{}", header...).requireProblem(t, 403)
			}
		}
	}

	mu.Lock()
	defer mu.Unlock()
	if n < 50 || rejected[rejectedLogin] != 2*n || rejected[rejectedHost] != n || rejected[rejectedOrigin] != 3*n {
		t.Errorf("%d operations, rejected: %v", n, rejected)
	}
	if log := s.log.String(); strings.Count(log, "login at the operator's listener is rejected") != n || strings.Contains(log, "guessed") {
		t.Errorf("each wrong token is a line of the log, without the token:\n%.2000s", log)
	}
}

// A link on another site may open the page, and nothing but that.
func TestAForeignPageMayLinkToThePage(t *testing.T) {
	t.Parallel()
	s := openSite(t, func(o *AdminOptions) {
		o.Page = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("page")) })
	})

	foreign := []string{"Sec-Fetch-Site", "cross-site"}
	if r := s.call("GET", "/", "", append(foreign, "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document")...); r.status != 200 || r.header.Get("Cross-Origin-Resource-Policy") != "same-origin" {
		t.Errorf("%d %v", r.status, r.header)
	}

	for _, dest := range []string{"iframe", "image", "script", "object"} {
		mode := "no-cors"
		if dest == "iframe" {
			mode = "navigate"
		}
		s.call("GET", "/", "", append(foreign, "Sec-Fetch-Mode", mode, "Sec-Fetch-Dest", dest)...).requireProblem(t, 403)
	}
}

// Over TLS, the browser gets the header that requires TLS in the future.
func TestTLSListenerAsksForTLSOnly(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	server, _ := a.signCertificate("server", a)
	s := openSite(t, func(o *AdminOptions) {
		o.TLS = func() (*tls.Config, error) { return &tls.Config{Certificates: []tls.Certificate{server}}, nil }
	})

	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	s.client.Transport = &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "localhost"}}
	t.Cleanup(s.client.CloseIdleConnections)
	if got := s.call("GET", "/api/v1/ping", "").header.Get("Strict-Transport-Security"); got == "" {
		t.Error("no Strict-Transport-Security")
	}
}

// A viewer who sends bodies slowly takes no operator's place, nor all places of other viewers.
func TestSlowViewersDoNotKeepOperatorsOut(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	at, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}

	// From several addresses, because one client gets a part of the places only.
	from := func(i int) *net.Dialer {
		return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+i))}}
	}

	for i := range 3 * adminInFlight {
		c, err := from(i%4).Dial("tcp", at.Host)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := fmt.Fprintf(c, "POST /api/v1/dead/search HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{", at.Host, viewerToken); err != nil {
			t.Fatal(err)
		}
	}

	// The slow requests have arrived when a viewer from one more address has no place left.
	own := s.client.Transport
	other := &http.Transport{DialContext: from(4).DialContext}
	s.client.Transport = other
	t.Cleanup(other.CloseIdleConnections)
	for s.call("GET", "/api/v1/overview", "", "Authorization", "Bearer "+viewerToken).status != http.StatusServiceUnavailable {
		if t.Context().Err() != nil {
			t.Fatal("the viewer is never rejected")
		}
	}

	s.client.Transport = own
	began := time.Now()
	s.mustCall(nil, "GET", "/api/v1/overview", "")
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the operator waited for %s", took)
	}
}

// The certificate of a proxy, and what anonymous callers may do, are not for people whom the proxy does not name.
func TestProxyThatNamesNobodyIsNobody(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	server, _ := a.signCertificate("server", a)
	proxy, _ := a.signCertificate("ann", a)
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	s := openSite(t, func(o *AdminOptions) {
		o.TLS = func() (*tls.Config, error) {
			return &tls.Config{Certificates: []tls.Certificate{server}, ClientCAs: pool, ClientAuth: tls.VerifyClientCertIfGiven}, nil
		}
		o.Access.ProxyHeader, o.Access.ProxyFrom = "X-Forwarded-User", []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
		o.Access.Operators, o.Access.Anonymous = []string{"ann"}, admin.RoleOperator
	})

	s.client.Transport = &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "localhost", Certificates: []tls.Certificate{proxy}}}
	t.Cleanup(s.client.CloseIdleConnections)
	whoami := func(header http.Header) int {
		req, err := http.NewRequestWithContext(t.Context(), "GET", s.url+"/api/v1/whoami", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header = header
		r, err := s.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		return r.StatusCode
	}

	for want, headers := range map[int][]http.Header{
		401: {{}, {"X-Forwarded-User": {""}}, {"X-Forwarded-User": {"bob", "ann"}}, {"X-Forwarded-User": {"bob", "ann"}, "Authorization": {"Bearer " + operatorToken}}, {"Authorization": {"Bearer wrong"}}},
		200: {{"X-Forwarded-User": {"bob"}}, {"Authorization": {"Bearer " + viewerToken}}},
	} {
		for _, h := range headers {
			if got := whoami(h); got != want {
				t.Errorf("%v: %d, want %d", h, got, want)
			}
		}
	}
}

// A service writes texts of megabytes and dates that JSON cannot express. Lists stay short, valid and complete.
func TestListsSurviveHugeTextsAndDates(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	huge := strings.Repeat("é", 1<<19)
	var docs []any
	for i := range 40 {
		docs = append(docs, bson.D{
			{Key: "_id", Value: fmt.Sprint("s", i)},
			{Key: "type", Value: huge},
			{Key: "aggregatetype", Value: huge},
			{Key: "aggregateid", Value: huge},
			{Key: "payload", Value: "x"},
			{Key: "dueAt", Value: bson.DateTime(math.MaxInt64 - int64(i))},
			{Key: "expiresAt", Value: bson.DateTime(math.MinInt64)},
		})
	}

	// The key is as long as an envelope may have it.
	waits := admintest.Waits(t, s.ns, bson.D{
		{Key: "_id", Value: "w"},
		{Key: "type", Value: huge[:32<<10]},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "7"},
		{Key: "key", Value: huge[:32<<10]},
		{Key: "payload", Value: "x"},
	}, waiting.Retry)
	waits.Attempts, waits.NextAt = 1, time.UnixMilli(math.MaxInt64)
	admintest.StoreWaiting(t, s.state.Collection("waiting"), waits)
	if _, err := s.outbox.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	viewer := []string{"Authorization", "Bearer " + viewerToken}
	for path, want := range map[string]int{
		"/api/v1/scheduled?limit=100": 40, "/api/v1/scheduled/summary": 1, "/api/v1/lookup?id=s1": 1, "/api/v1/lookup?id=w": 1, "/api/v1/waiting": 1, "/api/v1/waiting?failed=true": 1,
	} {
		r := s.call("GET", path, "", viewer...)
		if r.status != 200 || !json.Valid(r.body) || len(r.body) > 500<<10 {
			t.Errorf("%s: %d, %d bytes: %.300s", path, r.status, len(r.body), r.body)
		}
		if n := strings.Count(string(r.body), "éééé…") + strings.Count(string(r.body), `éééé"`); n < want {
			t.Errorf("%s has %d of %d entries: %.300s", path, n, want, r.body)
		}
	}
}

// The placeholder of a hidden value never replaces the value, and each read of a payload is logged
// with its reader.
func TestHiddenValuesAreNotWrittenBack(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	s.insertDead("1", bson.E{Key: "payload", Value: `{"card":"` + planted + `","n":1}`},
		bson.E{Key: "headers", Value: bson.A{bson.A{"authorization", planted}, bson.D{{Key: "k", Value: "a"}, {Key: "v", Value: "1"}, {Key: "authorization", Value: planted}}}})
	shown := s.call("GET", "/api/v1/dead/letter?id=1&payload=true", "")
	if shown.status != 200 || strings.Contains(string(shown.body), planted) || !strings.Contains(string(shown.body), "***") {
		t.Errorf("%d %s", shown.status, shown.body)
	}
	if r := s.call("GET", "/api/v1/dead/letter?id=1", "", "Authorization", "Bearer "+viewerToken); r.status != 200 || strings.Contains(string(r.body), planted) {
		t.Errorf("%d %s", r.status, r.body)
	}
	edit := func(body string) response {
		return s.call("PATCH", "/api/v1/dead/letter?id=1", body, "If-Match", shown.header.Get("ETag"))
	}
	edit(`{"payload":"{\"card\":\"***\",\"n\":2}"}`).requireProblem(t, 422)
	edit(`{"headers":[{"k":"Authorization","v":"***"}]}`).requireProblem(t, 422)

	events, err := nodes.NewAuditLog(s.state.Collection("audit"), "", "").Latest(t.Context(), 10)
	if err != nil || len(events) != 1 || string(events[0].Kind) != "payload_shown" {
		t.Errorf("%+v, %v", events, err)
	}
}
