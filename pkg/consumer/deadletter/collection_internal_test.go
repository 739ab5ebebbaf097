package deadletter

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// A letter that is requeued after a discard has read it stays whole, and does not count as discarded.
func TestALetterThatIsRequeuedMeanwhileIsNotDiscarded(t *testing.T) {
	t.Parallel()
	notRequeued := false
	query := Query{Group: "g", Requeued: &notRequeued, NoValues: true}
	for name, discard := range map[string]func(ctx context.Context, c *collection, page []Letter) (int64, error){
		"archive": func(ctx context.Context, c *collection, page []Letter) (int64, error) {
			return c.Archive(ctx, query, page, "bob", time.Hour)
		},
		"delete": func(ctx context.Context, c *collection, page []Letter) (int64, error) {
			return c.Delete(ctx, query, page)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			c := newCollection(stacktest.Database(t, stacktest.Client(t)), DefaultCollection, 0)
			size := maxInline + 1
			for offset := range int64(2) {
				letter := Letter{ID: ID{Group: "g", Handler: "h", Offset: offset}, Class: ClassHandler, Value: make([]byte, size), Size: size}
				if err := c.Put(ctx, &letter); err != nil {
					t.Fatal(err)
				}
			}
			page, err := c.FindLatest(ctx, query, nil, pageSize)
			if err != nil || len(page) != 2 {
				t.Fatalf("%d letters, %v", len(page), err)
			}

			err = c.Transaction(ctx, func(ctx context.Context) error {
				_, err := c.MarkRequeued(ctx, query, map[ID]Requeued{page[0].ID: {Actor: "ann", Handlers: []string{"h"}}})
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if n, err := discard(ctx, c, page); n != 1 || err != nil {
				t.Errorf("%d discarded, %v, want 1", n, err)
			}

			// The requeued letter keeps its chunks.
			letter, err := c.Get(ctx, page[0].ID)
			if err != nil || letter.Requeued == nil || letter.Archived != nil || len(letter.Value) != size {
				t.Errorf("the requeued letter: requeued %+v, archived %+v, %d bytes, %v", letter.Requeued, letter.Archived, len(letter.Value), err)
			}
			lasting, err := c.coll.CountDocuments(ctx, bson.D{{Key: "_id.offset", Value: page[0].ID.Offset}, {Key: "expireAt", Value: nil}})
			if lasting != 3 || err != nil {
				t.Errorf("%d documents of the requeued letter do not expire, %v, want 3", lasting, err)
			}
		})
	}
}
