package mongodb

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// slowRuns is how often a transaction is attempted before it is made smaller: it has to end within what is left of a lease, and
// with a slow server one of many documents never would.
const slowRuns = 3

// ErrSlow ends the attempts at a transaction that should be smaller.
var ErrSlow = errors.New("the transaction does not end in time")

// FencedSoon is f.Fenced of a transaction of n documents; where there are several, and a few attempts were in vain, it is [ErrSlow].
func FencedSoon(ctx context.Context, f Fencer, dirty []string, n int, fn func(ctx context.Context) error) error {
	runs := 0
	return f.Fenced(ctx, dirty, func(tx context.Context) error {
		if runs++; runs > slowRuns && n > 1 {
			return ErrSlow
		}
		return fn(tx)
	})
}

// growAfter is after how many transactions that have ended in time the next may be larger again.
const growAfter = 8

// PartSize is how much goes into one fenced transaction: less after [ErrSlow], and more again when some have ended in time. It is for one
// goroutine; of several parts that are written one after the other, all have the same.
type PartSize struct {
	top, most int
	ended     int // in time, since most was changed
}

// NewPartSize begins with top, which is never exceeded.
func NewPartSize(top int) *PartSize { return &PartSize{top: top, most: top} }

// Most is how much the next transaction may hold.
func (s *PartSize) Most() int { return s.most }

// Slow says that a transaction of n was attempted in vain.
func (s *PartSize) Slow(n int) { s.most, s.ended = max(n/4, 1), 0 }

// Ended says that a transaction has ended in time.
func (s *PartSize) Ended() {
	if s.ended++; s.ended == growAfter {
		s.most, s.ended = min(2*s.most, s.top), 0
	}
}

// ErrNoTransaction says that a Fencer ran its function without a transaction.
var ErrNoTransaction = errors.New("this is written in a transaction only")

// Parts is how a list is written in fenced transactions.
type Parts[T any] struct {
	Top   int                                                       // the most that one transaction holds
	Fits  func(list []T, limit int) int                             // how much of a list goes into one, at least one and at most limit; nil: limit
	Dirty func(part []T) []string                                   // what is entered in `dirty` with it; nil: nothing
	Write func(tx context.Context, c *mongo.Client, part []T) error // may run several times, and has to be idempotent
}

// WriteInParts writes a list in fenced transactions, each majority committed before the next begins. One that is attempted in vain is made
// smaller.
func WriteInParts[T any](ctx context.Context, f Fencer, list []T, p Parts[T]) error {
	for size := NewPartSize(p.Top); len(list) > 0; {
		n := min(len(list), size.Most())
		if p.Fits != nil {
			n = p.Fits(list, n)
		}
		part := list[:n]
		var dirty []string
		if p.Dirty != nil {
			dirty = p.Dirty(part)
		}
		err := FencedSoon(ctx, f, dirty, n, func(tx context.Context) error {
			s := mongo.SessionFromContext(tx)
			if s == nil {
				return ErrNoTransaction
			}
			return p.Write(tx, s.Client(), part)
		})
		if errors.Is(err, ErrSlow) {
			size.Slow(n)
			continue
		}
		if err != nil {
			return err
		}
		size.Ended()
		list = list[n:]
	}
	return nil
}
