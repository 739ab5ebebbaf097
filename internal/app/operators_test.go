package app_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

// TestTheOperatorsListenerNeedsNoRelay serves page and API from the configuration alone.
func TestTheOperatorsListenerNeedsNoRelay(t *testing.T) {
	t.Parallel()
	const token = "a-token-of-the-test"
	state := stacktest.Database(t, stacktest.Client(t)).Name()
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := "watcher: orders\nmongodb: { uri: '" + stacktest.MongoURI(t) + "', state: " + state + " }\nkafka: { brokers: ['" + stacktest.Brokers(t)[0] + "'] }\nwatch: [shop.outbox]\n" +
		"http: { admin: { listen: '127.0.0.1:0', token: '" + token + "' } }\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, _, err := config.Load(file, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	o, err := app.NewOperators(cfg, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- o.Run(ctx) }()
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	client := &http.Client{Transport: tr, Timeout: time.Minute}
	for path, want := range map[string]string{"/api/v1/overview": `"watchers":[]`, "/api/v1/whoami": `"role":"operator"`, "/": "<html", "/api/openapi.json": `"3.1.0"`} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+o.Addr()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("ann", token)
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
			t.Errorf("%s: %d %.300s, %v; want %s", path, res.StatusCode, body, err, want)
		}
	}
	if _, err := app.NewOperators(taken(cfg, o.Addr()), "test", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "http.admin.listen") {
		t.Errorf("an address that is taken: %v", err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("after a stop: %v", err)
	}
}

func taken(cfg config.Config, address string) config.Config {
	a := *cfg.HTTP.Admin
	a.Listen, cfg.HTTP.Admin = address, &a
	return cfg
}
