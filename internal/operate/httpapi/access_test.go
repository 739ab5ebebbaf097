package httpapi

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"math/big"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

func basicLogin(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

func TestTheTokenIdentifiesTheCaller(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	for auth, want := range map[string]who{
		"Bearer " + operatorToken:          {Name: "token", Source: "api/token", Role: "operator", Payloads: true},
		"bearer " + viewerToken:            {Name: "token", Source: "api/token", Role: "viewer"},
		basicLogin("ann", operatorToken):   {Name: "ann", Source: "api/token", Role: "operator", Payloads: true},
		basicLogin("", viewerToken):        {Name: "token", Source: "api/token", Role: "viewer"},
		basicLogin("Zoë Ω", operatorToken): {Name: "Zoë Ω", Source: "api/token", Role: "operator", Payloads: true},
	} {
		var got who
		s.mustCall(&got, "GET", "/api/v1/whoami", "", "Authorization", auth)
		if want.Watcher, want.Version = "orders", "test"; got != want {
			t.Errorf("%s: %+v; want %+v", auth, got, want)
		}
	}

	for _, auth := range []string{"", "Bearer", "Bearer ", "Bearer " + operatorToken + "x", "Bearer " + operatorToken[:10], basicLogin("ann", ""), basicLogin("a\nb", operatorToken), basicLogin(strings.Repeat("a", 200), operatorToken), "Digest x"} {
		r := s.call("GET", "/api/v1/overview", "", "Authorization", auth)
		if p := r.requireProblem(t, 401); p.Fix == "" || len(r.header.Values("WWW-Authenticate")) != 2 || strings.Contains(string(r.body), operatorToken) {
			t.Errorf("%q: %+v %v", auth, p, r.header)
		}
	}

	for _, path := range []string{"/api/openapi.json", "/api/v1/nothing", "/"} {
		if r := s.call("GET", path, "", "Authorization", ""); r.status != 401 {
			t.Errorf("%s: %d", path, r.status)
		}
	}
}

func TestViewersLookAndDoNotAct(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	s.insertDead("1")
	viewer := []string{"Authorization", "Bearer " + viewerToken}
	for path, item := range readSpec(t).Paths {
		for method := range item {
			at := strings.NewReplacer("{watcher}", "orders", "{id}", "x").Replace(path)
			if method == "get" && path == livePath {
				continue
			}
			r := s.call(strings.ToUpper(method), at, "{}", viewer...)
			if role := wantedRole(method, path); (r.status == 403) != (role == "operator") {
				t.Errorf("%s %s of role %s: %d %s", method, at, role, r.status, r.body)
			}
		}
	}

	if p := s.call("GET", "/api/v1/dead/letter?id=1&payload=true", "", viewer...).requireProblem(t, 403); p.Fix == "" {
		t.Errorf("%+v", p)
	}
	if n, err := nodes.NewAuditLog(s.state.Collection("audit"), "", "").Latest(t.Context(), 10); err != nil || len(n) != 0 {
		t.Errorf("a viewer did something: %+v %v", n, err)
	}
}

func TestProxyNamesTheCaller(t *testing.T) {
	t.Parallel()
	trust := func(from string) func(*AdminOptions) {
		return func(o *AdminOptions) {
			o.Access = Access{ProxyHeader: "X-Forwarded-User", ProxyFrom: []netip.Prefix{netip.MustParsePrefix(from)}, Operators: []string{"*@ops"}, Payloads: "none", Rate: 1000, Local: true}
		}
	}

	s := openSite(t, trust("127.0.0.0/8"))
	for name, role := range map[string]string{"ann@ops": "operator", "bob@shop": "viewer"} {
		var got who
		s.mustCall(&got, "GET", "/api/v1/whoami", "", "Authorization", "", "X-Forwarded-User", name)
		if got.Name != name || got.Role != role || got.Source != "api/proxy" || got.Payloads {
			t.Errorf("%+v", got)
		}
	}

	s.call("GET", "/api/v1/whoami", "", "Authorization", "").requireProblem(t, 401)
	// An empty token is no token.
	s.call("GET", "/api/v1/whoami", "", "Authorization", "Bearer ").requireProblem(t, 401)
	s = openSite(t, trust("10.0.0.0/8"))
	s.call("GET", "/api/v1/whoami", "", "Authorization", "", "X-Forwarded-User", "ann@ops").requireProblem(t, 401)
}

func TestTheListenerDecidesAboutAnonymousCallers(t *testing.T) {
	t.Parallel()
	s := openSite(t, func(o *AdminOptions) { o.Access = Access{Anonymous: admin.RoleViewer, Rate: 1000, Local: true} })
	s.mustCall(nil, "GET", "/api/v1/overview", "", "Authorization", "")
	s.call("POST", "/api/v1/watchers/orders/pause", "", "Authorization", "").requireProblem(t, 403)
	s.call("GET", "/api/v1/overview", "", "Authorization", "Bearer wrong").requireProblem(t, 401)
}

func TestForeignPagesReachNothing(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	for _, header := range [][]string{
		{"Origin", "https://evil.example"}, {"Sec-Fetch-Site", "cross-site"}, {"Origin", "null"},
	} {
		if p := s.call("POST", "/api/v1/watchers/orders/pause", "", header...).requireProblem(t, 403); !strings.Contains(p.Detail, "another origin") {
			t.Errorf("%v: %+v", header, p)
		}
	}

	s.mustCall(nil, "POST", "/api/v1/watchers/orders/resume", "", "Origin", s.url, "Sec-Fetch-Site", "same-origin")
	// A name of the page's own that resolves to this machine.
	for _, host := range []string{"evil.example", "evil.example:80", "127.0.0.1.evil.example"} {
		s.call("GET", "/api/v1/overview", "", "Host", host).requireProblem(t, 421)
	}

	for _, host := range []string{"localhost", "LOCALHOST:1", "[::1]:9", "127.0.0.9"} {
		s.mustCall(nil, "GET", "/api/v1/ping", "", "Host", host)
	}

	r := s.call("GET", "/api/v1/ping", "")
	for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store", "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"} {
		if r.header.Get(name) != want {
			t.Errorf("%s: %q", name, r.header.Get(name))
		}
	}
}

