package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/transaction"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// again is the published message as the consumer gets it.
func again(t *testing.T, m *consumer.Message, topic string) *consumer.Message {
	t.Helper()
	got := &consumer.Message{Topic: topic, Partition: 5, Offset: 99, Key: m.Key, Value: m.Value, Headers: m.Headers}
	if err := consumer.Decode(got); err != nil {
		t.Fatal(err)
	}
	got.Group = "g"
	return got
}

func TestAMessageClimbsTheLadder(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1_800_000_000_000)
	g := newGraveyard(t, func(cfg *consumer.DisposerConfig) { cfg.Now = func() time.Time { return now } })
	m := failed(1, "A")
	for rung, delay := range []time.Duration{time.Minute, time.Hour} {
		var a consumer.Failures
		if rung == 0 {
			a = a.Note(errFlaky, m, now) // at first once in place
		}
		a = a.Note(errFlaky, m, now)
		v := consumer.Verdict{Action: consumer.ActRetryTopic, Delay: delay, Topic: consumer.RetryTopicName("orders", "g", rung+1), Attempts: a}
		if err := g.Dispose(t.Context(), m, "h", v, errFlaky); err != nil {
			t.Fatal(err)
		}
		topic := "orders.g.retry." + strconv.Itoa(rung+1)
		if len(g.out.list[topic]) != 1 {
			t.Fatalf("published %v", g.out.list)
		}
		next := again(t, g.out.list[topic][0], topic)
		only, _ := next.Header(consumer.HeaderOnly)
		if next.ID != "m1" || next.Attempt != rung+3 || string(only) != "g/h" || next.Origin() != (consumer.Origin{Topic: "orders", Partition: 2, Offset: 1}) {
			t.Errorf("rung %d: id %s, attempt %d, only %s, origin %v", rung+1, next.ID, next.Attempt, only, next.Origin())
		}
		if !bytes.Equal(next.Key, m.Key) || !bytes.Equal(next.Value, m.Value) {
			t.Errorf("rung %d: the record's bytes changed", rung+1)
		}
		early, ok := errors.AsType[*consumer.NotDueError](consumer.Precheck(next, now.Add(delay-time.Millisecond)))
		if !ok || !early.Due.Equal(now.Add(delay)) || early.Wait(now) != delay {
			t.Errorf("rung %d: before it is due: %v", rung+1, early)
		}
		if err := consumer.Precheck(next, now.Add(delay)); err != nil {
			t.Errorf("rung %d: when it is due: %v", rung+1, err)
		}
		m = next
	}
	a := consumer.Failures{}.Note(errFlaky, m, now)
	v := consumer.Verdict{Action: consumer.ActDeadLetter, Attempts: a}
	if err := g.Dispose(t.Context(), m, "h", v, errFlaky); err != nil {
		t.Fatal(err)
	}
	l, err := g.letters.Get(t.Context(), consumer.LetterID{Group: "g", Handler: "h", ID: "m1"})
	if err != nil || l.Attempts != 4 || len(l.History) != 4 || l.Topic != "orders" || l.Offset != 1 {
		t.Fatalf("letter %+v, %v", l, err)
	}
	if diff := cmp.Diff(failed(1, "A").Headers, l.Message().Headers); diff != "" {
		t.Errorf("headers of the letter: %s", diff)
	}
}

func TestWhatCannotBeMovedIsADeadLetter(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	g.out.fail = kafka.MessageSizeTooLarge
	big := failed(1, "A")
	if err := g.Dispose(t.Context(), big, "h", consumer.Verdict{Action: consumer.ActRetryTopic, Topic: "retry", Delay: time.Second}, errFlaky); err != nil {
		t.Errorf("too large: %v", err)
	}
	for n, code := range []kafka.Error{kafka.UnknownTopicOrPartition, kafka.InvalidTopic, kafka.TopicAuthorizationFailed} {
		g.out.fail = code
		if err := g.Dispose(t.Context(), failed(4+n, "A"), "h", consumer.Verdict{Action: consumer.ActRetryTopic, Topic: "retry", Delay: time.Second}, errFlaky); err != nil {
			t.Errorf("%v: %v", code, err)
		}
	}
	if n, err := g.letters.Count(t.Context(), consumer.LetterQuery{}); n != 4 || err != nil {
		t.Errorf("%d letters, %v", n, err)
	}
	if err := g.Dispose(t.Context(), big, "h", consumer.Verdict{Action: consumer.ActRetry}, errFlaky); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("what the consumer does itself: %v", err)
	}
}

