package operate_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/operate"
	"github.com/outrelay/outrelay/pkg/relay"
)

// site is the server of a service in whose mux the page is mounted.
type site struct {
	t      *testing.T
	url    string
	client *http.Client
}

// mount serves the page of an operator below /ops/outrelay, next to a path of the service.
func mount(t *testing.T, op *operate.Operator, authorize func(*http.Request) (operate.Caller, error)) *site {
	t.Helper()
	handler, err := op.Handler("/ops/outrelay", authorize)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/ops/outrelay/", handler)
	mux.HandleFunc("/orders", func(response http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(response, "orders") })
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)

	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := server.Client()
	client.Jar = jar
	return &site{t, server.URL, client}
}

// send sends a request with a form, or without one a GET, and returns the status, the path after redirects, and the body.
func (s *site) send(path string, form url.Values, user string) (status int, at, body string) {
	s.t.Helper()
	method := http.MethodGet
	if form != nil {
		method = http.MethodPost
	}
	request, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(form.Encode()))
	if err != nil {
		s.t.Fatal(err)
	}
	request.Header.Set("Accept", "text/html")
	if form != nil {
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}

	request.Header.Set("X-User", user)
	response, err := s.client.Do(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return response.StatusCode, response.Request.URL.Path, string(text)
}

// The service decides who sees the page and who acts, and its names are in the audit log.
func TestAMountedPageActsForPeopleOfTheService(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.runRelay()
	op := s.operator()
	s.append("o1", event.WithTopic(s.topic))
	web := mount(t, op, func(request *http.Request) (operate.Caller, error) {
		switch user := request.Header.Get("X-User"); user {
		case "ann":
			return operate.Caller{Name: user, Role: operate.Actor, Payloads: true}, nil
		case "bob":
			return operate.Caller{Name: user, Role: operate.Viewer}, nil
		}
		return operate.Caller{}, errors.New("log in to the shop")
	})

	if status, _, body := web.send("/orders", nil, ""); status != http.StatusOK || body != "orders" {
		t.Errorf("the path of the service: %d %s", status, body)
	}
	if status, _, body := web.send("/ops/outrelay/", nil, "eve"); status != http.StatusForbidden || !strings.Contains(body, "log in to the shop") {
		t.Errorf("a stranger: %d %s", status, body)
	}
	for _, path := range []string{"/ops/outrelay/", "/ops/outrelay/dead", "/ops/outrelay/topics", "/ops/outrelay/api/v1/overview"} {
		if status, _, body := web.send(path, nil, "bob"); status != http.StatusOK || strings.Contains(body, `href="/dead"`) {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}

	if status, _, _ := web.send("/ops/outrelay/act/pause", url.Values{"_count": {"-1"}}, "bob"); status != http.StatusForbidden {
		t.Errorf("an action of a viewer: status %d, want 403", status)
	}
	_, _, question := web.send("/ops/outrelay/confirm/pause", url.Values{}, "ann")
	_, count, _ := strings.Cut(question, `name="_count" value="`)
	count, _, _ = strings.Cut(count, `"`)
	status, at, body := web.send("/ops/outrelay/act/pause", url.Values{"_count": {count}}, "ann")
	if status != http.StatusOK || !strings.HasPrefix(at, "/ops/outrelay/") {
		t.Errorf("an action: %d at %s: %s", status, at, body)
	}
	s.await(relay.Standby)
	s.requireAuditOf("paused", "ann", "page/service")
}

// Without a function of the service, people log in with the tokens of the configuration. Without both, nothing is mounted.
func TestAMountedPageNeedsALogin(t *testing.T) {
	t.Parallel()
	s := setup(t)
	op := s.operator()
	if _, err := op.Handler("/ops", nil); err == nil || !strings.Contains(err.Error(), "http.admin") {
		t.Errorf("without a login: got %v, want an error that names http.admin", err)
	}
	if _, err := op.Handler("ops/", nil); !errors.Is(err, operate.ErrInvalid) || !strings.Contains(err.Error(), `"ops/"`) {
		t.Errorf("a bad prefix: got %v", err)
	}

	s = setup(t, func(cfg *relay.Config) {
		cfg.HTTP.Admin = relay.DefaultAdmin()
		cfg.HTTP.Admin.Token = relay.NewSecret("token-of-operators")
	})
	s.runRelay()
	web := mount(t, s.operator(), nil)
	if status, at, body := web.send("/ops/outrelay/dead", nil, ""); status != http.StatusOK || at != "/ops/outrelay/login" || !strings.Contains(body, `action="/ops/outrelay/login?next=%2Fdead"`) {
		t.Errorf("without a login: %d at %s: %s", status, at, body)
	}
	status, at, _ := web.send("/ops/outrelay/login?next=%2Fnodes", url.Values{"name": {"ann"}, "token": {"token-of-operators"}}, "")
	if status != http.StatusOK || at != "/ops/outrelay/nodes" {
		t.Errorf("after the login: %d at %s", status, at)
	}
}

// The page and the API read Kafka with the login that the program has given to the relay, not only with that of the configuration.
func TestAMountedPageUsesTheKafkaLoginOfTheRelay(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true, Kafka: devstack.KafkaOptions{
		Users: []devstack.User{{Name: "admin", Password: "admin"}}, OAuth: true,
	}})
	brokers, err := stack.BrokersOn(devstack.SASL)
	if err != nil {
		t.Fatal(err)
	}
	s := setup(t, func(cfg *relay.Config) { cfg.Kafka.Brokers = brokers })
	source := func(context.Context) (string, error) { return devstack.UnsecuredToken("relay", time.Hour), nil }
	if s.relay, err = relay.New(s.config, relay.WithLogger(slog.New(slog.DiscardHandler)), relay.WithKafkaToken(source)); err != nil {
		t.Fatal(err)
	}
	s.runRelay()

	web := mount(t, s.operator(), func(*http.Request) (operate.Caller, error) {
		return operate.Caller{Name: "ann", Role: operate.Viewer}, nil
	})
	for path, want := range map[string]string{
		"/ops/outrelay/api/v1/ping":            `"kafka":true`,
		"/ops/outrelay/api/v1/groups?all=true": `"problems":[]`,
	} {
		if status, _, body := web.send(path, nil, ""); status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d %s; want %s", path, status, body, want)
		}
	}
}
