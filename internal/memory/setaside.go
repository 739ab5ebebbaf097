package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/setaside"
)

// setAsideStore stores the messages that consumers have set aside.
type setAsideStore struct {
	db   *DB
	rows *storedTable
}

var _ setaside.Store = (*setAsideStore)(nil)

func newSetAsideStore(db *DB) *setAsideStore {
	return &setAsideStore{db: db, rows: db.findOrAddTable(setaside.DefaultCollection)}
}

// setAsideMessage is a stored message with its times. It is never changed: a change stores a new one.
type setAsideMessage struct {
	setaside.Message
	since, due time.Time // zero while the message is untried
}

// EnsureIndexes does nothing: a DB has no indexes.
func (s *setAsideStore) EnsureIndexes(context.Context) error { return nil }

// DueRetries describes the messages in db that are set aside and due. It is empty if there are none.
func DueRetries(ctx context.Context, db *DB) (list []string, err error) {
	s := newSetAsideStore(db)
	err = db.runOperation(ctx, func(t *tx) error {
		// After a conflict the operation runs again, so each run begins with an empty list.
		list = nil
		for _, m := range s.firstMessages(t, func(*setAsideMessage) bool { return true }) {
			if !m.due.After(time.Now()) {
				list = append(list, fmt.Sprintf("a message of handler %s is due: %s/%d/%d", m.Handler, m.Topic, m.Partition, m.Offset))
			}
		}
		return nil
	})
	return list, err
}

// Add stores m, due after wait.
func (s *setAsideStore) Add(ctx context.Context, m *setaside.Message, wait time.Duration) error {
	if err := m.CheckSize(); err != nil {
		return err
	}
	return s.db.runOperation(ctx, func(t *tx) error {
		key := string(m.ID[:])
		if t.getRow(s.rows, key) != nil {
			return nil
		}

		stored := &setAsideMessage{Message: copySetAside(m)}
		if m.Failed > 0 {
			stored.since = time.Now().Add(-m.Elapsed)
			stored.due = time.Now().Add(wait)
		}
		return t.putRow(s.rows, key, stored)
	})
}

// copySetAside returns a copy that shares no memory with m. As in BSON, an empty value is not a missing one.
func copySetAside(m *setaside.Message) setaside.Message {
	c := *m
	c.Key = bytes.Clone(m.Key)
	c.Value = bytes.Clone(m.Value)
	c.Headers = slices.Clone(m.Headers)
	for i := range c.Headers {
		c.Headers[i].Value = bytes.Clone(c.Headers[i].Value)
	}
	c.History = slices.Clone(m.History)
	return c
}

// Postpone stores the attempts of m and makes it due after wait.
func (s *setAsideStore) Postpone(ctx context.Context, m *setaside.Message, wait time.Duration) error {
	return s.db.runOperation(ctx, func(t *tx) error {
		key := string(m.ID[:])
		stored, ok := t.getRow(s.rows, key).(*setAsideMessage)
		if !ok {
			return nil
		}

		changed := *stored
		changed.Attempts = m.Attempts
		changed.History = slices.Clone(m.History)
		if changed.since.IsZero() {
			changed.since = time.Now().Add(-m.Elapsed)
		}
		changed.due = time.Now().Add(wait)
		return t.putRow(s.rows, key, &changed)
	})
}

// First returns the first message of a queue.
func (s *setAsideStore) First(ctx context.Context, p setaside.Place, queue setaside.Digest) (m *setaside.Message, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		m = nil
		if first := s.firstOf(t, queueKey{p, queue}); first != nil {
			found := copySetAside(&first.Message)
			if !first.since.IsZero() {
				found.Elapsed = max(0, time.Since(first.since))
			}
			m = &found
		}
		return nil
	})
	return m, err
}

// firstOf returns the first message of a queue that t sees, or nil.
func (s *setAsideStore) firstOf(t *tx, q queueKey) *setAsideMessage {
	return s.firstMessages(t, func(m *setAsideMessage) bool { return m.Place == q.Place && m.Queue == q.queue })[q]
}

// scanMessages calls f with all messages that t sees.
func (s *setAsideStore) scanMessages(t *tx, f func(m *setAsideMessage)) {
	t.scanRows(s.rows, func(_ string, v any) { f(v.(*setAsideMessage)) })
}

// compareInQueue orders the messages of a queue.
func compareInQueue(a, b *setAsideMessage) int {
	return cmp.Or(cmp.Compare(a.Generation, b.Generation), cmp.Compare(a.Offset, b.Offset))
}

// Take deletes m if it is the first of its queue.
func (s *setAsideStore) Take(ctx context.Context, m *setaside.Message) (taken bool, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		first := s.firstOf(t, queueKey{m.Place, m.Queue})
		taken = first != nil && first.ID == m.ID
		if !taken {
			return nil
		}
		return t.putRow(s.rows, string(m.ID[:]), nil)
	})
	return taken, err
}

