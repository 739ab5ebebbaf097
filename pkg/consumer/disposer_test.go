package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// graveyard is a database with dead letters, and a disposer that writes to them.
type graveyard struct {
	consumer.Disposer
	db      *mongo.Database
	letters *deadletter.Desk
	out     *published
}

func newGraveyard(t *testing.T, opts ...deadletter.Option) *graveyard {
	t.Helper()
	g := &graveyard{db: stacktest.Database(t, stacktest.Client(t)), out: &published{}}
	var err error
	if g.letters, err = deadletter.New(g.db, opts...); err != nil {
		t.Fatal(err)
	}
	g.Disposer = consumer.NewDisposer(g.letters, g.out, func(err error) { t.Log(err) })
	return g
}

// newFailed returns message n of a type, as a handler receives it.
func newFailed(n int, typ string) *consumer.Message {
	return &consumer.Message{
		Topic: "orders", Partition: 2, Offset: int64(n), Time: time.UnixMilli(1_700_000_000_000).UTC(), Key: []byte{0, byte(n)}, Value: []byte{255, byte(n)},
		ID: fmt.Sprint("m", n), Name: typ, Aggregate: event.Aggregate{Type: "order", ID: "7"}, ContentType: "x/y", SchemaVersion: "2", Attempt: 1, Group: "g",
		Headers: []event.Header{{Key: "id", Value: fmt.Append(nil, "m", n)}, {Key: "type", Value: []byte(typ)}, {Key: "bin", Value: []byte{0, 1}}, {Key: "null"}},
	}
}

// newVerdict returns the verdict about a message that failed n times.
func newVerdict(n int, m *consumer.Message, err error) consumer.Verdict {
	var a consumer.Failures
	for i := range n {
		a = a.Note(err, m, time.UnixMilli(int64(1000*(i+1))).UTC())
	}
	return consumer.Verdict{Action: consumer.ActDeadLetter, Attempts: a}
}

// countLetters returns the number of letters.
func (g *graveyard) countLetters(t *testing.T) int64 {
	t.Helper()
	n, err := g.letters.Count(t.Context(), deadletter.Query{})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// letterID returns the id of the letter of m.
func letterID(m *consumer.Message, handler string) deadletter.ID {
	return deadletter.ID{
		Group: "g", Handler: handler, Topic: m.Topic, Partition: m.Partition, Offset: m.Offset,
		Source: m.Source, Message: m.ID, Delivery: m.Delivery,
	}
}

func TestALetterHasTheWholeRecordAndWhy(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t)
	m := newFailed(1, "A")
	if _, err := g.Dispose(t.Context(), m, "h", newVerdict(3, m, errFlaky), fmt.Errorf("billing: %w", errFlaky)); err != nil {
		t.Fatal(err)
	}
	got, err := g.letters.Get(t.Context(), letterID(m, "h"))
	if err != nil {
		t.Fatal(err)
	}

	want := deadletter.Letter{
		ID: got.ID, Class: deadletter.ClassHandler, Reason: "billing: flaky", GivenUpAt: got.GivenUpAt,
		Name: m.Name, Aggregate: m.Aggregate, ContentType: m.ContentType, SchemaVersion: m.SchemaVersion,
		Time: m.Time,
		Key:  m.Key, Value: m.Value, Headers: m.Headers, Size: 2, Attempts: 3,
	}
	for i := range 3 {
		want.History = append(want.History, deadletter.Failure{
			At: time.UnixMilli(int64(1000 * (i + 1))).UTC(), Attempt: i + 1, Class: deadletter.ClassHandler, Reason: "flaky",
		})
	}
	if diff := cmp.Diff(want, got); diff != "" || got.GivenUpAt.IsZero() {
		t.Errorf("given up at %v; difference: %s", got.GivenUpAt, diff)
	}
}

