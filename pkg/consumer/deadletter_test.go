package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// graveyard is a database with dead letters, and a disposer that writes to them.
type graveyard struct {
	db      *mongo.Database
	letters *consumer.DeadLetters
	out     *published
	*consumer.MessageDisposer
}

func newGraveyard(t *testing.T, change func(*consumer.DisposerConfig), opts ...consumer.LettersOption) *graveyard {
	t.Helper()
	g := &graveyard{db: stacktest.Database(t, stacktest.Client(t)), out: &published{}}
	var err error
	if g.letters, err = consumer.NewDeadLetters(g.db, opts...); err != nil {
		t.Fatal(err)
	}
	cfg := consumer.DisposerConfig{Publisher: g.out, Letters: g.letters}
	if change != nil {
		change(&cfg)
	}
	if g.MessageDisposer, err = consumer.NewDisposer(cfg); err != nil {
		t.Fatal(err)
	}
	return g
}

// failed is message n of a type, as a handler gets it.
func failed(n int, typ string) *consumer.Message {
	return &consumer.Message{
		Topic: "orders", Partition: 2, Offset: int64(n), Time: time.UnixMilli(1_700_000_000_000), Key: []byte{0, byte(n)}, Value: []byte{255, byte(n)},
		ID: fmt.Sprint("m", n), Name: typ, Aggregate: event.Aggregate{Type: "order", ID: "7"}, ContentType: "x/y", SchemaVersion: "2", Attempt: 1, Group: "g",
		Headers: []event.Header{{Key: "id", Value: fmt.Append(nil, "m", n)}, {Key: "type", Value: []byte(typ)}, {Key: "bin", Value: []byte{0, 1}}, {Key: "null"}},
	}
}

// dead is the verdict of a message that failed n times.
func dead(n int, m *consumer.Message, err error) consumer.Verdict {
	var a consumer.Failures
	for i := range n {
		a = a.Note(err, m, time.UnixMilli(int64(1000*(i+1))).UTC())
	}
	return consumer.Verdict{Action: consumer.ActDeadLetter, Attempts: a}
}

func (g *graveyard) bury(t *testing.T, handler string, ms ...*consumer.Message) {
	t.Helper()
	for _, m := range ms {
		if err := g.Dispose(t.Context(), m, handler, dead(1, m, errFlaky), errFlaky); err != nil {
			t.Fatal(err)
		}
	}
}

func TestALetterHasTheWholeRecordAndWhy(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil, consumer.LettersNode("n1"))
	m := failed(1, "A")
	if err := g.Dispose(t.Context(), m, "h", dead(3, m, errFlaky), fmt.Errorf("billing: %w", errFlaky)); err != nil {
		t.Fatal(err)
	}
	id := consumer.LetterID{Group: "g", Handler: "h", ID: "m1"}
	l, err := g.letters.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	got := l.Message()
	got.LeaderEpoch, got.Time = m.LeaderEpoch, m.Time
	if diff := cmp.Diff(m, got); diff != "" {
		t.Error(diff)
	}
	if l.Class != consumer.ClassHandler || l.Reason != "billing: flaky" || l.Attempts != 3 || l.Source != (consumer.LetterSource{Kind: "handler", Node: "n1"}) || l.Size != 2 {
		t.Errorf("letter %+v", l)
	}
	if len(l.History) != 3 || l.History[2].Attempt != 3 || !l.FirstFailure.Equal(time.UnixMilli(1000)) || !l.LastFailure.Equal(time.UnixMilli(3000)) || l.MovedAt.IsZero() {
		t.Errorf("history %+v, first %v, last %v, moved %v", l.History, l.FirstFailure, l.LastFailure, l.MovedAt)
	}

	// Once more, as after a crash: the letter stays as it was.
	if err := g.Dispose(t.Context(), m, "h", dead(1, m, errFlaky), errors.New("another reason")); err != nil {
		t.Fatal(err)
	}
	again, err := g.letters.Get(t.Context(), id)
	if diff := cmp.Diff(l, again); err != nil || diff != "" {
		t.Error(err, diff)
	}
	if n, err := g.letters.Count(t.Context(), consumer.LetterQuery{}); n != 1 || err != nil {
		t.Errorf("%d letters, %v", n, err)
	}
	if _, err := g.letters.Get(t.Context(), consumer.LetterID{ID: "none"}); !errors.Is(err, consumer.ErrNoLetter) {
		t.Error(err)
	}
}

