package setaside_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/setaside"
	"github.com/outrelay/outrelay/internal/setaside/setasidetest"
)

func openStore(t *testing.T, client *mongo.Client) *setaside.Collection {
	t.Helper()
	s := setaside.New(stacktest.Database(t, client), "inbox_waiting")
	if err := s.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCollectionContract(t *testing.T) {
	t.Parallel()
	setasidetest.Run(t, func(t *testing.T) setasidetest.Setup {
		client := stacktest.Client(t)
		return setasidetest.Setup{
			Store: openStore(t, client),
			Transaction: func(ctx context.Context, fn func(ctx context.Context) error) error {
				sess, err := client.StartSession()
				if err != nil {
					return err
				}
				defer sess.EndSession(context.WithoutCancel(ctx))
				_, err = sess.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, fn(ctx) })
				return err
			},
		}
	})
}

func TestRetireRemovesTheMessagesOfAHandler(t *testing.T) {
	t.Parallel()
	s := openStore(t, stacktest.Client(t))
	const messages = 6
	for offset := range int64(messages) {
		if err := s.Add(t.Context(), setasidetest.NewMessage("a", 0, offset, 1), 0); err != nil {
			t.Fatal(err)
		}
	}
	stranger := setasidetest.NewMessage("a", 1, 1, 1)
	stranger.Handler = "billing/report"
	if err := s.Add(t.Context(), stranger, 0); err != nil {
		t.Fatal(err)
	}

	if n, err := s.Retire(t.Context(), setasidetest.Orders.Handler); n != messages || err != nil {
		t.Errorf("retired messages: got %d (%v), want %d", n, err, messages)
	}
	if n, err := s.Count(t.Context(), stranger.Handler, 10); n != 1 || err != nil {
		t.Errorf("messages of another handler: got %d (%v), want 1", n, err)
	}
}

func TestEveryQueryUsesTheIndex(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	judge := func(p stacktest.Plan) {
		mu.Lock()
		defer mu.Unlock()
		if slices.Contains(p.Stages, "COLLSCAN") {
			t.Errorf("%s scans the collection: %v", p.Command, p.Stages)
		}
		if slices.Contains(p.Stages, "SORT") {
			t.Errorf("%s sorts in memory: %v", p.Command, p.Stages)
		}
		if p.Docs > 1 {
			t.Errorf("%s reads %d documents", p.Command, p.Docs)
		}
	}
	s := openStore(t, stacktest.Explained(t, judge))
	for offset := range int64(40) {
		if err := s.Add(t.Context(), setasidetest.NewMessage(fmt.Sprint(offset%4), 0, offset, 1), 0); err != nil {
			t.Fatal(err)
		}
	}

	orders := setasidetest.Orders
	m, err := s.First(t.Context(), orders, setaside.KeyQueue([]byte("1")))
	if err != nil {
		t.Fatal(err)
	}
	steps := map[string]func() error{
		"Postpone": func() error { return s.Postpone(t.Context(), m, time.Second) },
		"Take":     func() error { _, err := s.Take(t.Context(), m); return err },
		"Heads": func() error {
			heads, err := s.Heads(t.Context(), orders.Handler, orders.Topic, []int32{0, orders.Partition})
			if len(heads) != 4 {
				t.Errorf("queues: got %d, want 4", len(heads))
			}
			return err
		},
		"Waiting":  func() error { _, err := s.Waiting(t.Context(), orders, []setaside.Digest{m.Queue}); return err },
		"Count":    func() error { _, err := s.Count(t.Context(), orders.Handler, 10); return err },
		"Requeued": func() error { _, err := s.Requeued(t.Context(), "billing"); return err },
		"Stored":   func() error { _, err := s.Stored(t.Context(), []setaside.Digest{m.ID}); return err },
	}
	for name, step := range steps {
		if err := step(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
