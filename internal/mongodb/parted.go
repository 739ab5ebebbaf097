package mongodb

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// slowRuns is the number of attempts at a transaction before it is made smaller. The transaction has to end
// within the rest of a lease. If the server is slow, a transaction of many documents would never end in time.
const slowRuns = 3

// ErrSlow ends the attempts at a transaction that should be smaller.
var ErrSlow = errors.New("the transaction does not end in time")

// LimitRuns returns fn, the body of a transaction, with a limit: after a few attempts that fail, it returns [ErrSlow]. Every
// transaction in an outbox has this limit, because a service may have locked a document or the whole collection.
func LimitRuns(fn func(tx context.Context) error) func(tx context.Context) error {
	runs := 0
	return func(tx context.Context) error {
		if runs++; runs > slowRuns {
			return ErrSlow
		}
		return fn(tx)
	}
}

// LimitStateRuns is LimitRuns for a transaction of n documents of the state database. There is no smaller one than that of a
// single document, which has to be stored.
func LimitStateRuns(n int, fn func(tx context.Context) error) func(tx context.Context) error {
	if n <= 1 {
		return fn
	}
	return LimitRuns(fn)
}

// growAfter is the number of transactions that have to end in time before the next may be larger again.
const growAfter = 8

// PartSize is the size of one fenced transaction. It shrinks after [ErrSlow], and grows again after some
// transactions have ended in time. Only one goroutine may use it. Parts that are written one after the other
// share one PartSize.
type PartSize struct {
	top, most int
	ended     int // transactions that ended in time since most was changed
}

// NewPartSize returns a PartSize that begins with top and never exceeds it.
func NewPartSize(top int) *PartSize { return &PartSize{top: top, most: top} }

// Most returns the most that the next transaction may hold.
func (s *PartSize) Most() int { return s.most }

// Slow records that the attempts at a transaction of n failed.
func (s *PartSize) Slow(n int) { s.most, s.ended = max(n/4, 1), 0 }

// Ended records that a transaction has ended in time.
func (s *PartSize) Ended() {
	if s.ended++; s.ended == growAfter {
		s.most, s.ended = min(2*s.most, s.top), 0
	}
}

// errNoTransaction means that a Fencer ran its function without a transaction.
var errNoTransaction = errors.New("the write needs a transaction")

// Bounds of one fenced transaction (N3). A single larger document is written alone.
const (
	MaxDocuments = 1000
	MaxBytes     = 8 << 20
)

// Parts describes how [WriteInParts] writes a list.
type Parts[T any] struct {
	// Doing names the purpose in errors.
	Doing string
	// PartSize is the size of the transactions, which all lists that share it adapt. If it is nil, the list has a size of its own.
	PartSize *PartSize
	// Size returns the bytes of a document. If it is nil, the documents are small.
	Size func(doc *T) int
	// Write writes a part. It may run several times, so it must be idempotent.
	Write func(tx context.Context, c *mongo.Client, part []T) error
	// Written is called when the last run of Write is committed. It may be nil.
	Written func()
}

// CountFitting returns how many documents of list fit one transaction: at most limit, and at most [MaxBytes],
// but at least one.
func CountFitting[T any](list []T, limit int, size func(doc *T) int) int {
	bytes := 0
	for i := range list {
		if size != nil {
			bytes += size(&list[i])
		}
		if i == limit || i > 0 && bytes > MaxBytes {
			return i
		}
	}
	return len(list)
}

// splitWrites calls write with one part of list after the other. If write returns [ErrSlow], the next part begins with the same
// elements and is smaller. size has the number of elements of a part. bytes is as in [Parts.Size].
func splitWrites[T any](size *PartSize, list []T, bytes func(doc *T) int, write func(part []T) error) error {
	for len(list) > 0 {
		part := list[:CountFitting(list, size.Most(), bytes)]
		err := write(part)
		if errors.Is(err, ErrSlow) {
			size.Slow(len(part))
			continue
		}
		if err != nil {
			return err
		}

		size.Ended()
		list = list[len(part):]
	}
	return nil
}

// WriteInParts writes a list in fenced transactions. Each is majority committed before the next begins. If
// the attempts at a transaction fail, the next one is smaller.
func WriteInParts[T any](ctx context.Context, fencer Fencer, list []T, parts Parts[T]) error {
	size := parts.PartSize
	if size == nil {
		size = NewPartSize(MaxDocuments)
	}

	err := splitWrites(size, list, parts.Size, func(part []T) error {
		err := fencer.Fenced(ctx, nil, LimitStateRuns(len(part), func(tx context.Context) error {
			session := mongo.SessionFromContext(tx)
			if session == nil {
				return errNoTransaction
			}
			return parts.Write(tx, session.Client(), part)
		}))
		if err == nil && parts.Written != nil {
			parts.Written()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", parts.Doing, err)
	}
	return nil
}
