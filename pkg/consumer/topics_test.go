package consumer_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/topics"
)

// A topic that is added in one process is read by all members, also by members that start later. A removed topic is not
// read any more.
func TestTopicsMayBeAddedAndTakenAway(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	later := stacktest.Topic(t, 1)
	stats := &counts{}
	list, err := topics.New(k.db, k.group)
	if err != nil {
		t.Fatal(err)
	}

	member := func() *consumer.Consumer {
		c := k.newConsumer(consumer.WithTopicList(list), consumer.WithTelemetry(stats))
		addHandler(t, c, "counted", k.insertInto("effects"))
		return c
	}

	c := member()
	stop := k.start(c)
	k.publish(newMessages(2, 4)...)
	k.waitCount("effects", 4)
	for range 2 {
		if err := list.Add(k.context(), later); err != nil {
			t.Fatal(err)
		}
	}

	send := func(n int) {
		t.Helper()
		if err := k.kafka.Publish(k.context(), later, newRecords(newMessages(2, n)[n-2:]...)); err != nil {
			t.Fatal(err)
		}
	}

	send(6)
	k.waitCount("effects", 6)
	got, err := list.All(k.context())
	if d := cmp.Diff([]string{later}, got); err != nil || d != "" {
		t.Error(err, d)
	}

	stop()
	k.start(member())
	send(8)
	k.waitCount("effects", 8)
	joined := stats.assigned.Load()
	if was, err := list.Remove(k.context(), later); err != nil || !was {
		t.Error(was, err)
	}
	if was, err := list.Remove(k.context(), later); err != nil || was {
		t.Error(was, err)
	}

	k.waitUntil("the group without it", func(context.Context) bool { return stats.assigned.Load() > joined })
	if err := k.kafka.Publish(k.context(), later, newRecords(newMessage("gone", "counted", "0"))); err != nil {
		t.Fatal(err)
	}

	k.publish(newMessages(2, 10)[8:]...)
	k.waitCount("effects", 10)
	k.checkOnce("effects", 10)
}
