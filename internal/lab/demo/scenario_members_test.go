package demo

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/service/transport"
)

func TestOnlyScenariosOfConsumersTakeARhythm(t *testing.T) {
	t.Parallel()
	for _, s := range Scenarios() {
		if s.Kills() != (s.Name == "consumer") {
			t.Errorf("%s: %v", s.Name, s.Kills())
		}
	}
}

// published records the writes of a repeater, or fails.
type published struct {
	mu   sync.Mutex
	err  error
	all  []transport.Record
	came chan struct{}
}

func (p *published) Publish(_ context.Context, _ string, ms []transport.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, ms...)
	p.came <- struct{}{}
	return p.err
}

func TestRepeaterFlagsItsRepetitions(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	p := &published{came: make(chan struct{}, 1)}
	r := &repeater{queue: make(chan devstack.Message, 1)}
	ended := make(chan error, 1)
	go func() { ended <- r.publishAll(ctx, p) }()
	headers := []devstack.Header{{Key: "id", Value: []byte("1")}, {Key: "none"}}
	r.queue <- devstack.Message{Key: []byte("k"), Value: []byte("v"), Headers: headers}
	<-p.came
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}

	m := p.all[0]
	flag, _ := m.Header(record.HeaderRedelivered)
	id, _ := m.Header("id")
	if string(m.Key) != "k" || string(m.Value) != "v" || string(flag) != "true" || string(id) != "1" || len(m.Headers) != 3 || len(headers) != 2 {
		t.Errorf("%+v", m)
	}

	p.err = errors.New("no broker")
	r.queue <- devstack.Message{}
	if err := r.publishAll(t.Context(), p); !errors.Is(err, p.err) {
		t.Errorf("%v", err)
	}
}

func TestTicks(t *testing.T) {
	t.Parallel()
	never, soon := newTicker(0), newTicker(time.Millisecond)
	defer never.Stop()
	defer soon.Stop()
	select {
	case <-never.C:
		t.Error("it ticks")
	case <-soon.C:
	}
}
