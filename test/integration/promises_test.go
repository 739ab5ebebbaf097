//go:build unix

package integration

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// I1, I3, I4, I5, I8: many keys, transactions with several events, some rolled back.
func TestOrderPerKey(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	s.StartLoad(kit.Load{Events: 1500}).WaitDone()
	v := s.CheckDelivery(topics)
	t.Log(v)
	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	if !s.CheckDelivery(topics).OK() {
		t.Error("the topic changed when the relay ended")
	}

	history.CheckHistory()
}

// I2: a rolled back event is in no topic, even if most events are rolled back.
func TestAbortedTransactionsAreNeverPublished(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	s.StartLoad(kit.Load{Events: 200, AbortEvery: 2}).WaitDone()
	v := s.CheckDelivery(topics)
	if v.Records != v.Events {
		t.Errorf("%s", v)
	}
}

// Services append while no relay runs.
func TestBacklogWhileTheRelayIsOff(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	s.StartLoad(kit.Load{Events: 500}).WaitDone()
	p := s.StartRelay()
	s.CheckDelivery(topics)
	p.Terminate()
	p.WaitExit()
	s.StartLoad(kit.Load{Events: 500}).WaitDone()
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
}

// An append reaches the consumer at once, without waiting for a poll.
func TestCommitWakesDelivery(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "warm", 1, 10))
	topics.WaitDistinct(1)
	// The stream waits in the server for 500 ms at a time. A delivery that had to wait for its end would show
	// this delay each time. On a busy machine, single deliveries may be slow for other reasons, so the test
	// uses the fastest one.
	const few, many, enough = 20, 200, 100 * time.Millisecond
	best := time.Hour
	for i := 0; i < few || i < many && best > enough; i++ {
		s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", i, 10))
		begin := time.Now()
		topics.WaitDistinct(i + 2)
		best = min(best, time.Since(begin))
	}

	if best > enough {
		t.Errorf("the fastest of %d deliveries took %s", many, best)
	}

	t.Logf("fastest delivery %s", best)
	s.CheckDelivery(topics)
}

// I8: payloads of each kind, and headers, arrive byte for byte.
func TestBytesSurvive(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}

	large := make([]byte, 700<<10)
	for i := range large {
		large[i] = byte(i * 7)
	}

	events := []event.Event{
		event.New(event.Aggregate{Type: "order", ID: "k"}, "Bytes", event.Bytes("", every), event.WithHeader("every", every), event.WithHeader("null", nil), event.WithHeader("ünï", []byte("ö")), event.WithHeader("empty", []byte{})),
		event.New(event.Aggregate{Type: "order", ID: "k"}, "Text", event.Bytes("", []byte("text with ünïcode and \x00"))),
		event.New(event.Aggregate{Type: "order", ID: "k"}, "Empty", event.Bytes("", []byte{})),
		event.New(event.Aggregate{Type: "order", ID: "k"}, "Null", event.Payload{}),
		event.New(event.Aggregate{Type: "order", ID: "k"}, "Document", event.Document(bson.D{{Key: "b", Value: 1}, {Key: "a", Value: bson.A{"x", 2.5, true, nil}}, {Key: "n", Value: int64(1) << 60}})),
		event.New(event.Aggregate{Type: "order", ID: "k"}, "List", event.Document(bson.A{1, "two"})),
		event.New(event.Aggregate{Type: "order", ID: "k"}, "Large", event.Bytes("", large)),
	}

	s.AppendEvents(s.Outbox(), events...)
	s.CheckDelivery(topics)
	want := map[string]string{"Document": `{"b":1,"a":["x",2.5,true,null],"n":1152921504606846976}`, "List": `[1,"two"]`, "Text": "text with ünïcode and \x00"}
	for i, r := range topics.AllRecords() {
		if w := want[events[i].Name()]; w != "" && string(r.Value) != w {
			t.Errorf("%s: value %q, want %q", events[i].Name(), r.Value, w)
		}
	}
}

// A transaction with 10,000 events is delivered completely and in order.
func TestTransactionOf10000Events(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	events := make([]event.Event, 10_000)
	for i := range events {
		events[i] = kit.NewEvent("order", "k"+string(rune('a'+i%7)), i, 100)
	}
	s.AppendEvents(s.Outbox(), events...)
	s.CheckDelivery(topics)
}
