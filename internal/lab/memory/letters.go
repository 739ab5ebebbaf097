package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/lettercount"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// letterStore stores the dead letters of consumers. Package deadletter has its interface.
type letterStore struct {
	db   *DB
	rows *storedTable
}

// NewLetters returns the dead letters of the consumers of db, with the options of package deadletter. WithCollection and
// WithExpiry have no effect.
func NewLetters(db *DB, opts ...deadletter.Option) (*deadletter.Desk, error) {
	store := &letterStore{db: db, rows: db.findOrAddTable(deadletter.DefaultCollection)}
	return deadletter.NewOver(module.Key{}, store, newSetAsideStore(db), opts...)
}

// Letters returns the dead letters of consumers in the DB.
func (x *Inbox) Letters(opts []deadletter.Option) (*deadletter.Desk, error) {
	return NewLetters(x.db, opts...)
}

// EnsureIndexes does nothing: a DB has no indexes.
func (s *letterStore) EnsureIndexes(context.Context) error { return nil }

// Transaction runs fn in a transaction of the DB.
func (s *letterStore) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	return s.db.Transaction(ctx, fn)
}

// Put stores a letter, unless there is one with this id. It replaces only one of a handler that was requeued or discarded.
func (s *letterStore) Put(ctx context.Context, letter *deadletter.Letter) error {
	return s.db.runOperation(ctx, func(tx *tx) error {
		key := letter.ID.String()
		before, ok := tx.getRow(s.rows, key).(*deadletter.Letter)
		if ok && (before.ID.Handler == "" || before.Requeued == nil && before.Archived == nil) {
			return nil
		}
		stored := copyLetter(letter)
		stored.GivenUpAt = time.Now().Truncate(time.Millisecond).UTC() // as MongoDB
		return tx.putRow(s.rows, key, &stored)
	})
}

// copyLetter returns a copy that shares no memory with letter.
func copyLetter(letter *deadletter.Letter) deadletter.Letter {
	copied := *letter
	copied.Key = bytes.Clone(letter.Key)
	copied.Value = bytes.Clone(letter.Value)
	copied.Headers = slices.Clone(letter.Headers)
	copied.History = slices.Clone(letter.History)

	for i := range copied.Headers {
		copied.Headers[i].Value = bytes.Clone(copied.Headers[i].Value)
	}

	if letter.Requeued != nil {
		requeued := *letter.Requeued
		requeued.Handlers = slices.Clone(requeued.Handlers)
		copied.Requeued = &requeued
	}

	return copied
}

// Get reads one letter.
func (s *letterStore) Get(ctx context.Context, id deadletter.ID) (deadletter.Letter, error) {
	return runResult(ctx, s.db, func(tx *tx) (deadletter.Letter, error) {
		stored, ok := tx.getRow(s.rows, id.String()).(*deadletter.Letter)
		if !ok {
			return deadletter.Letter{}, fmt.Errorf("%w: %s", deadletter.ErrNotFound, id)
		}
		return copyLetter(stored), nil
	})
}

// FindLatest returns the latest letters that query selects.
func (s *letterStore) FindLatest(ctx context.Context, query deadletter.Query, after *deadletter.Letter, limit int) ([]deadletter.Letter, error) {
	return s.findOrdered(ctx, query, compareLetters, after, limit)
}

// FindOldest returns the oldest letters that query selects.
func (s *letterStore) FindOldest(ctx context.Context, query deadletter.Query, after *deadletter.Letter, limit int) ([]deadletter.Letter, error) {
	return s.findOrdered(ctx, query, func(a, b *deadletter.Letter) int { return compareLetters(b, a) }, after, limit)
}

func (s *letterStore) findOrdered(
	ctx context.Context, query deadletter.Query, order func(a, b *deadletter.Letter) int, after *deadletter.Letter, limit int,
) (list []deadletter.Letter, err error) {
	list, err = readSnapshot(ctx, s.db, func(tx *tx) (list []deadletter.Letter) {
		for _, l := range rowsOf[*deadletter.Letter](tx, s.rows) {
			if isSelected(&query, l) && (after == nil || order(after, l) < 0) {
				letter := copyLetter(l)
				if query.NoValues {
					letter.Value = nil
				}
				list = append(list, letter)
			}
		}
		return list
	})
	slices.SortFunc(list, func(a, b deadletter.Letter) int { return order(&a, &b) })
	return list[:min(len(list), limit)], err
}

// compareLetters orders letters, the latest first.
func compareLetters(a, b *deadletter.Letter) int {
	return cmp.Or(b.GivenUpAt.Compare(a.GivenUpAt), strings.Compare(a.ID.String(), b.ID.String()))
}