func TestATombstoneAndALargeBodyAreKept(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	tombstone, large := failed(1, "A"), failed(2, "A")
	tombstone.Value, large.Value = nil, bytes.Repeat([]byte("0123456789abcdef"), 13<<16) // 13 MiB
	g.bury(t, "h", tombstone, large)
	if l, err := g.letters.Get(t.Context(), consumer.LetterID{Group: "g", Handler: "h", ID: "m1"}); err != nil || l.Value != nil {
		t.Errorf("tombstone: %d bytes, %v", len(l.Value), err)
	}
	l, err := g.letters.Get(t.Context(), consumer.LetterID{Group: "g", Handler: "h", ID: "m2"})
	if err != nil || !bytes.Equal(l.Value, large.Value) {
		t.Errorf("large: %v", err)
	}
	if n, err := g.letters.Count(t.Context(), consumer.LetterQuery{}); n != 2 || err != nil {
		t.Errorf("%d letters, %v", n, err)
	}
	if n, err := g.letters.Discard(t.Context(), consumer.LetterQuery{All: true}); n != 2 || err != nil {
		t.Errorf("discarded %d, %v", n, err)
	}
	if n, err := g.db.Collection(consumer.DefaultLetters).CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("%d documents left, %v", n, err)
	}
}

// Another time of expiry takes the place of the one before.
func TestTheExpiryOfLettersCanBeChanged(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	for _, after := range []time.Duration{time.Hour, 2 * time.Hour, time.Minute} {
		d, err := consumer.NewDeadLetters(db, consumer.LettersExpire(after))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.EnsureIndexes(t.Context()); err != nil {
			t.Fatal(err)
		}
		specs, err := db.Collection(consumer.DefaultLetters).Indexes().ListSpecifications(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(specs, func(s mongo.IndexSpecification) bool { return s.Name == "expiry" })
		if i < 0 || specs[i].ExpireAfterSeconds == nil || time.Duration(*specs[i].ExpireAfterSeconds)*time.Second != after {
			t.Errorf("%s: %+v", after, specs)
		}
	}
}

func TestTheDeadTopicIsWrittenFirst(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, func(cfg *consumer.DisposerConfig) { cfg.DeadTopic = consumer.DeadTopicName })
	m := failed(1, "A")
	g.out.fail = errFlaky
	if err := g.Dispose(t.Context(), m, "h", dead(2, m, errFlaky), errFlaky); !errors.Is(err, errFlaky) {
		t.Fatalf("the topic is away: %v", err)
	}
	if n, _ := g.letters.Count(t.Context(), consumer.LetterQuery{}); n != 0 {
		t.Fatal("a letter before the topic was written")
	}
	g.out.fail = nil
	if err := g.Dispose(t.Context(), m, "h", dead(2, m, errFlaky), errFlaky); err != nil {
		t.Fatal(err)
	}
	rec := g.out.list["orders.g.dead"][0]
	if !bytes.Equal(rec.Value, m.Value) || !bytes.Equal(rec.Key, m.Key) {
		t.Error("the record's bytes changed")
	}
	for name, want := range map[string]string{
		consumer.HeaderDeadClass: "handler", consumer.HeaderDeadReason: "flaky", consumer.HeaderDeadGroup: "g", consumer.HeaderDeadHandler: "h",
		consumer.HeaderDeadAttempts: "2", consumer.HeaderRetryOrigin: "orders/2/1", consumer.HeaderDeadAt: "2000", "bin": "\x00\x01",
	} {
		if v, ok := rec.Header(name); !ok || string(v) != want {
			t.Errorf("header %s is %q, want %q", name, v, want)
		}
	}
	if n, _ := g.letters.Count(t.Context(), consumer.LetterQuery{}); n != 1 {
		t.Error("no letter beside the record")
	}
}

