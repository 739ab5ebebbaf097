package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/bodycrypt"
	"github.com/outrelay/outrelay/pkg/consumer/bodystore"
	"github.com/outrelay/outrelay/pkg/consumer/breaker"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// attempts is a handler's view of what came, by message.
type attempts struct {
	mu   sync.Mutex
	list map[string][]attempt
	more chan struct{}
}

type attempt struct {
	n     int
	at    time.Time
	topic string
}

func newAttempts() *attempts {
	return &attempts{list: map[string][]attempt{}, more: make(chan struct{}, 10_000)}
}

func (a *attempts) add(m *consumer.Message) []attempt {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list[m.ID] = append(a.list[m.ID], attempt{m.Attempt, time.Now(), m.Topic})
	a.more <- struct{}{}
	return a.list[m.ID]
}

func (a *attempts) of(id string) []attempt {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.list[id]
}

// listNumbered returns the attempts by number. The consumer repeats a first attempt in a batch alone, with the same number.
func (a *attempts) listNumbered(id string) []attempt {
	var out []attempt
	for _, x := range a.of(id) {
		if n := len(out); n > 0 && out[n-1].n == x.n {
			out[n-1] = x
			continue
		}
		out = append(out, x)
	}
	return out
}

// createRetryTopics creates the retry topics of the kit's topic and group.
func (k *kit) createRetryTopics(rungs int) {
	for n := range rungs {
		stacktest.CreateTopic(k, transport.RetryTopicName(k.topic, k.group, n+1), 2)
	}
}

func TestARetriedMessageWaitsInTopicsAndHasItsEffectOnce(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	k.createRetryTopics(2)
	c := k.newConsumer(consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}}), consumer.WithRetryTopics(300*time.Millisecond, 600*time.Millisecond))
	seen, effect := newAttempts(), k.insertInto("effects")

	other := k.insertInto("others")
	addHandlerAs(t, c, "h", "counted", func(ctx context.Context, m *consumer.Message) error {
		if seen.add(m); string(m.Key) == "key01" && m.Attempt < 3 {
			return fmt.Errorf("not yet: %w", errFlaky)
		}
		return effect(ctx, m)
	})
	addHandlerAs(t, c, "other", "*", other)

	k.publish(newMessages(4, 12)...)
	k.start(c)
	k.waitCount("effects", 12)
	k.waitCount("others", 12)
	// The retry topics of one handler do not affect another handler.
	k.checkOnce("others", 12)

	ids := map[string]bool{}
	for v := range 3 {
		id := "key01/counted/" + strconv.Itoa(v)
		ids[id] = true
		got := seen.listNumbered(id)
		if len(got) != 3 {
			t.Fatalf("%s: attempts %+v", id, seen.of(id))
		}
		for i, a := range got {
			topic := k.topic
			if i > 0 {
				topic = transport.RetryTopicName(k.topic, k.group, i)
			}
			if a.n != i+1 || a.topic != topic {
				t.Errorf("%s: attempt %d is number %d in %s", id, i+1, a.n, a.topic)
			}
		}
		if d := got[1].at.Sub(got[0].at); d < 290*time.Millisecond {
			t.Errorf("%s: the first retry after %v", id, d)
		}
		if d := got[2].at.Sub(got[1].at); d < 590*time.Millisecond {
			t.Errorf("%s: the second retry after %v", id, d)
		}
	}

	k.effectsOnce("effects", 12)
}

// effectsOnce checks that each message had its effect once, in any order.
func (k *kit) effectsOnce(name string, n int) {
	k.Helper()
	cur, err := k.db.Collection(name).Find(k.context(), bson.D{})
	if err != nil {
		k.Fatal(err)
	}

	var docs []struct{ ID string }
	if err := cur.All(k.context(), &docs); err != nil {
		k.Fatal(err)
	}

	seen := map[string]int{}
	for _, d := range docs {
		if seen[d.ID]++; seen[d.ID] > 1 {
			k.Errorf("%s had its effect twice", d.ID)
		}
	}

	if len(seen) != n {
		k.Errorf("%d of %d messages had their effect", len(seen), n)
	}
}

