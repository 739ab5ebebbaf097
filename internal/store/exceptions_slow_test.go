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
	had  int64  // documents that are committed
	what bson.D // which of them are meant; nil is all
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
					n, err = h.coll.Database().Collection(h.coll.Name()).CountDocuments(tx, append(bson.D{}, h.what...))
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
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	h := &hasty{coll: coll, most: 40}
	if err := WriteExceptions(ctx, h, list); err != nil {
		t.Fatalf("after %d runs: %v", h.runs, err)
	}
	if h.had != 300 {
		t.Errorf("%d of 300 are written", h.had)
	}
}

// The same of what is recorded of deliveries, and of claims, whose owner is told to take fewer.
func TestN03_WhatWasSentIsRecordedInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	coll, _ := exceptionOutbox(t)
	sent := fill(t, coll, 300)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	h := &hasty{coll: coll, most: 40, what: bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}}
	if err := RecordSent(ctx, h, RecordMark, sent); err != nil {
		t.Fatalf("after %d runs: %v", h.runs, err)
	}
	if h.had != 300 || marked(t, coll) != 300 {
		t.Errorf("%d of 300 are recorded", h.had)
	}
	due := Due{Coll: coll}
	for _, s := range sent {
		due.IDs = append(due.IDs, s.ID)
	}
	if _, err := coll.UpdateMany(ctx, bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: time.UnixMilli(1)}}}}); err != nil {
		t.Fatal(err)
	}
	claims := &hasty{coll: coll, most: 40, what: bson.D{{Key: "claim.token", Value: "t"}}}
	if err := ClaimDue(ctx, claims, DueClaim{Token: "t", Epoch: 1}, time.Now(), []Due{due}); !errors.Is(err, ErrSlow) {
		t.Errorf("300 claims at once: %v", err)
	}
}

// The same of what a take-over writes: it would never be over.
func TestN03_ATakeOverWritesWhatEndsInTime(t *testing.T) {
	t.Parallel()
	const all = 120
	for name, write := range map[string]struct {
		doc, done bson.D
		run       func(ctx context.Context, f Fencer, coll *mongo.Collection, ids []bson.RawValue) error
	}{
		"exceptions that wait for more": {
			doc:  bson.D{{Key: "state", Value: "parked"}, {Key: "pending", Value: bson.A{"a"}}},
			done: bson.D{{Key: "pending", Value: "b"}},
			run: func(ctx context.Context, f Fencer, coll *mongo.Collection, ids []bson.RawValue) error {
				var list []Wider
				for _, id := range ids {
					list = append(list, Wider{NS: Namespace(coll), ID: id, Topics: []string{"b"}})
				}
				return WidenExceptions(ctx, f, list)
			},
		},
		"claims of another life": {
			doc:  bson.D{{Key: "claim", Value: bson.D{{Key: "epoch", Value: int64(9)}}}},
			done: bson.D{{Key: "claim.epoch", Value: int64(1)}},
			run: func(ctx context.Context, f Fencer, coll *mongo.Collection, ids []bson.RawValue) error {
				return DisownClaims(ctx, f, coll, 2, ids)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			coll, _ := exceptionOutbox(t)
			var ids []bson.RawValue
			var docs []any
			for i := range all {
				_, id, err := bson.MarshalValue(fmt.Sprint(i))
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, bson.RawValue{Type: bson.TypeString, Value: id})
				docs = append(docs, append(bson.D{{Key: "_id", Value: fmt.Sprint(i)}}, write.doc...))
			}
			if _, err := coll.InsertMany(t.Context(), docs); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			h := &hasty{coll: coll, most: 40, what: write.done}
			if err := write.run(ctx, h, coll, ids); err != nil {
				t.Fatalf("after %d runs: %v", h.runs, err)
			}
			if h.had != all {
				t.Errorf("%d of %d are written", h.had, all)
			}
		})
	}
}
