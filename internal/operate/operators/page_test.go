package operators_test

import (
	"flag"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

var long = flag.Bool("app.long", false, "measure page and API over HTTP with a million envelopes and a hundred thousand dead letters")

// TestPageDoesNotGrowWithTheOutbox requests page and API over HTTP. With -app.long the 99th percentile must be at
// most 50 ms, at full size.
func TestPageDoesNotGrowWithTheOutbox(t *testing.T) {
	envelopes, dead, looks := 2000, 200, 20
	if *long {
		envelopes, dead, looks = 1_000_000, 100_000, 500
	}

	client := stacktest.Client(t)
	db, state := stacktest.Database(t, client), statetest.New(t, client)
	admintest.Fill(t, db.Collection("outbox"), envelopes, state.Collection("letters"), dead)
	if _, err := state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}, {Key: "epoch", Value: int64(1)}}); err != nil {
		t.Fatal(err)
	}
	if _, err := outboxes.NewRegistry(state.Collection("collections")).Register(t.Context(), [16]byte{1}, db.Name()+".outbox", "orders", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	_, _, get, _ := serve(t, state.Name(), db.Name()+".outbox")
	look := func(path, want string) time.Duration {
		began := time.Now()
		status, body := get(path)
		took := time.Since(began)
		if status != http.StatusOK || !strings.Contains(body, want) {
			t.Fatalf("%s: %d %.900s; want %s", path, status, body, want)
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
