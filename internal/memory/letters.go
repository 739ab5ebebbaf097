package memory

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// Letters stores the dead letters of consumers in a DB. Pass it to consumer.Letters. It is safe for
// concurrent use.
type Letters struct {
	db   *DB
	rows *storedTable
}

var _ consumer.LetterStore = (*Letters)(nil)

// NewLetters returns the dead letters in db.
func NewLetters(db *DB) *Letters {
	return &Letters{db: db, rows: db.findOrAddTable(consumer.DefaultLetters)}
}

// Put stores a letter: see consumer.LetterStore. If a letter with this id exists, it stays.
func (s *Letters) Put(ctx context.Context, l *consumer.Letter) error {
	return s.db.runOperation(ctx, func(t *tx) error {
		key := l.ID.String()
		if t.getRow(s.rows, key) != nil {
			return nil
		}

		stored := copyLetter(l)
		stored.MovedAt = time.Now()
		return t.putRow(s.rows, key, stored)
	})
}

// copyLetter returns a copy that shares no memory with l.
func copyLetter(l *consumer.Letter) *consumer.Letter {
	c := *l
	c.Key = slices.Clone(l.Key)
	c.Value = slices.Clone(l.Value)
	c.Headers = slices.Clone(l.Headers)
	c.History = slices.Clone(l.History)
	for i := range c.Headers {
		c.Headers[i].Value = slices.Clone(c.Headers[i].Value)
	}
	return &c
}

// All returns the letters, the earliest first.
func (s *Letters) All(ctx context.Context) (list []consumer.Letter, err error) {
	err = s.db.runOperation(ctx, func(t *tx) error {
		list = nil
		t.scanRows(s.rows, func(_ string, v any) { list = append(list, *copyLetter(v.(*consumer.Letter))) })
		return nil
	})

	slices.SortStableFunc(list, func(a, b consumer.Letter) int {
		return cmp.Or(a.MovedAt.Compare(b.MovedAt), cmp.Compare(a.Offset, b.Offset))
	})
	return list, err
}