func TestClientsAreBounded(t *testing.T) {
	t.Parallel()
	s := openSite(t, func(o *AdminOptions) { o.Access.Rate = 1 })
	var rejected response
	for range 30 {
		if r := s.call("GET", "/api/v1/whoami", ""); r.status == http.StatusTooManyRequests {
			rejected = r
			break
		}
	}

	if p := rejected.requireProblem(t, 429); rejected.header.Get("Retry-After") == "" || p.Fix == "" {
		t.Errorf("%+v %v", p, rejected.header)
	}

	// The client chooses the name, so another name does not make it another client.
	s.call("GET", "/api/v1/whoami", "", "Authorization", basicLogin("bob", operatorToken)).requireProblem(t, 429)
	// Each token has its own rate.
	s.mustCall(nil, "GET", "/api/v1/whoami", "", "Authorization", basicLogin("bob", viewerToken))
	l := newRateLimiter(1)
	for i := range maxClients + 100 {
		l.reserve("client " + strconv.Itoa(i))
	}
	if len(l.clients) > maxClients {
		t.Errorf("%d clients are remembered", len(l.clients))
	}

	s = openSite(t)
	s.call("POST", "/api/v1/failed/reset", `{"filter":{"ids":["`+strings.Repeat("x", smallBody)+`"]}}`).requireProblem(t, 413)
	s.call("POST", "/api/v1/failed/reset", `{"filter":`).requireProblem(t, 400)
	s.call("POST", "/api/v1/failed/reset", `{"filter":{"idz":[]}}`).requireProblem(t, 422)
	if r := s.call("DELETE", "/api/v1/failed/reset", ""); r.header.Get("Allow") != "POST" {
		t.Errorf("%d %v", r.status, r.header)
	}

	s.call("DELETE", "/api/v1/failed/reset", "").requireProblem(t, 405)
	s.call("GET", "/api/v2", "").requireProblem(t, 404)
}

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	var pair tls.Certificate
	pair, a.key = a.signCertificate("root", nil)
	a.cert = pair.Leaf
	return a
}

