package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/setaside"
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
	store := newSetAsideStore(db)
	return readSnapshot(ctx, db, func(tx *tx) (list []string) {
		for _, m := range store.firstMessages(tx, func(*setAsideMessage) bool { return true }) {
			if !m.due.After(time.Now()) {
				list = append(list, fmt.Sprintf("a message of handler %s is due: %s", m.Handler, record.FormatPlace(m.Topic, m.Partition, m.Offset)))
			}
		}
		return list
	})
}

// CountSetAside returns how many messages of a handler are set aside in db, for tests.
func CountSetAside(ctx context.Context, db *DB, handler string) (int, error) {
	store := newSetAsideStore(db)
	return readSnapshot(ctx, db, func(tx *tx) (n int) {
		for _, m := range rowsOf[*setAsideMessage](tx, store.rows) {
			if m.Handler == handler {
				n++
			}
		}
		return n
	})
}

// Add stores messages, due after wait.
func (s *setAsideStore) Add(ctx context.Context, wait time.Duration, messages ...*setaside.Message) error {
	for _, message := range messages {
		if err := message.CheckSize(); err != nil {
			return err
		}
	}
	return s.db.runOperation(ctx, func(tx *tx) error {
		for _, message := range messages {
			key := string(message.ID[:])
			if tx.getRow(s.rows, key) != nil {
				continue
			}

			stored := &setAsideMessage{Message: copySetAside(message)}
			if message.Failed > 0 {
				stored.since = time.Now().Add(-message.Elapsed)
				stored.due = time.Now().Add(wait)
			}
			if err := tx.putRow(s.rows, key, stored); err != nil {
				return err
			}
		}
		return nil
	})
}

// copySetAside returns a copy that shares no memory with message. As in BSON, an empty value is not a missing one.
func copySetAside(message *setaside.Message) setaside.Message {
	copied := *message
	copied.Key = bytes.Clone(message.Key)
	copied.Value = bytes.Clone(message.Value)
	copied.Headers = slices.Clone(message.Headers)
	for i := range copied.Headers {
		copied.Headers[i].Value = bytes.Clone(copied.Headers[i].Value)
	}
	copied.History = slices.Clone(message.History)
	return copied
}

// Postpone stores the attempts of message, makes it due after wait, and ends the requests for its queue.
func (s *setAsideStore) Postpone(ctx context.Context, message *setaside.Message, wait time.Duration) error {
	return s.db.runOperation(ctx, func(tx *tx) error {
		key := string(message.ID[:])
		stored, ok := tx.getRow(s.rows, key).(*setAsideMessage)
		if !ok {
			return nil
		}

		changed := *stored
		changed.Attempts = message.Attempts
		changed.History = slices.Clone(message.History)
		if changed.since.IsZero() {
			changed.since = time.Now().Add(-message.Elapsed)
		}
		changed.due = time.Now().Add(wait)
		changed.Requested = false
		if err := tx.putRow(s.rows, key, &changed); err != nil {
			return err
		}

		for _, m := range rowsOf[*setAsideMessage](tx, s.rows) {
			if !m.Requested || m.Discarded != nil || m.Place != stored.Place || m.Queue != stored.Queue {
				continue
			}
			next := *m
			next.Requested = false
			if err := tx.putRow(s.rows, string(m.ID[:]), &next); err != nil {
				return err
			}
		}
		return nil
	})
}

// First returns the first message of a queue.
func (s *setAsideStore) First(ctx context.Context, place setaside.Place, queue setaside.Digest) (*setaside.Message, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) *setaside.Message {
		first := s.firstOf(tx, queueKey{place, queue})
		if first == nil {
			return nil
		}
		found := copySetAside(&first.Message)
		if !first.since.IsZero() {
			found.Elapsed = max(0, time.Since(first.since))
		}
		return &found
	})
}

// firstOf returns the first message of a queue that tx sees, or nil.
func (s *setAsideStore) firstOf(tx *tx, key queueKey) *setAsideMessage {
	return s.firstMessages(tx, func(message *setAsideMessage) bool { return message.Place == key.Place && message.Queue == key.queue })[key]
}

// compareInQueue orders the messages of a queue.
func compareInQueue(a, b *setAsideMessage) int {
	return cmp.Or(cmp.Compare(a.Generation, b.Generation), cmp.Compare(a.Offset, b.Offset))
}

