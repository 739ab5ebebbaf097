package consumer

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// newTestRoom returns a room of a session with these partitions, and a queue that a worker has.
func newTestRoom(partitions ...transport.TopicPartition) (*waitingRoom, *waitingQueue) {
	s := &session{partitions: map[transport.TopicPartition]*partition{}}
	for _, tp := range partitions {
		s.partitions[tp] = &partition{}
	}
	room := &waitingRoom{s: s, queues: map[queueKey]*waitingQueue{}, wake: make(chan struct{}, 1)}
	queue := room.beginAdd(queueKey{partitionOne, setaside.KeyQueue([]byte("a"))})
	room.endAdd(queue, time.Now().Add(-time.Minute))
	room.scheduled, queue.index, queue.running = nil, -1, true
	return room, queue
}

var partitionOne = transport.TopicPartition{Topic: "t", Partition: 1}

// A member that retries the messages of a partition that no member reads may get the partition. If a worker finds that its queue has no
// partition any more, and the queues are read again in between, the messages of the key must still follow those that wait.
func TestAQueueStaysIfItsPartitionHasComeBack(t *testing.T) {
	t.Parallel()
	room, queue := newTestRoom(partitionOne)
	room.dropQueue(queue)
	if !room.hasQueue(queue.key) || queue.index < 0 || queue.running {
		t.Errorf("the queue of a partition that the member has was dropped: %+v", queue)
	}
	if queue.due.Before(time.Now()) {
		t.Error("the queue is due at once, so that the loop spins while the partition drains")
	}

	room, queue = newTestRoom()
	room.dropQueue(queue)
	if room.hasQueue(queue.key) || room.size.Load() != 0 {
		t.Error("the queue of a partition that the member does not have was kept")
	}
}

// A message that an abandoned handler sets aside, after its partition was given back and has come back, is counted by the queue that is
// there now.
func TestAnAbandonedMessageDoesNotCorruptTheNextQueue(t *testing.T) {
	t.Parallel()
	room, _ := newTestRoom(partitionOne)
	key := queueKey{partitionOne, setaside.KeyQueue([]byte("b"))}
	abandoned := room.beginAdd(key)
	room.forget(partitionOne)
	next := room.beginAdd(key)
	room.endAdd(abandoned, time.Now())

	if next.adding != 1 || next.added != 1 {
		t.Errorf("the next queue has %d messages under way and %d added, want 1 and 1", next.adding, next.added)
	}
	if room.removeQueue(next, 0); !room.hasQueue(key) {
		t.Error("a queue that gets a message was removed")
	}
}

// countingStore counts the messages that are set aside.
type countingStore struct {
	setaside.Store
	added []*setaside.Message
}

func (c *countingStore) Add(_ context.Context, _ time.Duration, messages ...*setaside.Message) error {
	c.added = append(c.added, messages...)
	return nil
}

// A previous owner of a partition still has a message in memory when the topic is deleted. The next owner has set the message aside, with
// the generation of its topic. Without that generation, a second document would be handled before the earlier messages of the key.
func TestN29_AMessageOfADeletedTopicIsSetAsideAfterAnAttemptAlone(t *testing.T) {
	t.Parallel()
	for name, failed := range map[string]int{"untried": 0, "tried": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := &countingStore{}
			s := &session{run: &run{c: &Consumer{waiting: store}}}
			lane := &track{p: &partition{s: s}, reg: &registration{}}
			one := &entry{shares: []share{{attempts: failures{Failed: failed}}}}
			one.orphan.Store(true)

			err := lane.storeWaiting(task{one, &one.shares[0]}, &setaside.Message{}, 0)
			if isLeft := errors.Is(err, errOrphan); isLeft != (failed == 0) || len(store.added) != failed {
				t.Errorf("%v, %d messages are set aside", err, len(store.added))
			}
		})
	}
}