// Remove deletes m.
func (s *setAsideStore) Remove(ctx context.Context, m *setaside.Message) error {
	return s.db.runOperation(ctx, func(t *tx) error { return t.putRow(s.rows, string(m.ID[:]), nil) })
}

// Heads returns the queues of a handler in these partitions of a topic.
func (s *setAsideStore) Heads(ctx context.Context, handler, topic string, partitions []int32) (heads []setaside.Head, err error) {
	isWanted := func(m *setAsideMessage) bool {
		return m.Handler == handler && m.Topic == topic && slices.Contains(partitions, m.Partition)
	}

	err = s.db.runOperation(ctx, func(t *tx) error {
		heads = nil
		for _, m := range s.firstMessages(t, isWanted) {
			// Without a due time the wait is 0.
			wait := max(0, time.Until(m.due))
			heads = append(heads, setaside.Head{Partition: m.Partition, Queue: m.Queue, Wait: wait})
		}
		return nil
	})
	return heads, err
}

// queueKey identifies a queue.
type queueKey struct {
	setaside.Place
	queue setaside.Digest
}

// firstMessages returns the first message of each queue, among the messages that are wanted.
func (s *setAsideStore) firstMessages(t *tx, isWanted func(m *setAsideMessage) bool) map[queueKey]*setAsideMessage {
	firsts := map[queueKey]*setAsideMessage{}
	s.scanMessages(t, func(m *setAsideMessage) {
		key := queueKey{m.Place, m.Queue}
		if isWanted(m) && (firsts[key] == nil || compareInQueue(m, firsts[key]) < 0) {
			firsts[key] = m
		}
	})
	return firsts
}

// Waiting returns those of the queues that have messages.
func (s *setAsideStore) Waiting(ctx context.Context, p setaside.Place, queues []setaside.Digest) (found []setaside.Digest, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		found = nil
		s.scanMessages(t, func(m *setAsideMessage) {
			if m.Place == p && slices.Contains(queues, m.Queue) && !slices.Contains(found, m.Queue) {
				found = append(found, m.Queue)
			}
		})
		return nil
	})
	return found, err
}

// Count returns how many messages of a handler are set aside.
func (s *setAsideStore) Count(ctx context.Context, handler string, limit int) (n int, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		n = 0
		s.scanMessages(t, func(m *setAsideMessage) {
			if m.Handler == handler && n < limit {
				n++
			}
		})
		return nil
	})
	return n, err
}

// Failing returns how many queues of a handler have a message that failed.
func (s *setAsideStore) Failing(ctx context.Context, handler string, limit int) (n int, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		queues := map[queueKey]bool{}
		s.scanMessages(t, func(m *setAsideMessage) {
			if m.Handler == handler && !m.due.IsZero() {
				queues[queueKey{m.Place, m.Queue}] = true
			}
		})
		n = min(len(queues), limit)
		return nil
	})
	return n, err
}

// Oldest returns the time since the first failure of the handler's oldest message.
func (s *setAsideStore) Oldest(ctx context.Context, handler string) (age time.Duration, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		age = 0
		s.scanMessages(t, func(m *setAsideMessage) {
			if m.Handler == handler && !m.since.IsZero() {
				age = max(age, time.Since(m.since), time.Millisecond)
			}
		})
		return nil
	})
	return age, err
}

// Handlers returns the handlers of a group that have messages.
func (s *setAsideStore) Handlers(ctx context.Context, group string) (names []string, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		names = nil
		s.scanMessages(t, func(m *setAsideMessage) {
			if strings.HasPrefix(m.Handler, group+"/") {
				names = append(names, m.Handler)
			}
		})
		return nil
	})
	slices.Sort(names)
	return slices.Compact(names), err
}

// Requeued returns the queues of a group with requeued messages.
func (s *setAsideStore) Requeued(ctx context.Context, group string) (queues []setaside.Queue, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		queues = nil
		s.scanMessages(t, func(m *setAsideMessage) {
			q := setaside.Queue{Place: m.Place, Digest: m.Queue}
			if m.Requeued && strings.HasPrefix(m.Handler, group+"/") && !slices.Contains(queues, q) {
				queues = append(queues, q)
			}
		})
		return nil
	})
	return queues, err
}

// Stored returns those of the ids that messages have.
func (s *setAsideStore) Stored(ctx context.Context, ids []setaside.Digest) (found []setaside.Digest, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		found = nil
		for _, id := range ids {
			if t.getRow(s.rows, string(id[:])) != nil {
				found = append(found, id)
			}
		}
		return nil
	})
	return found, err
}