// Most presets write no aggregate. A handler then gets the key as the id of the aggregate, and the letter has the key only once.
func TestALetterHasTheAggregateOfItsRecord(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t)
	for preset, want := range map[string]event.Aggregate{
		routing.Typed: {}, routing.Debezium: {}, routing.CloudEvents: {}, routing.Plain: {Type: "order", ID: "o-1"},
	} {
		m := relayEvent(t, routing.PresetConfig{Name: preset}, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("", []byte("x"))), routing.Meta{})
		if err := consumer.Decode(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		m.Group = "g"
		if m.Aggregate.ID != "o-1" {
			t.Errorf("%s: the handler gets the aggregate %+v", preset, m.Aggregate)
		}

		if _, err := g.Dispose(t.Context(), m, "h", newVerdict(1, m, errFlaky), errFlaky); err != nil {
			t.Fatal(err)
		}
		letter, err := g.letters.Get(t.Context(), letterID(m, "h"))
		if err != nil {
			t.Fatal(err)
		}
		if letter.Aggregate != want || string(letter.Key) != "o-1" {
			t.Errorf("%s: the letter has the aggregate %+v and the key %q, want %+v", preset, letter.Aggregate, letter.Key, want)
		}
	}
}

func TestTheDeadTopicIsWrittenFirst(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, deadletter.WithTopic(""))
	m := newFailed(1, "A")
	g.out.fail = errFlaky
	if _, err := g.Dispose(t.Context(), m, "h", newVerdict(2, m, errFlaky), errFlaky); !errors.Is(err, errFlaky) {
		t.Fatalf("the topic is away: %v", err)
	}
	if n := g.countLetters(t); n != 0 {
		t.Fatal("a letter before the topic was written")
	}

	// A topic that can never take the record does not hold the letter up.
	g.out.fail = kafka.MessageSizeTooLarge
	if _, err := g.Dispose(t.Context(), newFailed(2, "A"), "h", newVerdict(2, m, errFlaky), errFlaky); err != nil {
		t.Fatal(err)
	}

	g.out.fail = nil
	if _, err := g.Dispose(t.Context(), m, "h", newVerdict(2, m, errFlaky), errFlaky); err != nil {
		t.Fatal(err)
	}
	rec := g.out.list["orders.g.dead"][0]
	if !bytes.Equal(rec.Value, m.Value) || !bytes.Equal(rec.Key, m.Key) {
		t.Error("the record's bytes changed")
	}
	for name, want := range map[string]string{
		"dead-class": "handler", "dead-reason": "flaky", "dead-group": "g", "dead-handler": "h",
		"dead-attempts": "2", "dead-at": "2000", "bin": "\x00\x01",
	} {
		if v, ok := rec.Header(name); !ok || string(v) != want {
			t.Errorf("header %s is %q, want %q", name, v, want)
		}
	}
	if n := g.countLetters(t); n != 2 {
		t.Errorf("%d letters in addition to the record", n)
	}
}

// decodeAgain returns the published message as the consumer receives it.
func decodeAgain(t *testing.T, m *consumer.Message, topic string) *consumer.Message {
	t.Helper()
	got := &consumer.Message{Topic: topic, Partition: 5, Offset: 99, Key: m.Key, Value: m.Value, Headers: m.Headers}
	if err := consumer.Decode(t.Context(), got); err != nil {
		t.Fatal(err)
	}
	got.Group = "g"
	return got
}

