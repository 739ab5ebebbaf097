package consumer_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// scripted is a handler that records the ids of the messages that it handles, in order.
type scripted struct {
	mu       sync.Mutex
	failing  map[string]bool // ids that fail
	attempts map[string]int  // failed ones, by id
	handled  []string
}

func (s *scripted) handle(_ context.Context, message *consumer.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failing[message.ID] {
		s.attempts[message.ID]++
		return errWanted
	}
	s.handled = append(s.handled, message.ID)
	return nil
}

func newScripted(failing ...string) *scripted {
	s := &scripted{failing: map[string]bool{}, attempts: map[string]int{}}
	for _, id := range failing {
		s.failing[id] = true
	}
	return s
}

// heal ends all failures.
func (s *scripted) heal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failing = nil
}

// waitFailed blocks until an attempt at id has failed.
func (s *scripted) waitFailed(t *testing.T, id string) {
	t.Helper()
	stacktest.Eventually(t, "a failure of "+id, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.attempts[id] > 0
	})
}

// waitHandled blocks until all of ids are handled.
func (s *scripted) waitHandled(t *testing.T, ids ...string) {
	t.Helper()
	stacktest.Eventually(t, fmt.Sprint(ids), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return !slices.ContainsFunc(ids, func(id string) bool { return !slices.Contains(s.handled, id) })
	}, func() any { s.mu.Lock(); defer s.mu.Unlock(); return slices.Clone(s.handled) })
}

// checkHandled blocks until as many messages as in want are handled, and checks their order.
func (s *scripted) checkHandled(t *testing.T, want ...string) {
	t.Helper()
	handled := func() []string {
		s.mu.Lock()
		defer s.mu.Unlock()
		return slices.Clone(s.handled)
	}
	stacktest.Eventually(t, "all messages", func() bool { return len(handled()) >= len(want) }, func() any { return handled() })
	if got := handled(); !slices.Equal(got, want) {
		t.Errorf("handled %v, want %v", got, want)
	}
}

var allModes = []consumer.Mode{consumer.Transactional, consumer.Claimed, consumer.AtLeastOnceInTransaction, consumer.AtLeastOnce}

// N29: messages that are set aside are handled before the messages of a topic that replaced theirs, in every mode.
func TestN29_MessagesOfADeletedTopicComeFirst(t *testing.T) {
	t.Parallel()
	for _, mode := range allModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			l := &changing{id: "cluster/topic"}
			s := newScripted("2", "rerecreated1")
			member := inDatabase(t, l, stacktest.Database(t, stacktest.Client(t)), consumer.WithRetry(soon), consumer.WithMode(mode))
			addHandler(t, member, "counted", s.handle)

			// The deleted topic has higher offsets than the new one.
			for range 4 {
				l.append("a")
			}
			startConsumer(t, member)
			l.waitCommitted(t, 4)
			s.waitFailed(t, "2")
			l.recreate("a", 3)
			l.waitCommitted(t, 3)
			l.recreate("a", 2)
			l.waitCommitted(t, 2)

			s.heal()
			s.checkHandled(t, "0", "1", "2", "3", "recreated0", "recreated1", "recreated2", "rerecreated0", "rerecreated1")
		})
	}
}

// N29: a handler that begins with records of a deleted topic, which are in memory, does not move the watermarks of the new topic.
func TestN29_AHandlerThatBeginsAfterTheTopicWasDeletedHidesNoMessage(t *testing.T) {
	t.Parallel()
	for i, mode := range append(allModes, consumer.Transactional) {
		t.Run(fmt.Sprint(i, mode), func(t *testing.T) {
			t.Parallel()
			// The last one has a broker before Kafka 3.1.
			l := &changing{id: "cluster/topic", ignoresIDs: i == len(allModes)}
			s := newScripted()
			// The buffer is full, so no fetch shows that the topic was deleted.
			member := inDatabase(t, l, stacktest.Database(t, stacktest.Client(t)), consumer.WithBufferedRecords(1), consumer.WithMode(mode))
			addHandler(t, member, "counted", s.handle)
			for range 3 {
				l.append("a")
			}
			member.PauseHandler("counted")
			startConsumer(t, member)
			l.waitServed(t)

			l.recreate("a", 5)
			member.ResumeHandler("counted")
			s.waitHandled(t, "recreated0", "recreated1", "recreated2", "recreated3", "recreated4")
			l.waitCommitted(t, 5)
		})
	}
}

// N29: messages of a deleted topic that no handler took, because they had expired, do not move the watermarks of the new topic.
func TestN29_ExpiredMessagesOfADeletedTopicHideNoMessage(t *testing.T) {
	t.Parallel()
	for _, mode := range allModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			l := &changing{id: "cluster/topic"}
			s := newScripted()
			member := inDatabase(t, l, stacktest.Database(t, stacktest.Client(t)), consumer.WithMode(mode))
			addHandler(t, member, "counted", s.handle)
			for range 3 {
				l.appendExpired("a")
			}
			startConsumer(t, member)
			l.waitCommitted(t, 3)

			l.recreate("a", 5)
			l.waitCommitted(t, 5)
			s.checkHandled(t, "recreated0", "recreated1", "recreated2", "recreated3", "recreated4")
		})
	}
}

// N29: after one run without WithHaltOnLoss, the group goes on with the new topic, also handlers that got no message in that run.
func TestN29_AnAcceptedTopicDoesNotHaltALaterRun(t *testing.T) {
	t.Parallel()
	for _, mode := range allModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			l := &changing{id: "cluster/topic"}
			s := newScripted("0", "recreated0")
			db := stacktest.Database(t, stacktest.Client(t))
			start := func(opts ...consumer.Option) (stop func()) {
				member := inDatabase(t, l, db, append(opts, consumer.WithRetry(soon), consumer.WithMode(mode))...)
				addHandler(t, member, "counted", s.handle)
				return startConsumer(t, member)
			}

			stop := start(consumer.WithHaltOnLoss())
			l.append("a")
			l.waitCommitted(t, 1)
			stop()
			l.recreate("b", 0)
			stop = start()
			stacktest.Eventually(t, "the group to go on", func() bool {
				l.mu.Lock()
				defer l.mu.Unlock()
				return l.committedID == l.id
			})
			stop()

			start(consumer.WithHaltOnLoss())
			l.append("b")
			l.waitCommitted(t, 1)
			s.waitFailed(t, "recreated0")
			s.heal()
			s.waitHandled(t, "0", "recreated0")
		})
	}
}

// appendExpired appends a record whose time is over.
func (l *changing) appendExpired(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addLocked(key)
	last := &l.records[len(l.records)-1]
	last.Headers = append(last.Headers, event.Header{Key: record.HeaderDeliverBy, Value: []byte("1")})
}

// waitServed blocks until the consumer has fetched the records.
func (l *changing) waitServed(t *testing.T) {
	t.Helper()
	stacktest.Eventually(t, "a fetch", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.served
	})
}