// A letter that no document can hold is written without what makes it so large.
func TestALetterLargerThanADocumentIsBare(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	large := failed(1, "A")
	large.Headers = append(large.Headers, event.Header{Key: "x", Value: make([]byte, 17<<20)})
	v := consumer.Verdict{Action: consumer.ActDeadLetter}
	if err := g.Dispose(t.Context(), large, "h", v, errFlaky); !errors.Is(err, consumer.ErrUnfit) {
		t.Fatalf("17 MiB of headers: %v", err)
	}
	v.Bare = true
	if err := g.Dispose(t.Context(), large, "h", v, errFlaky); err != nil {
		t.Fatal(err)
	}
	l, err := g.letters.Get(t.Context(), consumer.LetterID{Group: "g", Handler: "h", ID: "m1"})
	if err != nil || l.Offset != 1 || l.Headers != nil || l.Value != nil {
		t.Errorf("%+v, %v", l, err)
	}
}

// withBox is a disposer with a real outbox.
func withBox(t *testing.T, faults *consumer.Faults) *graveyard {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	g := newGraveyard(t, func(cfg *consumer.DisposerConfig) {
		cfg.Outbox, cfg.Faults = box, faults
		cfg.Transact = func(ctx context.Context, fn func(context.Context) error) error {
			return transaction.Run(ctx, db.Client(), fn)
		}
	})
	g.db = db
	return g
}

func (g *graveyard) envelopes(t *testing.T) []bson.Raw {
	t.Helper()
	cur, err := g.db.Collection("outbox").Find(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	var docs []bson.Raw
	if err := cur.All(t.Context(), &docs); err != nil {
		t.Fatal(err)
	}
	return docs
}

func TestFaultsTellOthersOnceAndNeverOfThemselves(t *testing.T) {
	t.Parallel()
	g := withBox(t, &consumer.Faults{Discarded: true, NotExpired: true, Body: true, Redact: func(f *consumer.Fault) bool {
		f.Body = []byte("redacted")
		return f.Type != "quiet"
	}})
	m := failed(1, "A")
	for range 2 { // again after a crash
		if err := g.Dispose(t.Context(), m, "h", dead(3, m, errFlaky), errFlaky); err != nil {
			t.Fatal(err)
		}
	}
	own, quiet, expired, parked, dup := failed(2, "fault.A"), failed(3, "quiet"), failed(4, "A"), failed(5, "A"), failed(6, "A")
	own.SetHeader("fault-of", []byte("x"))
	g.bury(t, "h", own, quiet)
	for _, c := range []struct {
		m     *consumer.Message
		v     consumer.Verdict
		cause error
	}{
		{expired, consumer.Verdict{Action: consumer.ActDeadLetter}, &consumer.ExpiredError{}},
		{parked, consumer.Verdict{Action: consumer.ActDeadLetter, Reason: consumer.ClassNoHandler}, &consumer.NoHandlerError{}},
		{dup, consumer.Verdict{Action: consumer.ActDiscard, Reason: consumer.ClassDuplicate}, errFlaky},
		{failed(7, "A"), consumer.Verdict{Action: consumer.ActDiscard}, errFlaky},
	} {
		if err := g.Dispose(t.Context(), c.m, "h", c.v, c.cause); err != nil {
			t.Fatal(err)
		}
	}
	docs := g.envelopes(t)
	if len(docs) != 2 {
		t.Fatalf("%d fault events: %v", len(docs), docs)
	}
	var view envelope.View
	if err := envelope.Parse(docs[0], &view); err != nil {
		t.Fatal(err)
	}
	var f consumer.Fault
	if err := json.Unmarshal(view.Payload, &f); err != nil {
		t.Fatal(err)
	}
	if string(view.Type) != "fault.A" || f.ID != "m1" || f.Handler != "h" || f.Class != consumer.ClassHandler || f.Attempts != 3 || f.Origin.Offset != 1 || string(f.Body) != "redacted" {
		t.Errorf("type %s, fault %+v", view.Type, f)
	}
}

func TestFaultsToATopic(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, func(cfg *consumer.DisposerConfig) { cfg.Faults = &consumer.Faults{Topic: "faults"} })
	g.bury(t, "h", failed(1, "A"))
	if len(g.out.list["faults"]) != 1 {
		t.Fatalf("published %v", g.out.list)
	}
	m := again(t, g.out.list["faults"][0], "faults")
	if m.Name != "fault.A" {
		t.Errorf("type %q", m.Name)
	}
	g.bury(t, "h", m) // a handler of faults that fails
	if len(g.out.list["faults"]) != 1 {
		t.Error("a fault of a fault")
	}
}