func TestAMessageClimbsTheLadder(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t)
	m := newFailed(1, "A")
	for rung, delay := range []time.Duration{time.Minute, time.Hour} {
		var a consumer.Failures
		if rung == 0 {
			// The first attempt in place fails, too.
			a = a.Note(errFlaky, m, time.Now())
		}
		a = a.Note(errFlaky, m, time.Now())
		before := time.Now().Truncate(time.Millisecond)
		v := consumer.Verdict{Action: consumer.ActRetryTopic, Delay: delay, Topic: transport.RetryTopicName("orders", "g", rung+1), Attempts: a}
		if _, err := g.Dispose(t.Context(), m, "h", v, errFlaky); err != nil {
			t.Fatal(err)
		}
		after := time.Now()

		topic := "orders.g.retry." + strconv.Itoa(rung+1)
		if len(g.out.list[topic]) != 1 {
			t.Fatalf("published %v", g.out.list)
		}
		next := decodeAgain(t, g.out.list[topic][0], topic)
		only, _ := next.Header(record.HeaderOnly)
		origin, _ := next.Header(record.HeaderRetryOrigin)
		if next.ID != "m1" || next.Attempt != rung+3 || string(only) != "g/h" || string(origin) != "orders/2/1" {
			t.Errorf("rung %d: id %s, attempt %d, only %s, origin %s", rung+1, next.ID, next.Attempt, only, origin)
		}
		if !bytes.Equal(next.Key, m.Key) || !bytes.Equal(next.Value, m.Value) {
			t.Errorf("rung %d: the record's bytes changed", rung+1)
		}

		early, ok := errors.AsType[*consumer.NotDueError](consumer.CheckTimes(next, before.Add(delay-time.Millisecond)))
		if !ok || early.Due.Before(before.Add(delay)) || early.Due.After(after.Add(delay)) {
			t.Errorf("rung %d: before it is due: %v", rung+1, early)
		}
		if err := consumer.CheckTimes(next, after.Add(delay)); err != nil {
			t.Errorf("rung %d: when it is due: %v", rung+1, err)
		}
		m = next
	}

	a := consumer.Failures{}.Note(errFlaky, m, time.Now())
	v := consumer.Verdict{Action: consumer.ActDeadLetter, Attempts: a}
	if _, err := g.Dispose(t.Context(), m, "h", v, errFlaky); err != nil {
		t.Fatal(err)
	}
	// The letter has the place of the first record.
	l, err := g.letters.Get(t.Context(), letterID(newFailed(1, "A"), "h"))
	if err != nil || l.Attempts != 4 || len(l.History) != 4 {
		t.Fatalf("letter %+v, %v", l, err)
	}
	if diff := cmp.Diff(newFailed(1, "A").Headers, l.Headers); diff != "" {
		t.Errorf("headers of the letter: %s", diff)
	}
}

func TestMessagesThatCannotBeMovedAreDeadLetters(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t)
	v := consumer.Verdict{Action: consumer.ActRetryTopic, Topic: "retry", Delay: time.Second}
	for n, code := range []kafka.Error{
		kafka.MessageSizeTooLarge, kafka.UnknownTopicOrPartition, kafka.InvalidTopic, kafka.TopicAuthorizationFailed,
	} {
		g.out.fail = code
		if _, err := g.Dispose(t.Context(), newFailed(n, "A"), "h", v, errFlaky); err != nil {
			t.Errorf("%v: %v", code, err)
		}
	}

	if n := g.countLetters(t); n != 4 {
		t.Errorf("letters: got %d, want 4", n)
	}
}

// Kafka deletes a message at the end of the retention of its topic, also if the message is not due yet.
func TestANewRetryTopicKeepsItsMessagesUntilTheyAreHandled(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	m := newFailed(1, "A")
	m.Topic = k.topic
	verdict := newVerdict(1, m, errFlaky)
	verdict.Action, verdict.Topic, verdict.Delay = consumer.ActRetryTopic, k.topic+".retry", 5*24*time.Hour
	k.deleteAtEnd(verdict.Topic)
	disposer := consumer.NewDisposer(k.newDesk(), k.kafka, func(err error) { t.Error(err) })
	if _, err := disposer.Dispose(k.context(), m, "h", verdict, errFlaky); err != nil {
		t.Fatal(err)
	}

	client, done := k.newClient()
	defer done()
	got := map[string]string{}
	k.waitUntil("the settings of the topic", func(ctx context.Context) bool {
		resource := kafka.DescribeConfigRequestResource{ResourceType: kafka.ResourceTypeTopic, ResourceName: verdict.Topic}
		response, err := client.DescribeConfigs(ctx, &kafka.DescribeConfigsRequest{Resources: []kafka.DescribeConfigRequestResource{resource}})
		if err != nil || response.Resources[0].Error != nil {
			return false
		}
		for _, entry := range response.Resources[0].ConfigEntries {
			got[entry.ConfigName] = entry.ConfigValue
		}
		return true
	})
	if want := strconv.FormatInt((12 * 24 * time.Hour).Milliseconds(), 10); got["retention.ms"] != want || got["cleanup.policy"] != "delete" {
		t.Errorf("retention.ms is %s, want %s; cleanup.policy is %s", got["retention.ms"], want, got["cleanup.policy"])
	}
}