func TestLettersAreRedactedBeforeTheyAreWritten(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, func(cfg *consumer.DisposerConfig) {
		cfg.DeadTopic = consumer.DeadTopicName
		cfg.Redact = []consumer.Redactor{
			func(_ context.Context, l *consumer.Letter) error {
				l.Value, l.Reason = []byte("redacted"), "redacted"
				l.Headers = slices.DeleteFunc(l.Headers, func(h consumer.LetterHeader) bool { return h.Key == "bin" })
				return nil
			},
			func(_ context.Context, l *consumer.Letter) error {
				switch l.Type {
				case "none":
					return consumer.Discard(nil)
				case "bad":
					return errFlaky
				}
				return nil
			},
		}
	})
	g.bury(t, "h", failed(1, "A"), failed(2, "none"))
	page, err := g.letters.List(t.Context(), consumer.LetterQuery{}, "", 0)
	if err != nil || len(page.Letters) != 1 || len(g.out.list["orders.g.dead"]) != 1 {
		t.Fatalf("%d letters, %d records, %v", len(page.Letters), len(g.out.list["orders.g.dead"]), err)
	}
	l, rec := page.Letters[0], g.out.list["orders.g.dead"][0]
	_, bin := rec.Header("bin")
	if string(l.Value) != "redacted" || l.Reason != "redacted" || string(rec.Value) != "redacted" || bin {
		t.Errorf("letter %q %q, record %q", l.Value, l.Reason, rec.Value)
	}
	m := failed(3, "bad")
	if err := g.Dispose(t.Context(), m, "h", dead(1, m, errFlaky), errFlaky); !errors.Is(err, errFlaky) {
		t.Errorf("a redactor that fails: %v", err)
	}
}

func TestLettersAreFoundByWhatTheyAre(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil, consumer.LettersExpire(time.Hour))
	if err := g.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	g.bury(t, "h1", failed(1, "A"), failed(2, "B"), failed(3, "A"))
	g.bury(t, "h2", failed(1, "A"))
	park := failed(4, "Z")
	if err := g.Dispose(t.Context(), park, "", consumer.Verdict{Action: consumer.ActDeadLetter, Reason: consumer.ClassNoHandler}, &consumer.NoHandlerError{Type: "Z"}); err != nil {
		t.Fatal(err)
	}
	yes, no := true, false
	for name, c := range map[string]struct {
		q    consumer.LetterQuery
		want int64
	}{
		"all": {consumer.LetterQuery{}, 5}, "handler": {consumer.LetterQuery{Handler: "h1"}, 3}, "group": {consumer.LetterQuery{Group: "other"}, 0},
		"type": {consumer.LetterQuery{Type: "A"}, 3}, "class": {consumer.LetterQuery{Class: consumer.ClassNoHandler}, 1}, "topic": {consumer.LetterQuery{Topic: "orders"}, 5},
		"key": {consumer.LetterQuery{Key: []byte{0, 1}}, 2}, "reason": {consumer.LetterQuery{Reason: "fla"}, 4}, "a pattern is text": {consumer.LetterQuery{Reason: "f.a"}, 0},
		"message": {consumer.LetterQuery{Messages: []string{"m1"}}, 2}, "id": {consumer.LetterQuery{IDs: []consumer.LetterID{{Group: "g", Handler: "h2", ID: "m1"}}}, 1},
		"from": {consumer.LetterQuery{From: time.Now().Add(time.Hour)}, 0}, "to": {consumer.LetterQuery{To: time.Now().Add(time.Hour)}, 5},
		"both": {consumer.LetterQuery{Handler: "h1", Type: "B"}, 1}, "requeued": {consumer.LetterQuery{Replayed: &yes}, 0}, "not requeued": {consumer.LetterQuery{Replayed: &no}, 5},
	} {
		if n, err := g.letters.Count(t.Context(), c.q); n != c.want || err != nil {
			t.Errorf("%s: %d, %v; want %d", name, n, err, c.want)
		}
	}
	sum, err := g.letters.Summarize(t.Context(), consumer.LetterQuery{})
	if err != nil || len(sum) != 4 || sum[0].Handler != "h1" || sum[0].Type != "A" || sum[0].Count != 2 || sum[0].Replayed != 0 {
		t.Errorf("summary %+v, %v", sum, err)
	}
	seen := map[consumer.LetterID]bool{}
	for after, pages := "", 0; ; pages++ {
		page, err := g.letters.List(t.Context(), consumer.LetterQuery{}, after, 2)
		if err != nil || pages > 3 {
			t.Fatalf("page %d: %v", pages, err)
		}
		for _, l := range page.Letters {
			seen[l.ID] = true
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if len(seen) != 5 {
		t.Errorf("pages have %d letters", len(seen))
	}
	if _, err := g.letters.List(t.Context(), consumer.LetterQuery{}, "nonsense", 0); !errors.Is(err, consumer.ErrMalformed) {
		t.Errorf("a place that is none: %v", err)
	}
}

func TestEmptyQueriesActOnNothing(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	g.bury(t, "h", failed(1, "A"), failed(2, "B"))
	no := false
	for _, q := range []consumer.LetterQuery{{}, {Replayed: &no}} {
		if n, err := g.letters.Discard(t.Context(), q); n != 0 || !errors.Is(err, consumer.ErrEmptyQuery) {
			t.Errorf("discarded %d, %v", n, err)
		}
		if n, err := g.letters.Requeue(t.Context(), q, consumer.Replay{Publisher: g.out}); n != 0 || !errors.Is(err, consumer.ErrEmptyQuery) {
			t.Errorf("requeued %d, %v", n, err)
		}
	}
	if n, err := g.letters.Discard(t.Context(), consumer.LetterQuery{Type: "A"}); n != 1 || err != nil {
		t.Errorf("discarded %d, %v", n, err)
	}
	if n, err := g.letters.Discard(t.Context(), consumer.LetterQuery{All: true}); n != 1 || err != nil {
		t.Errorf("discarded %d, %v", n, err)
	}
	if _, err := g.letters.Requeue(t.Context(), consumer.LetterQuery{All: true}, consumer.Replay{}); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without a publisher: %v", err)
	}
}

