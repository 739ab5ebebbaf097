package app_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/admin/admintest"
	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/store"
)

var long = flag.Bool("app.long", false, "measure page and API over HTTP with a million envelopes and a hundred thousand dead letters")

// TestPageDoesNotGrowWithTheOutbox asks for page and API over HTTP. With -app.long it holds them to 50 ms at the 99th
// percentile, at full size.
func TestPageDoesNotGrowWithTheOutbox(t *testing.T) {
	const token = "a-token-of-the-test"
	envelopes, dead, looks := 2000, 200, 20
	if *long {
		envelopes, dead, looks = 1_000_000, 100_000, 500
	}
	client := stacktest.Client(t)
	db, state := stacktest.Database(t, client), stacktest.Database(t, client)
	admintest.Fill(t, db.Collection("outbox"), envelopes, dead)
	if _, err := state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}, {Key: "epoch", Value: int64(1)}}); err != nil {
		t.Fatal(err)
	}
	if _, err := store.NewRegistry(state.Collection("collections")).Claim(t.Context(), [16]byte{1}, db.Name()+".outbox", "orders"); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := fmt.Sprintf("watcher: orders\nmongodb: { uri: '%s', state: %s }\nkafka: { brokers: ['%s'] }\nwatch: [%s.outbox]\nhttp: { admin: { listen: '127.0.0.1:0', token: '%s' } }\n",
		stacktest.MongoURI(t), state.Name(), stacktest.Brokers(t)[0], db.Name(), token)
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
	defer func() { stop(); <-ended }()
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	browser := &http.Client{Transport: tr, Timeout: time.Minute}
	look := func(path, want string) time.Duration {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+o.Addr()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("ann", token)
		began := time.Now()
		res, err := browser.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		took := time.Since(began)
		if err != nil || res.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
			t.Fatalf("%s: %d %.900s, %v; want %s", path, res.StatusCode, body, err, want)
		}
		return took
	}
	for path, want := range map[string]string{"/": "<html", "/api/v1/overview": fmt.Sprintf(`"dead":%d`, dead)} {
		look(path, want)
		took := make([]time.Duration, looks)
		for i := range took {
			took[i] = look(path, want)
			<-time.After(20 * time.Millisecond)
		}
		slices.Sort(took)
		p99 := took[len(took)*99/100]
		t.Logf("%s with %d envelopes, %d dead letters: p50 %v p99 %v max %v of %d", path, envelopes, dead, took[looks/2], p99, took[looks-1], looks)
		if *long && p99 > 50*time.Millisecond {
			t.Errorf("%s: p99 %v", path, p99)
		}
	}
}