func (a *authority) signCertificate(name string, parent *authority) (tls.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}

	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: parent == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}, DNSNames: []string{"localhost"},
	}

	signer, by := c, key
	if parent != nil {
		signer, by = parent.cert, parent.key
	}

	der, err := x509.CreateCertificate(rand.Reader, c, signer, key.Public(), by)
	if err != nil {
		a.t.Fatal(err)
	}

	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}

	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, key
}

func TestClientCertificates(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	server, _ := ca.signCertificate("server", ca)
	s := openSite(t, func(o *AdminOptions) {
		o.Access = Access{Operators: []string{"ann"}, Rate: 1000, Local: true}
		o.TLS = func() (*tls.Config, error) {
			return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{server}, ClientCAs: pool, ClientAuth: tls.VerifyClientCertIfGiven}, nil
		}
	})

	as := func(certs ...tls.Certificate) {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "localhost", Certificates: certs}}
		t.Cleanup(tr.CloseIdleConnections)
		s.client = &http.Client{Transport: tr, Timeout: time.Minute}
	}

	for name, role := range map[string]string{"ann": "operator", "bob": "viewer"} {
		pair, _ := ca.signCertificate(name, ca)
		as(pair)
		var got who
		s.mustCall(&got, "GET", "/api/v1/whoami", "", "Authorization", "")
		if got.Name != name || got.Role != role || got.Source != "api/certificate" {
			t.Errorf("%+v", got)
		}
	}

	as()
	s.call("GET", "/api/v1/whoami", "", "Authorization", "").requireProblem(t, 401)
	stranger, _ := newAuthority(t).signCertificate("ann", nil)
	as(stranger)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/api/v1/whoami", nil)
	if err != nil {
		t.Fatal(err)
	}
	if res, err := s.client.Do(req); err == nil {
		res.Body.Close()
		if res.StatusCode != 401 {
			t.Errorf("a stranger got %d", res.StatusCode)
		}
	}
}

func TestCertificatesAreReadAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		shows := func(name string) *tls.Config {
			return &tls.Config{MinVersion: tls.VersionTLS12, ServerName: name, Certificates: []tls.Certificate{{Certificate: [][]byte{[]byte(name)}}}}
		}
		first, second := shows("first"), shows("second")

		next, broken := first, error(nil)
		var counted []bool
		c := newReloadingConfig(first, AdminOptions{
			TLS: func() (*tls.Config, error) { return next, broken }, Log: discard(), Reloaded: func(ok bool) { counted = append(counted, ok) },
		})

		name := func() string {
			got, err := c.GetConfigForClient(nil)
			if err != nil {
				t.Fatal(err)
			}
			return got.ServerName
		}

		next = second
		if name() != "first" {
			t.Error("the files were read for each client")
		}

		<-time.After(certsEvery)
		if name() != "second" {
			t.Error("the files were not read again")
		}

		<-time.After(certsEvery)
		next = shows("second")
		if name() != "second" || len(counted) != 1 {
			t.Errorf("files that are as they were: counted %v", counted)
		}

		// The new files do not make a pair: the old ones stay.
		next, broken = nil, errors.New("half written")
		for range 2 {
			<-time.After(certsEvery)
			if name() != "second" {
				t.Error("files that cannot be used took the old ones away")
			}
		}

		if !slices.Equal(counted, []bool{true, false}) {
			t.Errorf("counted %v", counted)
		}
	})
}
