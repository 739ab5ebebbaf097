package store

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// hasty runs transactions as a lease does whose server is slow: one that writes more than most documents does not end in time,
// and is tried again, for as long as it takes.
type hasty struct {
	coll *mongo.Collection
	most int64
	had  int64 // documents that are committed
	runs int
}

func (h *hasty) Fenced(ctx context.Context, _ []string, fn func(context.Context) error) error {
	errLate := errors.New("late")
	for {
		h.runs++
		n := h.had
		err := h.coll.Database().Client().UseSession(ctx, func(ctx context.Context) error {
			_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(tx context.Context) (any, error) {
				err := fn(tx)
				if err == nil {
					n, err = h.coll.Database().Collection(h.coll.Name()).CountDocuments(tx, bson.D{})
				}
				if err == nil && n-h.had > h.most {
					err = errLate
				}
				return nil, err
			})
			return err
		})
		if err == nil {
			h.had = n
			return nil
		}
		if !errors.Is(err, errLate) || ctx.Err() != nil {
			return err
		}
	}
}

// N3: what is too much for one transaction, because the server is slow and the lease short, is written in smaller ones; else it
// would be tried for ever, and the watermark stand still.
func TestN03_ATransactionThatNeverEndsInTimeIsMadeSmaller(t *testing.T) {
	t.Parallel()
	coll, _ := exceptionOutbox(t)
	var list []Exception
	for i := range 300 {
		list = append(list, Exception{
			NS: Namespace(coll), State: "parked", Pos: fmt.Sprintf("82%08X", i), Pending: []string{"a"}, Key: "k",
			Raw: image(t, bson.D{{Key: "_id", Value: fmt.Sprint(i)}, {Key: "aggregateid", Value: "k"}}),
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	h := &hasty{coll: coll, most: 40}
	if err := WriteExceptions(ctx, h, list); err != nil {
		t.Fatalf("after %d runs: %v", h.runs, err)
	}
	if h.had != 300 {
		t.Errorf("%d of 300 are written", h.had)
	}
}