func TestALetterIsRequeuedForItsHandlerAlone(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	m := failed(1, "A")
	m.Delivery = 2
	g.bury(t, "h", m, failed(2, "B"))
	r := consumer.Replay{Publisher: g.out, Actor: "ann", Note: "fixed", Edit: func(m *consumer.Message) error { m.Value = []byte("edited"); return nil }}
	g.out.fail = errFlaky
	if n, err := g.letters.Requeue(t.Context(), consumer.LetterQuery{Type: "A"}, r); n != 0 || !errors.Is(err, errFlaky) {
		t.Fatalf("the topic is away: %d, %v", n, err)
	}
	g.out.fail = nil
	if n, err := g.letters.Requeue(t.Context(), consumer.LetterQuery{Type: "A"}, r); n != 1 || err != nil {
		t.Fatalf("requeued %d, %v", n, err)
	}
	got := g.out.list["orders"][0]
	only, _ := got.Header(consumer.HeaderOnly)
	delivery, _ := got.Header(consumer.HeaderDelivery)
	if string(only) != "g/h" || string(delivery) != "3" || string(got.Value) != "edited" || !bytes.Equal(got.Key, m.Key) {
		t.Errorf("only %q, delivery %q, value %q", only, delivery, got.Value)
	}
	l, err := g.letters.Get(t.Context(), consumer.LetterID{Group: "g", Handler: "h", ID: "m1", Delivery: 2})
	if err != nil || l.Replayed == nil || l.Replayed.Actor != "ann" || l.Replayed.Note != "fixed" || l.Replayed.Topic != "orders" || l.Replayed.Delivery != 3 || l.Replayed.At.IsZero() || !bytes.Equal(l.Value, m.Value) {
		t.Errorf("letter %+v, %v", l, err)
	}
	if n, err := g.letters.Requeue(t.Context(), consumer.LetterQuery{Type: "A"}, r); n != 0 || err != nil {
		t.Errorf("requeued again: %d, %v", n, err)
	}
	// It dies again: a letter of its own.
	m.Delivery = 3
	g.bury(t, "h", m)
	if n, _ := g.letters.Count(t.Context(), consumer.LetterQuery{Messages: []string{"m1"}}); n != 2 {
		t.Errorf("%d letters of the message", n)
	}
}

