package consumer_test

import (
	"context"
	"sync"

	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// published keeps the published records.
type published struct {
	mu   sync.Mutex
	list map[string][]*consumer.Message
	fail error
}

func (p *published) Publish(_ context.Context, topic string, records []transport.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail != nil {
		return p.fail
	}
	if p.list == nil {
		p.list = map[string][]*consumer.Message{}
	}
	for _, r := range records {
		p.list[topic] = append(p.list[topic], &consumer.Message{Key: r.Key, Value: r.Value, Headers: r.Headers})
	}
	return nil
}