// isSelected reports whether query selects letter.
func isSelected(query *deadletter.Query, letter *deadletter.Letter) bool {
	for _, c := range [][2]string{
		{query.Group, letter.ID.Group},
		{query.Handler, letter.ID.Handler},
		{query.Class, letter.Class},
		{query.Name, letter.Name},
		{query.AggregateType, letter.Aggregate.Type},
		{query.Topic, letter.ID.Topic},
		{query.Fingerprint, failureOf(letter).Fingerprint},
	} {
		if c[0] != "" && c[0] != c[1] {
			return false
		}
	}

	isNamed := query.IDs == nil && query.Messages == nil || slices.Contains(query.IDs, letter.ID) || slices.Contains(query.Messages, letter.ID.Message)
	return isNamed &&
		(query.Key == nil || letter.Key != nil && bytes.Equal(query.Key, letter.Key)) &&
		strings.HasPrefix(letter.Reason, query.Reason) &&
		!letter.GivenUpAt.Before(query.From) && (query.Before.IsZero() || letter.GivenUpAt.Before(query.Before)) &&
		(query.Requeued == nil || *query.Requeued == (letter.Requeued != nil)) && query.Archived == (letter.Archived != nil)
}

// Count counts the letters that query selects.
func (s *letterStore) Count(ctx context.Context, query deadletter.Query) (int64, error) {
	n := int64(0)
	list, err := s.Summarize(ctx, query)
	for _, g := range list {
		n += g.Count
	}
	return n, err
}

// failureOf returns the failure of a letter.
func failureOf(letter *deadletter.Letter) record.Failure {
	return lettercount.FailureOf(letter.Reason, letter.ID.Group, letter.ID.Handler, letter.Class, letter.ID.Topic, letter.Name)
}

// Summarize counts the letters that query selects by their failure.
func (s *letterStore) Summarize(ctx context.Context, query deadletter.Query) (list []deadletter.Summary, err error) {
	list, err = readSnapshot(ctx, s.db, func(tx *tx) (list []deadletter.Summary) {
		for _, l := range rowsOf[*deadletter.Letter](tx, s.rows) {
			if isSelected(&query, l) {
				list = addToSummary(list, l)
			}
		}
		return list
	})
	slices.SortStableFunc(list, func(a, b deadletter.Summary) int { return cmp.Compare(b.Count, a.Count) })
	return list, err
}

// addToSummary counts letter in its group, which it adds if it is missing.
func addToSummary(list []deadletter.Summary, letter *deadletter.Letter) []deadletter.Summary {
	failure := failureOf(letter)
	i := slices.IndexFunc(list, func(summary deadletter.Summary) bool { return summary.Fingerprint == failure.Fingerprint })
	if i < 0 {
		i = len(list)
		list = append(list, deadletter.Summary{
			Group: letter.ID.Group, Handler: letter.ID.Handler, Topic: letter.ID.Topic, Name: letter.Name, Class: letter.Class,
			Failure: failure.Message, Fingerprint: failure.Fingerprint, First: letter.GivenUpAt, Last: letter.GivenUpAt,
		})
	}

	summary := &list[i]
	summary.Count++
	if letter.Requeued != nil {
		summary.Requeued++
	}
	if letter.GivenUpAt.Before(summary.First) {
		summary.First = letter.GivenUpAt
	}
	if letter.GivenUpAt.After(summary.Last) {
		summary.Last = letter.GivenUpAt
	}
	return list
}

// MarkRequeued stores the mark of each letter that query still selects.
func (s *letterStore) MarkRequeued(ctx context.Context, query deadletter.Query, marks map[deadletter.ID]deadletter.Requeued) ([]deadletter.ID, error) {
	return runResult(ctx, s.db, func(tx *tx) (marked []deadletter.ID, err error) {
		for id, mark := range marks {
			stored, ok := tx.getRow(s.rows, id.String()).(*deadletter.Letter)
			if !ok || !isSelected(&query, stored) {
				continue
			}
			changed := copyLetter(stored)
			mark.At = time.Now()
			changed.Requeued = &mark
			if err := tx.putRow(s.rows, id.String(), &changed); err != nil {
				return nil, err
			}
			marked = append(marked, id)
		}
		return marked, nil
	})
}

// Archive marks the letters that query still selects as discarded. A DB does not delete them later.
func (s *letterStore) Archive(
	ctx context.Context, query deadletter.Query, letters []deadletter.Letter, actor string, keep time.Duration,
) (int64, error) {
	return runResult(ctx, s.db, func(tx *tx) (archived int64, err error) {
		now := time.Now()
		until := now.Add(keep)
		for i := range letters {
			key := letters[i].ID.String()
			stored, ok := tx.getRow(s.rows, key).(*deadletter.Letter)
			if !ok || !isSelected(&query, stored) {
				continue
			}
			changed := copyLetter(stored)
			changed.Archived, changed.ExpireAt = &deadletter.Archived{At: now, Actor: actor}, &until
			if err := tx.putRow(s.rows, key, &changed); err != nil {
				return archived, err
			}
			archived++
		}
		return archived, nil
	})
}

// Delete deletes the letters that query still selects.
func (s *letterStore) Delete(ctx context.Context, query deadletter.Query, letters []deadletter.Letter) (int64, error) {
	return runResult(ctx, s.db, func(tx *tx) (int64, error) {
		var keys []string
		for i := range letters {
			key := letters[i].ID.String()
			if stored, ok := tx.getRow(s.rows, key).(*deadletter.Letter); ok && isSelected(&query, stored) {
				keys = append(keys, key)
			}
		}
		return tx.removeRows(s.rows, keys...)
	})
}