// Take deletes message if it is the first of its queue.
func (s *setAsideStore) Take(ctx context.Context, message *setaside.Message) (bool, error) {
	return runResult(ctx, s.db, func(tx *tx) (bool, error) {
		first := s.firstOf(tx, queueKey{message.Place, message.Queue})
		if first == nil || first.ID != message.ID {
			return false, nil
		}
		return true, tx.putRow(s.rows, string(message.ID[:]), nil)
	})
}

// Remove deletes message. It returns false if it does not exist.
func (s *setAsideStore) Remove(ctx context.Context, message *setaside.Message) (bool, error) {
	return runResult(ctx, s.db, func(tx *tx) (bool, error) {
		key := string(message.ID[:])
		if tx.getRow(s.rows, key) == nil {
			return false, nil
		}
		return true, tx.putRow(s.rows, key, nil)
	})
}

// Heads returns the queues of these places.
func (s *setAsideStore) Heads(ctx context.Context, places []setaside.Place) (heads []setaside.Head, err error) {
	isWanted := func(message *setAsideMessage) bool { return slices.Contains(places, message.Place) }
	return readSnapshot(ctx, s.db, func(tx *tx) (heads []setaside.Head) {
		for key, m := range s.firstMessages(tx, isWanted) {
			// Without a due time the wait is 0.
			wait := max(0, time.Until(m.due))
			heads = append(heads, setaside.Head{Queue: setaside.Queue{Place: key.Place, Digest: key.queue}, Wait: wait})
		}
		return heads
	})
}

// queueKey identifies a queue.
type queueKey struct {
	setaside.Place
	queue setaside.Digest
}

// firstMessages returns the first message of each queue, among the messages that are wanted.
func (s *setAsideStore) firstMessages(tx *tx, isWanted func(message *setAsideMessage) bool) map[queueKey]*setAsideMessage {
	firsts := map[queueKey]*setAsideMessage{}
	for _, m := range rowsOf[*setAsideMessage](tx, s.rows) {
		key := queueKey{m.Place, m.Queue}
		if isWanted(m) && (firsts[key] == nil || compareInQueue(m, firsts[key]) < 0) {
			firsts[key] = m
		}
	}
	return firsts
}

// Waiting returns those of the queues that have messages.
func (s *setAsideStore) Waiting(ctx context.Context, place setaside.Place, queues []setaside.Digest) ([]setaside.Digest, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) (found []setaside.Digest) {
		for _, m := range rowsOf[*setAsideMessage](tx, s.rows) {
			if m.Place == place && slices.Contains(queues, m.Queue) && !slices.Contains(found, m.Queue) {
				found = append(found, m.Queue)
			}
		}
		return found
	})
}

// Failing returns how many queues of a handler have a message that failed.
func (s *setAsideStore) Failing(ctx context.Context, handler string, limit int) (int, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) int {
		isFailing := func(message *setAsideMessage) bool { return message.Handler == handler && !message.due.IsZero() }
		return min(len(s.firstMessages(tx, isFailing)), limit)
	})
}

// census is the last count of a group, with the records of its members. It is never changed: a change stores a new one.
type census struct {
	by      string
	at      time.Time
	counts  []setaside.Count
	members setaside.Members
}

// Census returns how many messages of a group wait. As in MongoDB, one member counts for all others.
func (s *setAsideStore) Census(
	ctx context.Context, member setaside.Member,
	findUnread func(ctx context.Context, places []setaside.Place) ([]setaside.Place, error),
) (setaside.Census, error) {
	now := time.Now()
	last, err := s.readCensus(ctx, member.Group)
	if err != nil {
		return setaside.Census{}, err
	}

	if last.members.NeedRecord(member, now) {
		last, err = s.changeCensus(ctx, member.Group, func(changed *census) {
			changed.members[member.ID] = setaside.MemberRecord{At: now, Handlers: member.Handlers, Stops: member.Stops}
		})
		if err != nil {
			return setaside.Census{}, err
		}
	}

	late := now.Sub(last.at) >= 2*setaside.CensusInterval
	if late || last.by == member.ID && now.Sub(last.at) >= setaside.CensusInterval {
		places, err := s.countPlaces(ctx, member.Group)
		if err != nil {
			return setaside.Census{}, err
		}
		list := make([]setaside.Place, len(places))
		for i, p := range places {
			list[i] = p.Place
		}
		unread, err := findUnread(ctx, list)
		if err != nil {
			return setaside.Census{}, err
		}

		last, err = s.changeCensus(ctx, member.Group, func(changed *census) {
			changed.by, changed.at, changed.counts = member.ID, now, setaside.SumPlaces(places, unread)
		})
		if err != nil {
			return setaside.Census{}, err
		}
	}
	return setaside.Census{
		Counts: last.counts, At: last.at, Now: now, Keeper: last.by == member.ID, Handlers: last.members.ListHandlers(now),
	}, nil
}

