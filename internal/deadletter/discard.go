package deadletter

import (
	"context"
	"fmt"
	"math"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
)

// Discard removes the letters of one outbox that match and were there when it began, and returns how many. It takes no
// fence: no envelope changes. Each part of at most [MaxLetters] is one write with majority; after a crash in the middle the
// same call removes the rest. did, if not nil, hears the sum after each.
func (k Desk) Discard(ctx context.Context, ns string, q Query, did func(int64)) (int64, error) {
	now, err := store.ServerTime(ctx, k.client())
	if err != nil {
		return 0, err
	}
	if q, err = q.guarded(now); err != nil {
		return 0, err
	}
	dead, err := of(k.client(), ns)
	if err != nil {
		return 0, err
	}
	if err := store.CatchUp(ctx, dead); err != nil {
		return 0, err
	}
	var total int64
	for s := (&scan{dead: dead, filter: q.filter()}); ; {
		part, err := s.places(ctx, MaxLetters, math.MaxInt)
		if err != nil || len(part) == 0 {
			return total, err
		}
		ids := make([]ID, len(part))
		chunks := bson.A{}
		for i, p := range part {
			ids[i] = p.ID
			for n := range p.Chunks {
				chunks = append(chunks, chunkID{p.ID, n})
			}
		}
		// Chunks first: a crash between leaves a letter that says so, and not chunks that nobody finds.
		if len(chunks) > 0 {
			if _, err := dead.DeleteMany(ctx, in("_id", chunks)); err != nil {
				return total, fmt.Errorf("discarding from %s: %w", store.Namespace(dead), err)
			}
		}
		// One that was requeued meanwhile may not match any more.
		res, err := dead.DeleteMany(ctx, and(in("_id", ids), q.filter()))
		if err != nil {
			return total, fmt.Errorf("discarding from %s: %w", store.Namespace(dead), err)
		}
		if total += res.DeletedCount; did != nil {
			did(total)
		}
	}
}
