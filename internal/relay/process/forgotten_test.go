package process_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestDeletedTopicsAreForgotten: topics of tenants come and go. A takeover removes deleted topics from the watcher document, except
// one for which an event waits. Then the slots can be divided again, and a topic that is created again gets its events.
func TestDeletedTopicsAreForgotten(t *testing.T) {
	t.Parallel()
	b := setup(t)
	topics := stacktest.NewTopics(t)
	const tenants = 20
	names := make([]string, tenants)
	for i := range names {
		names[i] = topics.Create(fmt.Sprintf("tenant%02d", i), 3)
	}
	stop := b.start()
	for _, name := range names {
		b.append(1, event.WithTopic(name))
	}
	b.append(1)
	b.consume(1)
	stacktest.Eventually(t, "everything is delivered", func() bool { return len(b.storedTopics()) == tenants+1 && b.status().Unresolved == 0 })

	deleteTopics(t, names)
	b.append(1, event.WithTopic(names[0]))
	stacktest.Eventually(t, "an event waits", func() bool { return b.countWaiting(bson.D{}) == 1 })

	want := []string{b.topic, names[0]}
	slices.Sort(want)
	stacktest.Eventually(t, "the deleted topics are forgotten", func() bool {
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		stop = b.start()
		b.append(1)
		stacktest.Eventually(t, "the relay delivers", func() bool { return b.status().State == "live" && b.status().Unresolved == 0 })
		return slices.Equal(b.storedTopics(), want)
	}, func() any { return b.storedTopics() })
	if _, err := b.reslice(2); err == nil {
		t.Error("the slots are divided although an event waits for a topic that cannot be fenced")
	}

	// The event that waits arrives, and so does an event for a topic that was forgotten.
	for _, name := range names[:2] {
		stacktest.CreateTopicOn(t, stacktest.Brokers(t), name, 3, 1)
	}
	b.append(1, event.WithTopic(names[1]))
	for _, name := range names[:2] {
		own := *b
		own.topic = name
		if n := len(own.consume(1)); n != 1 {
			t.Errorf("%s has %d records, want 1", name, n)
		}
	}
	if _, err := b.reslice(2); err != nil {
		t.Error(err)
	}
}

// TestManyDeletedTopicsAreForgottenInATerm: an owner that runs for months forgets the topics of tenants that went, without a restart.
func TestManyDeletedTopicsAreForgottenInATerm(t *testing.T) {
	t.Parallel()
	b := setup(t)
	topics := stacktest.NewTopics(t)
	names := make([]string, 101)
	for i := range names {
		names[i] = topics.Create(fmt.Sprintf("tenant%03d", i), 1)
	}
	b.start()
	for _, name := range names {
		b.append(1, event.WithTopic(name))
	}
	b.append(1)
	b.consume(1)
	stacktest.Eventually(t, "everything is delivered", func() bool { return len(b.storedTopics()) == len(names)+1 && b.status().Unresolved == 0 })

	deleteTopics(t, names)
	stacktest.Eventually(t, "the deleted topics are forgotten", func() bool {
		return slices.Equal(b.storedTopics(), []string{b.topic})
	}, func() any { return len(b.storedTopics()) })

	// The next term delivers.
	b.append(1)
	b.consume(2)
}

// deleteTopics deletes topics, and blocks until the broker rejects records for them. Before that, it may accept some, and lose them.
func deleteTopics(t *testing.T, names []string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	admin := kadm.NewClient(client)
	if _, err := admin.DeleteTopics(t.Context(), names...); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the topics are gone", func() bool {
		known, err := admin.ListTopics(t.Context())
		return err == nil && !slices.ContainsFunc(names, known.Has)
	})
}

// storedTopics returns the topics that the watcher document names, sorted.
func (b *bundle) storedTopics() (names []string) {
	b.t.Helper()
	var d struct {
		Offsets []struct {
			Topic string `bson:"t"`
		} `bson:"offsets"`
		Senders struct {
			Topics []struct {
				Topic string `bson:"t"`
			} `bson:"topics"`
		} `bson:"senders"`
	}
	if err := b.state.Collection("watchers").FindOne(b.t.Context(), bson.D{}).Decode(&d); err != nil {
		b.t.Fatal(err)
	}

	for _, o := range d.Offsets {
		names = append(names, o.Topic)
	}
	for _, s := range d.Senders.Topics {
		names = append(names, s.Topic)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