// changeCensus stores a changed copy of the census of a group, and returns it.
func (s *setAsideStore) changeCensus(ctx context.Context, group string, change func(changed *census)) (*census, error) {
	table := s.censuses()
	return runResult(ctx, s.db, func(tx *tx) (*census, error) {
		changed := *findCensus(tx, table, group)
		changed.members = maps.Clone(changed.members)
		change(&changed)
		return &changed, tx.putRow(table, group, &changed)
	})
}

// findCensus returns the last count of a group that tx sees. Without one, its time is zero.
func findCensus(tx *tx, table *storedTable, group string) *census {
	if found, ok := tx.getRow(table, group).(*census); ok {
		return found
	}
	return &census{members: setaside.Members{}}
}

// censuses returns the table with the last count of each group.
func (s *setAsideStore) censuses() *storedTable {
	return s.db.findOrAddTable(setaside.DefaultCollection + setaside.CountsSuffix)
}

// readCensus returns the last count of a group: see findCensus.
func (s *setAsideStore) readCensus(ctx context.Context, group string) (*census, error) {
	table := s.censuses()
	return readSnapshot(ctx, s.db, func(tx *tx) *census { return findCensus(tx, table, group) })
}

// Handlers returns the names of the handlers of a group.
func (s *setAsideStore) Handlers(ctx context.Context, group string) ([]string, error) {
	last, err := s.readCensus(ctx, group)
	if err != nil {
		return nil, err
	}
	return last.members.ListHandlers(time.Now()), nil
}

// countPlaces counts the messages of a group at each place.
func (s *setAsideStore) countPlaces(ctx context.Context, group string) ([]setaside.PlaceCount, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) (list []setaside.PlaceCount) {
		for _, m := range rowsOf[*setAsideMessage](tx, s.rows) {
			if owner, _ := m.SplitHandler(); owner != group {
				continue
			}

			i := slices.IndexFunc(list, func(count setaside.PlaceCount) bool { return count.Place == m.Place })
			if i < 0 {
				i, list = len(list), append(list, setaside.PlaceCount{Place: m.Place})
			}

			count := &list[i]
			count.N++
			if !m.since.IsZero() && (count.Since.IsZero() || m.since.Before(count.Since)) {
				count.Since = m.since
			}
		}
		return list
	})
}

// Leave removes the record of a member.
func (s *setAsideStore) Leave(ctx context.Context, group, member string) error {
	_, err := s.changeCensus(ctx, group, func(changed *census) { delete(changed.members, member) })
	return err
}

// Requested returns the queues of a group for which operators have requested something.
func (s *setAsideStore) Requested(ctx context.Context, group string) ([]setaside.Request, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) (requests []setaside.Request) {
		for _, m := range rowsOf[*setAsideMessage](tx, s.rows) {
			if owner, _ := m.SplitHandler(); !m.Requested || owner != group {
				continue
			}
			queue := setaside.Queue{Place: m.Place, Digest: m.Queue}
			i := slices.IndexFunc(requests, func(request setaside.Request) bool { return request.Queue == queue })
			if i < 0 {
				i, requests = len(requests), append(requests, setaside.Request{Queue: queue})
			}
			if m.Discarded != nil {
				requests[i].Discards++
			}
		}
		return requests
	})
}

// Discarded returns the messages of a queue that operators have discarded.
func (s *setAsideStore) Discarded(ctx context.Context, queue setaside.Queue) ([]setaside.Message, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) (list []setaside.Message) {
		var found []*setAsideMessage
		for _, m := range rowsOf[*setAsideMessage](tx, s.rows) {
			if m.Discarded != nil && m.Place == queue.Place && m.Queue == queue.Digest {
				found = append(found, m)
			}
		}
		slices.SortFunc(found, compareInQueue)
		for _, m := range found[:min(len(found), setaside.MaxDiscarded)] {
			list = append(list, copySetAside(&m.Message))
		}
		return list
	})
}

// Stored returns those of the ids that messages have.
func (s *setAsideStore) Stored(ctx context.Context, ids []setaside.Digest) ([]setaside.Digest, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) (found []setaside.Digest) {
		for _, id := range ids {
			if tx.getRow(s.rows, string(id[:])) != nil {
				found = append(found, id)
			}
		}
		return found
	})
}