func TestMessagesWithoutAHandlerAreKeptAndComeBack(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	letters, err := deadletter.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	k.newCollection(deadletter.DefaultCollection)
	decode := func(ctx context.Context, m *consumer.Message) error {
		if bytes.HasPrefix(m.Value, []byte("poison")) {
			return errors.New("not a message")
		}
		return consumer.Decode(ctx, m)
	}
	c := k.newConsumer(consumer.WithDecoder(decode))
	var broken sync.Map
	broken.Store("h", true)
	effect := k.insertInto("effects")
	addHandlerAs(t, c, "h", "A", func(ctx context.Context, m *consumer.Message) error {
		if _, ok := broken.Load("h"); ok && string(m.Value) == "bad" {
			return errFlaky
		}
		return effect(ctx, m)
	}, consumer.WithRetry(consumer.NoRetry()))
	addHandlerAs(t, c, "other", "A", k.insertInto("others"))
	k.publish(newMessage("k", "A", "bad"), newMessage("k", "Z", "parked"), newMessage("k", "A", "poison"), newMessage("k", "A", "good"))
	k.start(c)
	k.waitCount("effects", 1)
	k.waitCount("others", 2)
	k.waitCount(deadletter.DefaultCollection, 3)
	var sum []deadletter.Summary
	k.waitUntil("three letters are committed by a majority", func(ctx context.Context) bool {
		sum, err = letters.Summary(ctx, deadletter.Query{Group: k.group})
		return err == nil && len(sum) == 3
	})
	classes := map[string]string{}
	for _, s := range sum {
		classes[s.Class] = s.Handler
	}
	if len(classes) != 3 || classes[deadletter.ClassHandler] != "h" || classes[deadletter.ClassMalformed] != "" || classes[deadletter.ClassUnknown] != "" {
		t.Fatalf("letters %+v", sum)
	}
	k.waitUntil("the offset passes behind the letters", func(context.Context) bool { return k.readCommitted(1)[0] == 4 })

	// The handler is repaired, another one is added: the waiting messages return, for the handlers
	// that they are for.
	broken.Delete("h")
	addHandlerAs(t, c, "z", "Z", effect)
	if n, err := letters.Requeue(k.context(), deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	r := deadletter.RequeueOptions{Handlers: []string{"z"}}
	// A requeue to the new handler is rejected until the consumer has recorded it.
	k.waitUntil("the letter without a handler is requeued", func(ctx context.Context) bool {
		n, err := letters.Requeue(ctx, deadletter.Query{Class: deadletter.ClassUnknown}, r)
		return n == 1 && err == nil
	})
	k.waitCount("effects", 3)
	k.waitUntil("both are handled", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 0 })
	k.effectsOnce("effects", 3)
	k.effectsOnce("others", 2)
}

// relayOutbox returns the record that the relay makes of the only event in the outbox, with the event's own id, type and headers.
func (k *kit) relayOutbox() *consumer.Message {
	k.Helper()
	raw, err := k.db.Collection("outbox").FindOne(k.context(), bson.D{}).Raw()
	if err != nil {
		k.Fatal(err)
	}
	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		k.Fatal(err)
	}

	m := &consumer.Message{Topic: string(v.Topic), Key: v.OrderingKey(), Value: v.Payload, Headers: []event.Header{
		{Key: "id", Value: v.AppendID(nil)}, {Key: "type", Value: v.Type},
	}}
	for it := v.Headers.Iter(); it.Next(); {
		m.Headers = append(m.Headers, event.Header{Key: string(it.Key), Value: it.Value})
	}
	return m
}

