package consumer_test

import (
	"context"
	"crypto/tls"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
)

// Each wrong option of Kafka is an error of New, which names the option and the fix.
func TestWrongOptionsOfKafkaNameTheFix(t *testing.T) {
	t.Parallel()
	db := stacktest.Client(t).Database("unused")
	token := func(context.Context) (string, error) { return "token", nil }
	for _, c := range []struct {
		opts []consumer.Option
		want string
	}{
		{nil, "no brokers: name them with WithBrokers"},
		{[]consumer.Option{consumer.WithBrokers("kafka")}, `WithBrokers: "kafka" is not host:port`},
		{[]consumer.Option{consumer.WithSASL(consumer.SASL{})}, `WithSASL: mechanism "" is unknown: use plain`},
		{[]consumer.Option{consumer.WithSASL(consumer.SASL{Mechanism: "gssapi"})}, `WithSASL: mechanism "gssapi" is unknown: use plain`},
		{[]consumer.Option{consumer.WithSASL(consumer.SASL{Mechanism: "plain", Username: "a"})}, "WithSASL: mechanism plain needs a Username and a Password"},
		{
			[]consumer.Option{consumer.WithSASL(consumer.SASL{Mechanism: "PLAIN", Username: "a", Password: "b", Token: token})},
			"WithSASL: mechanism PLAIN uses no Token: remove it",
		},
		{[]consumer.Option{consumer.WithSASL(consumer.SASL{Mechanism: "oauthbearer"})}, "WithSASL: mechanism oauthbearer needs a Token"},
		{
			[]consumer.Option{consumer.WithSASL(consumer.SASL{Mechanism: "oauthbearer", Username: "a", Token: token})},
			"WithSASL: mechanism oauthbearer uses no Username",
		},
		{[]consumer.Option{consumer.WithSessionTimeout(-time.Second)}, "WithSessionTimeout is -1s: it must be positive"},
		{[]consumer.Option{consumer.WithStart(7)}, "WithStart: 7 is neither Earliest nor Latest"},
	} {
		_, err := consumer.New("group", db, append(c.opts, consumer.WithTopics("orders"))...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}

	_, err := consumer.New("group", db, consumer.WithTopics("orders"), consumer.WithBrokers("kafka:9092"), consumer.WithTLS(&tls.Config{}),
		consumer.WithSASL(consumer.SASL{Mechanism: "oauthbearer", Token: token}), consumer.WithClientID("shipping"),
		consumer.WithSessionTimeout(time.Second), consumer.WithStart(consumer.Latest))
	if err != nil {
		t.Errorf("right options: %v", err)
	}
}

// A group without offsets begins with the first record, or with Latest after the last one.
func TestStartOfAGroup(t *testing.T) {
	t.Parallel()
	for _, start := range []consumer.Start{consumer.Earliest, consumer.Latest} {
		k := newKit(t, 1)
		k.publish(newMessage("k", "counted", "early"))

		got := make(chan string, 10)
		c, err := consumer.New(k.group, k.db, consumer.WithBrokers(k.cfg.Brokers...), consumer.WithTopics(k.topic), consumer.WithStart(start),
			consumer.WithErrorHook(func(_ context.Context, err error) { k.logError(err) }))
		if err != nil {
			t.Fatal(err)
		}

		addHandler(t, c, "counted", func(_ context.Context, m *consumer.Message) error {
			got <- string(m.Value)
			return nil
		})
		k.start(c)

		want := "early"
		if start == consumer.Latest {
			want = "late"
			k.waitUntil("the assignment", func(context.Context) bool { return len(c.Status().Partitions) == 1 })
		}
		k.publish(newMessage("k", "counted", "late"))

		select {
		case v := <-got:
			if v != want {
				t.Errorf("start %d begins with %s, want %s", start, v, want)
			}
		case <-time.After(patience):
			t.Errorf("start %d: no message", start)
		}
	}
}

// With Latest, a group begins once with the records that follow. Records that are written while no member runs, or that were
// not handled yet, are not skipped, and neither are messages in a retry topic that is created for them.
func TestAGroupThatBeganWithLatestSkipsNothingLater(t *testing.T) {
	t.Parallel()
	for name, use := range map[string]consumer.Option{"kafka-go": nil, "franz": franz.Use()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			k.cfg.WatchPartitions = 100 * time.Millisecond
			k.deleteAtEnd(transport.RetryTopicName(k.topic, k.group, 1))
			k.publish(newMessage("k", "counted", "early"))
			effects := k.insertInto("effects")
			member := func() *consumer.Consumer {
				c := k.newConsumer(use, consumer.WithStart(consumer.Latest),
					consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}}), consumer.WithRetryTopics(100*time.Millisecond))
				addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
					if m.Attempt == 1 {
						return errWanted
					}
					return effects(ctx, m)
				})
				return c
			}

			stop := k.start(member())
			k.waitUntil("the stored start", func(context.Context) bool { return k.readCommitted(1)[0] == 1 })
			stop()
			k.publish(newMessage("k", "counted", "0"))
			k.start(member())
			k.waitCount("effects", 1)
			k.checkOnce("effects", 1)
		})
	}
}
