package memory

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/sagatest"
	"github.com/outrelay/outrelay/internal/service/sagas"
)

func TestSagaStoreContract(t *testing.T) {
	t.Parallel()
	sagatest.Run(t, func(tb testing.TB) sagatest.Fixture {
		tb.Helper()
		db := NewDB()
		box, err := NewOutbox(db)
		if err != nil {
			tb.Fatal(err)
		}

		return sagatest.Fixture{
			Store: newSagas(db), Box: box,
			Events: func(ctx context.Context) ([]string, error) {
				docs, err := storeOf(box).Stored(ctx)
				if err != nil {
					return nil, err
				}
				var types []string
				for _, doc := range docs {
					var v envelope.View
					if err := envelope.Parse(doc, &v); err != nil {
						return nil, err
					}

					types = append(types, string(v.Type))
				}

				return types, nil
			},
		}
	})
}

// A tombstone disappears when its time is over, and not before.
func TestTombstoneGoesByTheClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSagas(NewDB())
		r, err := s.Save(t.Context(), "s", sagas.Record{ID: "a", Body: bson.Raw{5, 0, 0, 0, 0}})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Complete(t.Context(), "s", r, time.Hour); err != nil {
			t.Fatal(err)
		}

		for _, x := range []struct {
			ahead time.Duration
			there bool
		}{{time.Hour - time.Millisecond, true}, {time.Millisecond, false}} {
			<-time.After(x.ahead)
			if _, found, err := s.Load(t.Context(), "s", "a"); found != x.there || err != nil {
				t.Errorf("%s later: there %t, %v", x.ahead, found, err)
			}
		}

		if again, err := s.Save(t.Context(), "s", sagas.Record{ID: "a"}); err != nil || again.Version != 1 {
			t.Errorf("begun again: %+v, %v", again, err)
		}
	})
}