func TestALargeSecretReachesItsHandler(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	store, err := bodystore.NewGridFS(k.db)
	if err != nil {
		t.Fatal(err)
	}
	secrets, err := bodycrypt.Static(bodycrypt.Key{ID: "k1", Bytes: bytes.Repeat([]byte("k"), 32)})
	if err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(k.db, outbox.WithMiddleware(bodycrypt.Encrypt(secrets), bodystore.Produce(store, 1000)))
	if err != nil {
		t.Fatal(err)
	}

	k.newCollection("outbox")
	// A body of 2 MB is larger than a record may be.
	body := strings.Repeat("secret ", 300_000)
	secret := event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte(body)))
	if err := box.Transaction(k.context(), func(ctx context.Context) error { return box.Append(ctx, secret) }); err != nil {
		t.Fatal(err)
	}

	k.publish(k.relayOutbox())
	got := make(chan string, 100)
	c := k.newConsumer(consumer.WithMiddleware(bodystore.Consume(store), bodycrypt.Decrypt(secrets)), consumer.WithRetry(consumer.NoRetry()))
	addHandler(t, c, "A", func(_ context.Context, m *consumer.Message) error {
		got <- string(m.Value)
		// The dead letter must not contain the body in plain text.
		return errFlaky
	})

	k.newCollection(deadletter.DefaultCollection)
	k.start(c)
	k.waitCount(deadletter.DefaultCollection, 1)
	if b := <-got; b != body {
		t.Errorf("the handler got %d bytes", len(b))
	}

	raw, err := k.db.Collection(deadletter.DefaultCollection).FindOne(k.context(), bson.D{}).Raw()
	if err != nil || bytes.Contains(raw, []byte("secret")) {
		t.Errorf("the letter holds the body in plain, %v", err)
	}
}

func TestAnOpenBreakerHoldsMessagesBackAndLosesNone(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	opened := make(chan struct{}, 100)
	b := breaker.New("flaky", breaker.WithMinimum(2), breaker.WithOpenFor(200*time.Millisecond))
	var fixed sync.Map
	c := k.newConsumer(
		consumer.WithRetry(consumer.Retry{Quick: []time.Duration{10 * time.Millisecond}, Min: 10 * time.Millisecond, Max: 100 * time.Millisecond}),
		consumer.WithErrorHook(func(_ context.Context, err error) {
			if errors.Is(err, breaker.ErrOpen) {
				opened <- struct{}{}
			}
		}))
	effect := k.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if _, ok := fixed.Load("x"); !ok {
			return errFlaky
		}
		return effect(ctx, m)
	}, consumer.WithMiddleware(b.Middleware()))

	k.publish(newMessages(3, 9)...)
	k.start(c)
	k.waitFor("the breaker suspends the handler", opened)
	fixed.Store("x", true)
	k.waitCount("effects", 9)
	k.checkOnce("effects", 9)
}

func TestAnExpiredMessageMeetsItsRetry(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.newCollection(deadletter.DefaultCollection)
	c := k.newConsumer()
	addHandlerAs(t, c, "keeps", "A", k.insertInto("dead"))
	addHandlerAs(t, c, "drops", "A", k.insertInto("dropped"), consumer.WithRetryFor(func(err error) bool { return errors.As(err, new(*consumer.ExpiredError)) }, consumer.Retry{MaxAttempts: 1, Then: consumer.ThenDiscard}))

	late := newMessage("k", "A", "late")
	late.Headers = append(late.Headers, event.Header{Key: record.HeaderDeliverBy, Value: []byte("2020-01-01T00:00:00Z")})
	k.publish(late, newMessage("k", "A", "fresh"))

	k.start(c)
	k.waitCount("dead", 1)
	k.waitCount("dropped", 1)
	k.waitCount(deadletter.DefaultCollection, 1)
	k.effectsOnce("dead", 1)
	k.effectsOnce("dropped", 1)
	if n := k.countDocuments(deadletter.DefaultCollection); n != 1 {
		t.Errorf("%d letters", n)
	}
}

// The relay sends the message again after its deadline, or Kafka delivers it again.
func TestAMessageThatWasHandledBeforeItsDeadlineDoesNotExpire(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.newCollection(deadletter.DefaultCollection)
	stats := &counts{}
	c := k.newConsumer(consumer.WithTelemetry(stats))
	addHandler(t, c, "A", k.insertInto("effects"))
	k.publish(newMessage("k", "A", "x"))
	k.start(c)
	k.waitCount("effects", 1)

	late := newMessage("k", "A", "x")
	late.Headers = append(late.Headers, event.Header{Key: record.HeaderDeliverBy, Value: []byte("2020-01-01T00:00:00Z")})
	k.publish(late)
	k.waitUntil("its offset", func(context.Context) bool { return sumOffsets(k.readCommitted(1)) == 2 })
	if letters, duplicates := k.countDocuments(deadletter.DefaultCollection), stats.duplicates.Load(); letters != 0 || duplicates != 1 {
		t.Errorf("got %d letters and %d duplicates, want a duplicate alone", letters, duplicates)
	}
	k.effectsOnce("effects", 1)
}