func TestTwoWhoRequeueAtOnceShareNothing(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	const letters = 30
	for n := range letters {
		g.bury(t, "h", failed(n, "A"))
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var total int64
	for range 3 {
		wg.Go(func() {
			n, err := g.letters.Requeue(t.Context(), consumer.LetterQuery{All: true}, consumer.Replay{Publisher: g.out})
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			total += n
		})
	}
	wg.Wait()
	if total != letters || len(g.out.list["orders"]) != letters {
		t.Errorf("requeued %d, published %d of %d", total, len(g.out.list["orders"]), letters)
	}
}

func TestParkedOnesComeBackWhenThereIsAHandler(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	for n, typ := range []string{"A", "B", "A"} {
		m := failed(n, typ)
		if err := g.Dispose(t.Context(), m, "", consumer.Verdict{Action: consumer.ActDeadLetter, Reason: consumer.ClassNoHandler}, &consumer.NoHandlerError{Type: typ}); err != nil {
			t.Fatal(err)
		}
	}
	g.bury(t, "h", failed(7, "A"))
	takes := func(m *consumer.Message) bool { return m.Name == "A" }
	n, err := g.letters.Unpark(t.Context(), "g", consumer.Replay{Publisher: g.out}, takes)
	if n != 2 || err != nil || len(g.out.list["orders"]) != 2 {
		t.Fatalf("unparked %d, published %d, %v", n, len(g.out.list["orders"]), err)
	}
	if only, _ := g.out.list["orders"][0].Header(consumer.HeaderOnly); string(only) != "g/" {
		t.Errorf("for %q", only)
	}
	if n, err := g.letters.Unpark(t.Context(), "g", consumer.Replay{Publisher: g.out}, takes); n != 0 || err != nil {
		t.Errorf("again: %d, %v", n, err)
	}
}

func TestAnExpiredLetterComesBackWithoutItsDeadline(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, nil)
	m := failed(1, "A")
	m.SetHeader(consumer.HeaderDeliverBy, []byte("2020-01-01T00:00:00Z"))
	err := consumer.Precheck(m, time.Now())
	v := consumer.Verdict{Action: consumer.ActDeadLetter, Attempts: consumer.Failures{Failed: 1, Total: 1}}
	if err := g.Dispose(t.Context(), m, "h", v, err); err != nil {
		t.Fatal(err)
	}
	if n, err := g.letters.Requeue(t.Context(), consumer.LetterQuery{Class: consumer.ClassExpired}, consumer.Replay{Publisher: g.out}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if err := consumer.Precheck(g.out.list["orders"][0], time.Now()); err != nil {
		t.Error(err)
	}
}

func TestABrokenGraveyardIsRefused(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	for name, f := range map[string]func() error{
		"no database": func() error { _, err := consumer.NewDeadLetters(nil); return err },
		"no name":     func() error { _, err := consumer.NewDeadLetters(db, consumer.LettersCollection("")); return err },
		"expiry": func() error {
			_, err := consumer.NewDeadLetters(db, consumer.LettersExpire(time.Millisecond))
			return err
		},
		"nowhere": func() error { _, err := consumer.NewDisposer(consumer.DisposerConfig{}); return err },
		"no publisher": func() error {
			_, err := consumer.NewDisposer(consumer.DisposerConfig{DeadTopic: consumer.DeadTopicName})
			return err
		},
		"no transaction": func() error {
			_, err := consumer.NewDisposer(consumer.DisposerConfig{DeadTopic: consumer.DeadTopicName, Publisher: &published{}, Outbox: &outbox.Box{}})
			return err
		},
		"no outbox": func() error {
			_, err := consumer.NewDisposer(consumer.DisposerConfig{DeadTopic: consumer.DeadTopicName, Publisher: &published{}, Faults: &consumer.Faults{}})
			return err
		},
	} {
		if err := f(); err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
