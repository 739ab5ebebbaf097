package consumer_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// While one of its topics does not exist, a group handles the messages of the other ones, and forms no generation after another. When the
// topic is created again, its messages are handled too.
func TestADeletedTopicStopsNoOtherTopic(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.cfg.WatchPartitions = 2 * time.Second
	gone := stacktest.Topic(t, 1)
	book := &logbook{}
	c := k.newLogged(t, book, consumer.WithTopics(k.topic, gone))
	k.start(c)
	awaitPartitions := func(n int) (generation float64) {
		t.Helper()
		k.waitUntil("the partitions", func(context.Context) bool { return len(c.Status().Partitions) == n })
		generation, _ = book.last(t, "partitions are assigned")["generation"].(float64)
		return generation
	}
	first := awaitPartitions(2)

	adm, done := k.newAdmin()
	defer done()
	if res, err := adm.DeleteTopics(k.context(), gone); err != nil || res.Error() != nil {
		t.Fatal(err, res.Error())
	}
	k.publish(newMessage("a", "counted", "0"))
	k.waitUntil("the offset of the other topic", func(context.Context) bool { return k.readCommitted(1)[0] == 1 })
	if last := awaitPartitions(1); last > first+4 {
		t.Errorf("%v generations until the group had left out the deleted topic, want at most 4", last-first)
	}

	k.waitUntil("the new topic", func(ctx context.Context) bool {
		_, err := adm.CreateTopic(ctx, 1, 1, nil, gone)
		return err == nil || errors.Is(err, kerr.TopicAlreadyExists)
	})
	k.waitUntil("a message in the new topic", func(ctx context.Context) bool {
		return k.kafka.Publish(ctx, gone, newRecords(newMessage("b", "counted", "0"))) == nil
	})
	k.waitUntil("the offset of the new topic", func(context.Context) bool { return k.committedOf(gone, 1)[0] == 1 })
	awaitPartitions(2)
}