func TestARetryOfAHandlerThatIsNoMoreIsKept(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)

	letters, err := deadletter.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	c := k.newConsumer()
	addHandlerAs(t, c, "new", "A", k.insertInto("effects"))

	old, foreign := newMessage("k", "A", "1"), newMessage("k", "A", "2")
	old.SetHeader(record.HeaderOnly, []byte(k.group+"/old"))
	foreign.SetHeader(record.HeaderOnly, []byte("another/new"))
	k.publish(old, foreign, newMessage("k", "A", "3"))

	k.start(c)
	k.waitCount("effects", 1)
	k.effectsOnce("effects", 1)
	k.waitUntil("a letter for the old name", func(ctx context.Context) bool {
		for l, err := range letters.List(ctx, deadletter.Query{Handler: "old", Messages: []string{"k/A/1"}}) {
			return err == nil && l.Class == deadletter.ClassUnknown
		}
		return false
	})

	if n := k.countDocuments(deadletter.DefaultCollection); n != 1 {
		t.Errorf("%d letters", n)
	}
}

// A policy with fewer retry topics than the previous policy also handles the messages in the topics
// that it no longer uses.
func TestMessagesInRetryTopicsOfAnEarlierPolicyAreHandled(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	rungs := []string{transport.RetryTopicName(k.topic, k.group, 1), transport.RetryTopicName(k.topic, k.group, 2), transport.RetryTopicName(k.topic, "another", 2)}
	for i, topic := range rungs {
		stacktest.CreateTopic(t, topic, 1)
		m := newMessage(fmt.Sprint("k", i), "A", "0")
		m.SetHeader(record.HeaderOnly, []byte(k.group+"/a"))
		m.SetHeader(record.HeaderAttempt, []byte("2"))
		if err := k.kafka.Publish(k.context(), topic, newRecords(m)); err != nil {
			t.Fatal(err)
		}
	}

	c := k.newConsumer(consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}}), consumer.WithRetryTopics(time.Second))
	addHandlerAs(t, c, "a", "A", k.insertInto("effects"))
	k.start(c)
	k.waitCount("effects", 2)
	k.checkOnce("effects", 2)
}

func TestMissingTopicsAreCreatedOnDemand(t *testing.T) {
	t.Parallel()
	k := newKit(t, 3)
	retries := transport.RetryTopicName(k.topic, k.group, 1)
	graves := k.topic + "." + k.group + ".dead"

	k.deleteAtEnd(retries, graves)
	cl, done := k.newClient()
	defer done()

	// This is the longest time until the consumer finds a new topic.
	k.cfg.WatchPartitions = 100 * time.Millisecond
	c := k.newConsumer(consumer.WithDeadLetters(deadletter.WithTopic("")),
		consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}}), consumer.WithRetryTopics(100*time.Millisecond))
	seen := newAttempts()
	addHandlerAs(t, c, "h", "A", func(_ context.Context, m *consumer.Message) error { seen.add(m); return errFlaky })

	k.publish(newMessage("k", "A", "1"))
	k.start(c)
	k.waitUntil("it died behind the ladder", func(ctx context.Context) bool {
		n, err := k.db.Collection(deadletter.DefaultCollection).CountDocuments(ctx, bson.D{})
		return err == nil && n == 1
	})

	if got := seen.listNumbered("k/A/1"); len(got) != 2 || got[1].topic != retries {
		t.Errorf("attempts %+v", got)
	}

	md, err := cl.Metadata(k.context(), &kafka.MetadataRequest{Topics: []string{retries, graves}})
	if err != nil {
		t.Fatal(err)
	}
	for _, topic := range md.Topics {
		if topic.Error != nil || len(topic.Partitions) != 3 {
			t.Errorf("topic %s: %d partitions, %v", topic.Name, len(topic.Partitions), topic.Error)
		}
	}
}

// forgetful disposes of each message, and reports a failure once, as after a crash between the two.
type forgetful struct {
	consumer.Disposer
	mu     sync.Mutex
	failed map[string]bool
}

