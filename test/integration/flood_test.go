//go:build unix

package integration

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// A service inserts 30,000 envelopes with as many aggregate types and no topics. Memory, metrics, log and
// watcher document stay bounded, the lease is kept, an event of another service is delivered, and the relay
// stops on SIGTERM.
func TestManyMissingTopicsDisturbNobody(t *testing.T) {
	t.Parallel()
	// On a busy machine, a renewal may take longer than the 2 s of other tests.
	s := kit.New(t, kit.Options{Set: map[string]any{"lease.ttl": "10s"}})
	s.SetConfig("log.level", "info")
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	epoch := s.CurrentEpoch()

	const flood = 30_000
	for from := 0; from < flood; from += 5000 {
		docs := make([]any, 0, 5000)
		for i := from; i < from+5000; i++ {
			docs = append(docs, bson.D{
				{Key: "_id", Value: fmt.Sprint("flood-", i)},
				{Key: "aggregatetype", Value: fmt.Sprint("made-up-", i)},
				{Key: "aggregateid", Value: fmt.Sprint(i)},
				{Key: "type", Value: "x"},
				{Key: "payload", Value: "x"},
				{Key: "ts", Value: bson.Timestamp{}},
			})
		}
		if _, err := s.Outbox().InsertMany(t.Context(), docs, options.InsertMany().SetOrdered(false)); err != nil {
			t.Fatal(err)
		}
	}

	began := time.Now()
	s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("real")), event.WithID("real")))
	topics.WaitDistinct(1)
	late := time.Since(began)
	stacktest.Eventually(t, "each envelope of the flood waits or is dead", func() bool {
		dead, err := s.State.Collection("letters").CountDocuments(t.Context(), bson.D{})
		return err == nil && int(dead)+s.CountHeld("parked", "blocked", "retry") == flood
	}, func() any {
		return fmt.Sprint(s.CountHeld("parked"), " parked, ", s.CountHeld(), " wait, ", s.CountOutbox(bson.D{}), " left")
	})
	settled := time.Since(began)
	start := time.Now()
	code, metrics := p.Get("/metrics")
	t.Logf("the event took %s, the flood %s, metrics %s; %d bytes of memory, %d of metrics, %d of watcher, %d of log",
		late, settled, time.Since(start), p.ResidentMemory(), len(metrics), len(s.WatcherDocument()), len(p.ReadLog()))
	if late > 20*time.Second {
		t.Errorf("the event of another service was delivered after %s", late)
	}
	if mem := p.ResidentMemory(); mem > 256<<20 {
		t.Errorf("resident memory is %d MiB", mem>>20)
	}
	if code != 200 || len(metrics) > 1<<20 {
		t.Errorf("/metrics: status %d, %d bytes", code, len(metrics))
	}
	if n := len(s.WatcherDocument()); n > 1<<20 {
		t.Errorf("the watcher document has %d bytes", n)
	}
	if log := p.ReadLog(); strings.Count(log, "\n") > 2000 {
		t.Errorf("%d lines in the log", strings.Count(log, "\n"))
	}
	if s.CurrentEpoch() != epoch || p.HasLogged("the lease was not renewed in time; work is suspended until it is renewed") {
		t.Error("the lease was lost, or not renewed in time")
	}

	start = time.Now()
	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if took := time.Since(start); took > 15*time.Second {
		t.Errorf("stopping took %s", took)
	}
}
