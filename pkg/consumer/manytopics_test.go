package consumer_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// countedInbox counts the statements that load queues.
type countedInbox struct {
	*memory.Inbox
	loads *atomic.Int64
}

func (x countedInbox) Waiting() setaside.Store { return countedStore{x.Inbox.Waiting(), x.loads} }

type countedStore struct {
	setaside.Store
	loads *atomic.Int64
}

func (s countedStore) Heads(ctx context.Context, places []setaside.Place) ([]setaside.Head, error) {
	s.loads.Add(1)
	return s.Store.Heads(ctx, places)
}

// All lanes wait until the queues are loaded, so the number of topics must not count.
func TestTheQueuesOfAllTopicsAreLoadedAtOnce(t *testing.T) {
	t.Parallel()
	db, broker := memory.NewDB(), memory.NewBroker(2)
	box, err := memory.NewInbox(db)
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, 200)
	for i := range names {
		names[i] = fmt.Sprint("topic", i)
	}
	var loads atomic.Int64
	c, err := consumer.New("g", nil, consumer.WithTransport(broker), consumer.WithInbox(countedInbox{box, &loads}),
		consumer.Transactions(db.Transaction), consumer.WithTopics(names...))
	if err != nil {
		t.Fatal(err)
	}

	handled := make(chan struct{}, 1)
	for _, name := range []string{"a", "b"} {
		addHandlerAs(t, c, name, "counted", func(context.Context, *consumer.Message) error {
			handled <- struct{}{}
			return nil
		})
	}
	message := newMessage("k", "counted", "0")
	if err := broker.Publish(t.Context(), names[0], []transport.Record{{Key: message.Key, Value: message.Value, Headers: message.Headers}}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	<-handled
	<-handled
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := loads.Load(); n > 4 {
		t.Errorf("%d statements loaded the queues of two handlers", n)
	}
}
