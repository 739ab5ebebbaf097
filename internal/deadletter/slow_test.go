package deadletter

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/store"
)

// hasty attempts again and again what writes more than most documents, as a lease does whose server is slow.
type hasty struct {
	store.Fencer
	dead *mongo.Collection
	most int64
}

func (h *hasty) Fenced(ctx context.Context, dirty []string, fn func(context.Context) error) error {
	for {
		late := false
		err := h.Fencer.Fenced(ctx, dirty, func(tx context.Context) error {
			dead := mongo.SessionFromContext(tx).Client().Database(h.dead.Database().Name()).Collection(h.dead.Name())
			before, err := dead.CountDocuments(tx, bson.D{})
			if err == nil {
				err = fn(tx)
			}
			if err != nil {
				return err
			}
			n, err := dead.CountDocuments(tx, bson.D{})
			if late = err == nil && n-before > h.most; late {
				return context.Canceled
			}
			return err
		})
		if !late || ctx.Err() != nil {
			return err
		}
	}
}

// N3: letters are moved in smaller transactions where the server is too slow for one, else their keys would wait for ever; so are
// the chunks of a large one.
func TestN03_LettersAreMovedInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	letters := []Letter{b.add("large", bson.E{Key: "payload", Value: make([]byte, 15<<20+1)})}
	f := &hasty{Fencer: b.owner, dead: b.db.Collection("outbox_dead"), most: 1}
	if r, err := Move(ctx, f, letters); err != nil || r != (Result{Moved: 1, Deleted: 1, Chunked: 1}) {
		t.Fatalf("a large one: %+v, %v", r, err)
	}
	f.most = 20
	letters = letters[:0]
	for i := range 300 {
		letters = append(letters, b.letter(order(i)))
	}
	if r, err := Move(ctx, f, letters); err != nil || r != (Result{Moved: 300}) {
		t.Errorf("%+v, %v", r, err)
	}
}