// slowBrokers show a new topic late.
type slowBrokers struct {
	published
	created, rejected int
}

func (s *slowBrokers) CreateTopic(context.Context, string, string, time.Duration) error {
	s.created++
	return nil
}

func (s *slowBrokers) Publish(ctx context.Context, topic string, records []transport.Record) error {
	if s.rejected < 3 {
		s.rejected++
		return kafkawire.UnknownTopicOrPartition
	}
	return s.published.Publish(ctx, topic, records)
}

func TestAMessageIsNotGivenUpBecauseItsNewRetryTopicAppearsLate(t *testing.T) {
	t.Parallel()
	g, brokers := newGraveyard(t), &slowBrokers{}
	disposer := consumer.NewDisposer(g.letters, brokers, func(err error) { t.Error(err) })
	m := newFailed(1, "A")
	verdict := newVerdict(1, m, errFlaky)
	verdict.Action, verdict.Topic = consumer.ActRetryTopic, "orders.retry"
	if _, err := disposer.Dispose(t.Context(), m, "h", verdict, errFlaky); err == nil {
		t.Error("the message was disposed of, and its topic rejects it")
	}

	if _, err := disposer.Dispose(t.Context(), m, "h", verdict, errFlaky); err != nil {
		t.Error(err)
	}
	if n := g.countLetters(t); n != 0 || len(brokers.list[verdict.Topic]) != 1 || brokers.created != 2 {
		t.Errorf("%d letters, %d messages in the topic, which was created %d times", n, len(brokers.list[verdict.Topic]), brokers.created)
	}
}

// strictBrokers create no topic.
type strictBrokers struct{ rejects error }

func (s strictBrokers) CreateTopic(context.Context, string, string, time.Duration) error {
	return s.rejects
}

func (s strictBrokers) Publish(context.Context, string, []transport.Record) error {
	return kafkawire.UnknownTopicOrPartition
}

// A policy of the cluster that rejects the settings of a retry topic would stop the lane until somebody creates the topic.
func TestAMessageIsGivenUpIfTheClusterRejectsItsRetryTopic(t *testing.T) {
	t.Parallel()
	for _, code := range []kafkawire.Code{kafkawire.PolicyViolation, kafkawire.InvalidConfig} {
		g := newGraveyard(t)
		rejection := &kafkawire.RejectionError{Code: code, Message: "at most 7 days"}
		disposer := consumer.NewDisposer(g.letters, strictBrokers{rejection}, func(err error) { t.Error(err) })
		m := newFailed(1, "A")
		verdict := newVerdict(1, m, errFlaky)
		verdict.Action, verdict.Topic = consumer.ActRetryTopic, "orders.retry"
		givenUp, err := disposer.Dispose(t.Context(), m, "h", verdict, errFlaky)
		if err != nil {
			t.Fatalf("%v: %v", code, err)
		}
		if n := g.countLetters(t); n != 1 || !strings.Contains(givenUp.Reason, "at most 7 days") {
			t.Errorf("%v: %d letters with the reason %q", code, n, givenUp.Reason)
		}
	}
}
