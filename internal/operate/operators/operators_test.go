package operators_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/operators"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// TestTheOperatorsListenerNeedsNoRelay serves page and API from the configuration alone.
func TestTheOperatorsListenerNeedsNoRelay(t *testing.T) {
	t.Parallel()
	o, cfg, get, stop := serve(t, stacktest.Database(t, stacktest.Client(t)).Name(), "shop.outbox")
	for path, want := range map[string]string{"/api/v1/overview": `"slots":[]`, "/api/v1/whoami": `"role":"operator"`, "/": "<html", "/api/openapi.json": `"3.1.0"`} {
		if status, body := get(path); status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d %.300s; want %s", path, status, body, want)
		}
	}

	if _, err := operators.New(taken(cfg, o.Addr()), "test", slog.New(slog.DiscardHandler), nil); err == nil || !strings.Contains(err.Error(), "http.admin.listen") {
		t.Errorf("an address that is taken: %v", err)
	}
	if err := stop(); err != nil {
		t.Errorf("after a stop: %v", err)
	}
}

// serve serves page and API of the watcher orders until stop, which returns the result of Run. get requests a path
// as an operator.
func serve(t *testing.T, state, watch string) (o *operators.Server, cfg config.Config, get func(path string) (status int, body string), stop func() error) {
	t.Helper()
	const token = "a-token-of-the-test"
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := fmt.Sprintf("watcher: orders\nmongodb: { uri: '%s' }\nstate: { database: %s }\nkafka: { brokers: ['%s'] }\nwatch: [%s]\nhttp: { admin: { listen: '127.0.0.1:0', token: '%s' } }\n",
		stacktest.MongoURI(t), state, stacktest.Brokers(t)[0], watch, token)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	cfg, _, err := config.Load(file, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if o, err = operators.New(cfg, "test", slog.New(slog.DiscardHandler), nil); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- o.Run(ctx) }()
	stop = sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() { _ = stop() })
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	client := &http.Client{Transport: tr, Timeout: time.Minute}
	return o, cfg, func(path string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+o.Addr()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("ann", token)
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(body)
	}, stop
}

func taken(cfg config.Config, address string) config.Config {
	a := *cfg.HTTP.Admin
	a.Listen, cfg.HTTP.Admin = address, &a
	return cfg
}
