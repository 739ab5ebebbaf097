package consumer_test

import (
	"context"
	"sync"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// published keeps what is published.
type published struct {
	mu   sync.Mutex
	list map[string][]*consumer.Message
	fail error
}

func (p *published) Publish(_ context.Context, topic string, ms []*consumer.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail != nil {
		return p.fail
	}
	if p.list == nil {
		p.list = map[string][]*consumer.Message{}
	}
	p.list[topic] = append(p.list[topic], ms...)
	return nil
}
