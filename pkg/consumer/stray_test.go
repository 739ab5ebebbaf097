package consumer_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// setAsideIn lets a consumer of a topic set one message of the handler "counted" aside, and stops it.
func (k *kit) setAsideIn(topic string, key string) {
	k.Helper()
	c, err := consumer.New(k.group, k.db, consumer.WithKafka(k.cfg), consumer.WithTopics(topic), consumer.WithRetry(soon))
	if err != nil {
		k.Fatal(err)
	}
	addHandler(k, c, "counted", func(context.Context, *consumer.Message) error { return errAway })
	before := k.countDocuments(setaside.DefaultCollection)
	if err := k.kafka.Publish(k.context(), topic, newRecords(newMessage(key, "counted", "0"))); err != nil {
		k.Fatal(err)
	}
	stop := k.start(c)
	k.waitUntil("the message to be set aside", func(context.Context) bool {
		return k.countDocuments(setaside.DefaultCollection) == before+1
	})
	stop()
}

func TestMessagesOfATopicThatIsNotReadAnyMoreAreReportedAndRetried(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	old := stacktest.Topic(t, 1)
	k.setAsideIn(old, "a")

	page, reports := telemetry.NewPrometheus(), make(chan struct{}, 10)
	hook := consumer.WithErrorHook(func(_ context.Context, err error) {
		if strings.Contains(err.Error(), old) && strings.Contains(err.Error(), "no member of the group reads") {
			reports <- struct{}{}
		}
	})
	var away atomic.Bool
	away.Store(true)
	effects := k.insertInto("effects")
	start := func() *consumer.Consumer {
		c := k.newConsumer(consumer.WithTelemetry(page), consumer.WithRetry(soon), hook)
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
			if m.Topic == old && away.Load() {
				return errAway
			}
			return effects(ctx, m)
		})
		k.start(c)
		return c
	}
	members := []*consumer.Consumer{start(), start()}

	k.waitFor("the report", reports)
	for _, c := range members {
		k.waitUntil("the status", func(context.Context) bool { return len(c.Status().Strays) == 1 })
		s := c.Status()
		got := s.Strays[0]
		if got.Handler != "counted" || got.Topic != old || got.Waiting != 1 || got.Reason != consumer.StrayUnread || !slices.Equal(got.Partitions, []int32{0}) || got.Oldest <= 0 {
			t.Errorf("stray messages: got %+v", got)
		}
		if !s.Ready || !slices.ContainsFunc(s.Reasons, func(r string) bool { return strings.Contains(r, old) }) {
			t.Errorf("status: got %+v, want ready with a reason about %s", s, old)
		}
	}
	w := httptest.NewRecorder()
	page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	if want := `outrelay_consumer_stray_messages{group="` + k.group + `",handler="counted",topic="` + old + `",reason="unread"} 1`; !strings.Contains(w.Body.String(), want) {
		t.Errorf("the page for Prometheus lacks %s", want)
	}

	away.Store(false)
	k.waitCount("effects", 1)
	k.waitUntil("the end of the report in the status", func(context.Context) bool {
		return len(members[0].Status().Strays)+len(members[1].Status().Strays) == 0
	})
}

// A topic that is created again may have fewer partitions.
func TestMessagesOfAPartitionThatIsGoneAreRetried(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed, consumer.AtLeastOnce} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			k.setAsideIn(k.topic, "a")
			if _, err := k.db.Collection(setaside.DefaultCollection).UpdateMany(k.context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "p", Value: int32(7)}}}}); err != nil {
				t.Fatal(err)
			}

			c := k.newConsumer(consumer.WithMode(mode), consumer.WithRetry(soon))
			addHandler(t, c, "counted", k.insertInto("effects"))
			k.start(c)
			k.waitCount("effects", 1)
			k.waitUntil("no message to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 0 })
			k.checkOnce("effects", 1)
		})
	}
}

// The messages of a member that another one of the group lacks are not taken from it.
func TestMessagesThatAnotherMemberReadsAreNotStray(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	later := consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Hour})
	var members []*consumer.Consumer
	for range 2 {
		c := k.newConsumer(later)
		addHandler(t, c, "counted", func(context.Context, *consumer.Message) error { return errAway })
		k.start(c)
		members = append(members, c)
	}
	k.publish(newMessages(8, 8)...)
	for _, c := range members {
		k.waitUntil("the count of all messages", func(context.Context) bool {
			s := c.Status()
			return len(s.Partitions) == 1 && s.Handlers[0].Waiting == 8
		})
	}

	// Two more counts would find stray messages.
	var last time.Time
	for range 2 {
		k.waitUntil("another count", func(ctx context.Context) bool {
			var doc struct{ At time.Time }
			if err := k.db.Collection(setaside.DefaultCollection+setaside.CountsSuffix).FindOne(ctx, bson.D{}).Decode(&doc); err != nil || !doc.At.After(last) {
				return false
			}
			last = doc.At
			return true
		})
	}
	for i, c := range members {
		if s := c.Status(); len(s.Strays) != 0 {
			t.Errorf("member %d: stray messages %+v", i, s.Strays)
		}
	}
}

func TestMessagesOfAHandlerThatIsNoMoreAreInTheStatus(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.setAsideIn(k.topic, "a")
	reported := make(chan struct{}, 10)
	c := k.newConsumer(consumer.WithErrorHook(func(_ context.Context, err error) {
		if errors.Is(err, consumer.ErrNoHandler) && strings.Contains(err.Error(), `"counted"`) {
			reported <- struct{}{}
		}
	}))
	addHandlerAs(t, c, "new", "*", nop)
	k.start(c)
	k.waitFor("the report", reported)
	if s := c.Status(); len(s.Strays) != 1 || s.Strays[0].Reason != consumer.StrayNoHandler || s.Strays[0].Handler != "counted" {
		t.Errorf("stray messages: got %+v", s.Strays)
	}

	// Only while no other member has the handler, its messages may be removed.
	advice := func(when, want, unwanted string) {
		t.Helper()
		k.waitUntil("the advice "+when, func(context.Context) bool {
			reasons := strings.Join(c.Status().Reasons, " ")
			return strings.Contains(reasons, want) && !strings.Contains(reasons, unwanted)
		})
	}
	const retire, same = "remove them with Retire", "All members of a group need the same handlers"
	advice("without another member", retire, same)
	other := k.newConsumer(consumer.WithRetry(soon))
	addHandler(t, other, "counted", func(context.Context, *consumer.Message) error { return errAway })
	stop := k.start(other)
	advice("while another member has the handler", same, retire)
	stop()
	advice("after its end", retire, same)

	// A handler of that name takes them, although no new message arrives.
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.waitCount("effects", 1)
	k.waitUntil("the end of the report", func(context.Context) bool { return len(c.Status().Strays) == 0 })
}
