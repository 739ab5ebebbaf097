package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/service/letterparts"
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
	return deadletter.NewOver(letterparts.Key{}, store, newSetAsideStore(db), opts...)
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

// Put stores a letter, unless there is one with this id that was not requeued.
func (s *letterStore) Put(ctx context.Context, l *deadletter.Letter) error {
	return s.db.runOperation(ctx, func(t *tx) error {
		key := l.ID.String()
		if before, ok := t.getRow(s.rows, key).(*deadletter.Letter); ok && before.Requeued == nil {
			return nil
		}
		stored := copyLetter(l)
		stored.GivenUpAt = time.Now().Truncate(time.Millisecond).UTC() // as MongoDB
		return t.putRow(s.rows, key, &stored)
	})
}

// copyLetter returns a copy that shares no memory with l.
func copyLetter(l *deadletter.Letter) deadletter.Letter {
	c := *l
	c.Key = bytes.Clone(l.Key)
	c.Value = bytes.Clone(l.Value)
	c.Headers = slices.Clone(l.Headers)
	c.History = slices.Clone(l.History)

	for i := range c.Headers {
		c.Headers[i].Value = bytes.Clone(c.Headers[i].Value)
	}

	if l.Requeued != nil {
		r := *l.Requeued
		r.Handlers = slices.Clone(r.Handlers)
		c.Requeued = &r
	}

	return c
}

// Get reads one letter.
func (s *letterStore) Get(ctx context.Context, id deadletter.ID) (deadletter.Letter, error) {
	return runResult(ctx, s.db, func(t *tx) (deadletter.Letter, error) {
		stored, ok := t.getRow(s.rows, id.String()).(*deadletter.Letter)
		if !ok {
			return deadletter.Letter{}, fmt.Errorf("%w: %s", deadletter.ErrNotFound, id)
		}
		return copyLetter(stored), nil
	})
}

// Find returns the first letters that q selects.
func (s *letterStore) Find(
	ctx context.Context, q deadletter.Query, after *deadletter.Letter, oldestFirst bool, limit int,
) (list []deadletter.Letter, err error) {
	order := compareLetters
	if oldestFirst {
		order = func(a, b *deadletter.Letter) int { return compareLetters(b, a) }
	}

	list, err = readSnapshot(ctx, s.db, func(t *tx) (list []deadletter.Letter) {
		for _, l := range rowsOf[*deadletter.Letter](t, s.rows) {
			if isSelected(&q, l) && (after == nil || order(after, l) < 0) {
				c := copyLetter(l)
				if q.NoValues {
					c.Value = nil
				}
				list = append(list, c)
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

// isSelected reports whether q selects l.
func isSelected(q *deadletter.Query, l *deadletter.Letter) bool {
	for _, c := range [][2]string{
		{q.Group, l.ID.Group},
		{q.Handler, l.ID.Handler},
		{q.Class, l.Class},
		{q.Name, l.Name},
		{q.AggregateType, l.Aggregate.Type},
		{q.Topic, l.ID.Topic},
	} {
		if c[0] != "" && c[0] != c[1] {
			return false
		}
	}

	return (len(q.IDs) == 0 || slices.Contains(q.IDs, l.ID)) &&
		(len(q.Messages) == 0 || slices.Contains(q.Messages, l.ID.Message)) &&
		(len(q.Key) == 0 || bytes.Equal(q.Key, l.Key)) &&
		strings.HasPrefix(l.Reason, q.Reason) &&
		!l.GivenUpAt.Before(q.From) && (q.Before.IsZero() || l.GivenUpAt.Before(q.Before)) &&
		(q.Requeued == nil || *q.Requeued == (l.Requeued != nil))
}

// Count counts the letters that q selects.
func (s *letterStore) Count(ctx context.Context, q deadletter.Query) (int64, error) {
	n := int64(0)
	list, err := s.Summarize(ctx, q)
	for _, g := range list {
		n += g.Count
	}
	return n, err
}

// Summarize counts the letters that q selects by group, handler, name and class.
func (s *letterStore) Summarize(ctx context.Context, q deadletter.Query) (list []deadletter.Summary, err error) {
	list, err = readSnapshot(ctx, s.db, func(t *tx) (list []deadletter.Summary) {
		for _, l := range rowsOf[*deadletter.Letter](t, s.rows) {
			if isSelected(&q, l) {
				list = addToSummary(list, l)
			}
		}
		return list
	})
	slices.SortStableFunc(list, func(a, b deadletter.Summary) int { return cmp.Compare(b.Count, a.Count) })
	return list, err
}

// addToSummary counts l in its group, which it adds if it is missing.
func addToSummary(list []deadletter.Summary, l *deadletter.Letter) []deadletter.Summary {
	i := slices.IndexFunc(list, func(g deadletter.Summary) bool {
		return g.Group == l.ID.Group && g.Handler == l.ID.Handler && g.Name == l.Name && g.Class == l.Class
	})
	if i < 0 {
		i = len(list)
		list = append(list, deadletter.Summary{
			Group: l.ID.Group, Handler: l.ID.Handler, Name: l.Name, Class: l.Class, First: l.GivenUpAt, Last: l.GivenUpAt,
		})
	}

	g := &list[i]
	g.Count++
	if l.Requeued != nil {
		g.Requeued++
	}
	if l.GivenUpAt.Before(g.First) {
		g.First = l.GivenUpAt
	}
	if l.GivenUpAt.After(g.Last) {
		g.Last = l.GivenUpAt
	}
	return list
}

// MarkRequeued stores by, unless the letter is marked already.
func (s *letterStore) MarkRequeued(ctx context.Context, id deadletter.ID, by deadletter.Requeued) (bool, error) {
	return runResult(ctx, s.db, func(t *tx) (bool, error) {
		stored, ok := t.getRow(s.rows, id.String()).(*deadletter.Letter)
		if !ok || stored.Requeued != nil {
			return false, nil
		}
		changed := copyLetter(stored)
		by.At = time.Now()
		changed.Requeued = &by
		return true, t.putRow(s.rows, id.String(), &changed)
	})
}

// Delete deletes letters.
func (s *letterStore) Delete(ctx context.Context, letters []deadletter.Letter) (int64, error) {
	keys := make([]string, len(letters))
	for i := range letters {
		keys[i] = letters[i].ID.String()
	}
	return runResult(ctx, s.db, func(t *tx) (int64, error) { return t.removeRows(s.rows, keys...) })
}
