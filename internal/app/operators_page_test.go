package app_test

import (
	"context"
	"encoding/binary"
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
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/deadletter"
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
	manyEnvelopes(t, db, envelopes, dead)
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

func manyEnvelopes(t *testing.T, db *mongo.Database, envelopes, dead int) {
	t.Helper()
	coll := db.Collection("outbox")
	if err := store.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	letters := db.Collection(deadletter.Collection(coll.Name()))
	if err := store.EnsureIndexSet(t.Context(), letters, deadletter.Indexes()); err != nil {
		t.Fatal(err)
	}
	insert := func(coll *mongo.Collection, n int, doc func(i int) bson.D) {
		docs := make([]any, 0, 10_000)
		for i := range n {
			if docs = append(docs, doc(i)); len(docs) < cap(docs) && i+1 < n {
				continue
			}
			if _, err := coll.InsertMany(t.Context(), docs, options.InsertMany().SetOrdered(false)); err != nil {
				t.Fatal(err)
			}
			docs = docs[:0]
		}
	}
	old := uint32(time.Now().Add(-time.Hour).Unix())
	insert(coll, envelopes, func(i int) bson.D {
		return bson.D{
			{Key: "_id", Value: fmt.Sprintf("e%07d", i)},
			{Key: "ts", Value: bson.Timestamp{T: old, I: uint32(i + 1)}},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: fmt.Sprint(i % 1000)},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: "x"},
		}
	})
	insert(letters, dead, func(i int) bson.D {
		at := time.Now().Add(-time.Duration(i) * time.Second)
		return bson.D{
			{Key: "_id", Value: deadletter.ID{NS: store.Namespace(coll), ID: bson.RawValue{Type: bson.TypeInt64, Value: binary.LittleEndian.AppendUint64(nil, uint64(i))}}},
			{Key: "class", Value: "malformed"},
			{Key: "reason", Value: "no"},
			{Key: "topic", Value: "orders"},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "key", Value: fmt.Sprint(i % 1000)},
			{Key: "size", Value: 100},
			{Key: "attempts", Value: bson.A{}},
			{Key: "source", Value: bson.D{{Key: "kind", Value: "relay"}}},
			{Key: "movedAt", Value: at},
			{Key: "firstFailure", Value: at},
			{Key: "lastFailure", Value: at},
		}
	})
}
