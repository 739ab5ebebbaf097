package httpapi

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// openLive opens the live stream with a token, and returns its status and its body.
func (s *site) openLive(ctx context.Context, token string) (int, *bufio.Scanner) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+livePath, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	res, err := (&http.Client{Transport: s.client.Transport}).Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = res.Body.Close() })
	return res.StatusCode, bufio.NewScanner(res.Body)
}

// Somebody without a login who opens connections and sends slowly does not end the streams and actions of operators.
func TestStrangersDoNotEndStreamsOfOperators(t *testing.T) {
	t.Parallel()
	s := openSite(t, withForm(nil, time.Hour))
	status, events := s.openLive(t.Context(), operatorToken)
	if status != http.StatusOK || !events.Scan() {
		t.Fatalf("the stream of an operator: %d", status)
	}

	at, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	for i := range adminConns + 100 {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at.Host)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_, _ = fmt.Fprintf(c, "POST /login HTTP/1.1\r\nHost: %s\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\nx", at.Host)
		// Each request has begun before the next connection.
		if i%100 == 0 {
			<-time.After(10 * time.Millisecond)
		}
	}

	// New requests are responded to, and the stream goes on.
	s.mustCall(nil, "GET", "/api/v1/ping", "")
	deadline := time.Now().Add(5 * time.Second)
	for n := 0; time.Now().Before(deadline); n++ {
		if !events.Scan() {
			t.Fatalf("the stream of the operator has ended after %d lines: %v", n, events.Err())
		}
	}
}

// Viewers who hold all of their seats take none of the operators'.
func TestViewersDoNotKeepOperatorsFromTheLiveFigures(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range maxLive {
		if status, _ := s.openLive(ctx, viewerToken); status != http.StatusOK {
			t.Fatalf("a viewer: %d", status)
		}
	}
	if status, _ := s.openLive(ctx, viewerToken); status != http.StatusServiceUnavailable {
		t.Errorf("one viewer more: %d", status)
	}
	if status, _ := s.openLive(ctx, operatorToken); status != http.StatusOK {
		t.Errorf("an operator: %d", status)
	}
}

// The signature of a session is a guess at a token. It counts as one.
func TestForgedSessionsAreCounted(t *testing.T) {
	t.Parallel()
	var rejected atomic.Int32
	s := openSite(t, withForm(nil, time.Hour), func(o *AdminOptions) {
		o.Rejected = func(reason string) {
			if reason == rejectedLogin {
				rejected.Add(1)
			}
		}
	})
	b := s.newBrowser()
	if status, _ := b.logIn("ann", operatorToken); status != http.StatusSeeOther {
		t.Fatal(status)
	}
	at, _ := url.Parse(s.url)
	var name string
	for _, c := range b.http.Jar.Cookies(at) {
		name = c.Name
	}
	if name != sessionCookie+"_"+at.Port() {
		t.Errorf("the cookie is called %q", name)
	}

	s.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	const guesses = 10
	for i := range guesses {
		guess := session{"ann", "operator", time.Now().Add(time.Hour).Unix()}.sign(Tokens{Operator: fmt.Sprint("guess-", i/5)})
		for _, path := range []string{"/", "/api/v1/ping"} {
			r := s.call("GET", path, "", "Authorization", "", "Accept", "text/html", "Cookie", name+"="+guess)
			if r.status == http.StatusOK {
				t.Fatalf("a forged session is accepted at %s", path)
			}
		}
	}
	if n := rejected.Load(); n != 2*guesses {
		t.Errorf("%d of %d guesses were counted", n, 2*guesses)
	}
	if n := strings.Count(s.log.String(), "remote=127.0.0.1"); n != 2*guesses {
		t.Errorf("%d of %d guesses are in the log with the address:\n%.1000s", n, 2*guesses, s.log.String())
	}
}

// Behind a proxy that ends TLS, browsers send the cookie by TLS only, and no other host can set it.
func TestCookieBehindTLSIsSecure(t *testing.T) {
	t.Parallel()
	s := openSite(t, withForm(nil, time.Hour), func(o *AdminOptions) { o.Access.BehindTLS = true })
	res, err := s.newBrowser().http.PostForm(s.url+"/login", url.Values{"name": {"ann"}, "token": {operatorToken}})
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	list := res.Cookies()
	if len(list) != 1 || !list[0].Secure || !strings.HasPrefix(list[0].Name, "__Host-"+sessionCookie) || list[0].Path != "/" || list[0].Domain != "" {
		t.Errorf("cookies %v", list)
	}
}

// Browsers without Sec-Fetch-Site still send the origin of a page that reads a response.
func TestReadsOfAnotherOriginAreRejected(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	for _, origin := range []string{"http://evil.example", "null", "https://127.0.0.1.evil.example", "http://127.0.0.1:1"} {
		s.call("GET", "/api/v1/ping", "", "Origin", origin).requireProblem(t, http.StatusForbidden)
	}
	s.mustCall(nil, "GET", "/api/v1/ping", "", "Origin", s.url)
	s.mustCall(nil, "GET", "/api/v1/ping", "", "Origin", "http://other.example", "Sec-Fetch-Site", "same-origin")
}

// An id in a query is a value. Operators and patterns of MongoDB are rejected.
func TestConditionsAreNoIDs(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	s.insertDead("a")
	for _, id := range []string{`{"$gt":""}`, `{"$ne":1}`, `{"$in":["a"]}`, `{"a":1,"$gt":2}`, `{"$regularExpression":{"pattern":".*","options":""}}`, `{"$exists":true}`} {
		for _, path := range []string{"/api/v1/lookup?id=", "/api/v1/dead?id="} {
			r := s.call("GET", path+url.QueryEscape(id), "", "Authorization", "Bearer "+viewerToken)
			// A text that is no value in Extended JSON can only be a string.
			if r.status != http.StatusUnprocessableEntity && (r.status != http.StatusOK || strings.Contains(string(r.body), s.ns)) {
				t.Errorf("%s%s: %d %s", path, id, r.status, r.body)
			}
		}
	}
	s.mustCall(nil, "GET", "/api/v1/dead?id=a", "")
	s.mustCall(nil, "GET", "/api/v1/dead?id="+url.QueryEscape(`{"a":1}`), "")
}
