package memory

import (
	"cmp"
	"context"
	"slices"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// Letters keeps the dead letters of consumers in a DB: consumer.Letters takes it. It is safe for concurrent use.
type Letters struct {
	db   *DB
	rows *rows
}

var _ consumer.LetterStore = (*Letters)(nil)

// NewLetters makes a store in db.
func NewLetters(db *DB) *Letters {
	return &Letters{db: db, rows: db.table(consumer.DefaultLetters)}
}

// Put is consumer.LetterStore's.
func (s *Letters) Put(ctx context.Context, l *consumer.Letter) error {
	return s.db.do(ctx, func(t *tx) error {
		key := l.ID.String()
		if t.get(s.rows, key) != nil {
			return nil
		}
		kept := copyLetter(l)
		kept.MovedAt = s.db.clock.Now()
		return t.put(s.rows, key, kept)
	})
}

func copyLetter(l *consumer.Letter) *consumer.Letter {
	c := *l
	c.Key, c.Value = slices.Clone(l.Key), slices.Clone(l.Value)
	c.Headers, c.History = slices.Clone(l.Headers), slices.Clone(l.History)
	for i := range c.Headers {
		c.Headers[i].Value = slices.Clone(c.Headers[i].Value)
	}
	return &c
}

// All are the letters, the earliest first.
func (s *Letters) All(ctx context.Context) (list []consumer.Letter, err error) {
	err = s.db.do(ctx, func(t *tx) error {
		list = nil
		t.scan(s.rows, func(_ string, v any) { list = append(list, *copyLetter(v.(*consumer.Letter))) })
		return nil
	})
	slices.SortStableFunc(list, func(a, b consumer.Letter) int {
		return cmp.Or(a.MovedAt.Compare(b.MovedAt), cmp.Compare(a.Offset, b.Offset))
	})
	return list, err
}