func (f *forgetful) Dispose(ctx context.Context, m *consumer.Message, handler string, v consumer.Verdict, cause error) (*consumer.GivenUp, error) {
	givenUp, err := f.Disposer.Dispose(ctx, m, handler, v, cause)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if id := fmt.Sprint(m.ID, m.Attempt); !f.failed[id] {
		f.failed[id] = true
		return nil, errors.New("forgotten")
	}
	return givenUp, nil
}

func TestMessagesMovedTwiceHaveTheirEffectOnce(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	k.createRetryTopics(1)

	letters, err := deadletter.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	d := consumer.NewDisposer(letters, k.kafka, k.logError)
	c := k.newConsumer(consumer.WithDisposer(&forgetful{Disposer: d, failed: map[string]bool{}}),
		consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}}), consumer.WithRetryTopics(100*time.Millisecond))

	effect := k.insertInto("effects")
	addHandlerAs(t, c, "h", "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Key) == "key00" && m.Attempt == 1 || string(m.Key) == "key01" {
			return errFlaky
		}
		return effect(ctx, m)
	})

	k.publish(newMessages(3, 9)...)
	k.start(c)
	k.waitCount("effects", 6)
	k.waitUntil("three letters", func(ctx context.Context) bool {
		n, err := letters.Count(ctx, deadletter.Query{Handler: "h"})
		return err == nil && n == 3
	})

	cl, done := k.newClient()
	defer done()
	retries := transport.RetryTopicName(k.topic, k.group, 1)
	// There are three messages of two keys, each twice.
	k.waitUntil("all copies are committed", func(ctx context.Context) bool {
		res, err := cl.OffsetFetch(ctx, &kafka.OffsetFetchRequest{GroupID: k.group, Topics: map[string][]int{retries: {0, 1}}})
		if err != nil || res.Error != nil {
			return false
		}
		var sum int64
		for _, p := range res.Topics[retries] {
			sum += max(p.CommittedOffset, 0)
		}
		return sum == 12
	})

	k.effectsOnce("effects", 6)
	if n, err := letters.Count(k.context(), deadletter.Query{}); n != 3 || err != nil {
		t.Errorf("%d letters, %v", n, err)
	}
}

func TestTheDedupKeyIsTheIdentity(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandlerAs(t, c, "h", "A", k.insertInto("effects"))

	keyed := func(value, dedup string) *consumer.Message {
		m := newMessage("k", "A", value)
		m.Headers = append(m.Headers, event.Header{Key: consumer.HeaderDedupKey, Value: []byte(dedup)})
		return m
	}

	k.publish(keyed("1", "same"), keyed("2", "same"), keyed("3", "other"), newMessage("k", "A", "4"))
	k.start(c)
	k.waitUntil("all is committed", func(context.Context) bool { return k.readCommitted(1)[0] == 4 })
	k.effectsOnce("effects", 3)

	n, err := k.db.Collection("effects").CountDocuments(k.context(), bson.D{{Key: "value", Value: "2"}})
	if err != nil || n != 0 {
		t.Errorf("the second of one key had an effect: %d, %v", n, err)
	}
}

func TestAChangedTypeLeadsToOtherHandlers(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)

	var j journal
	c := k.newConsumer(consumer.WithDecoder(func(ctx context.Context, m *consumer.Message) error {
		if err := consumer.Decode(ctx, m); err != nil {
			return err
		}
		j.add("saw " + m.Name)
		if m.Name == "old" {
			m.Name = "new"
		}
		return nil
	}))
	addHandlerAs(t, c, "a", "new", k.insertInto("effects"))
	addHandlerAs(t, c, "b", "*w", k.insertInto("others"))

	k.publish(newMessage("k", "noise", "0"), newMessage("k", "old", "1"), newMessage("k", "unknown", "2"), newMessage("k", "new", "3"))
	k.start(c)
	k.waitUntil("all is committed", func(context.Context) bool { return k.readCommitted(1)[0] == 4 })
	k.effectsOnce("effects", 2)
	k.effectsOnce("others", 2)

	if got, want := j.String(), "saw noise saw old saw unknown saw new"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
