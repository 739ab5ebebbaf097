package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/record"
)

const (
	idleEvery = 10 * time.Second // N8
	trimEvery = time.Second
)

// Run sends until ctx ends, then it returns nil. It returns ErrFenced when another owner has taken over, ErrBroken or
// ErrReopen when a new sink has to find out what arrived, and joins everything it has started before it returns.
func (s *Sink) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	s.mu.Lock()
	s.stop = cancel
	if s.ended != nil {
		cancel(s.ended)
	}
	s.start = func(l *lane) { wg.Go(func() { l.run(ctx, s) }) }
	for _, l := range s.lanes {
		s.start(l)
	}
	s.mu.Unlock()
	s.meter()
	for _, f := range []func(context.Context) error{s.refresh, s.adopter, s.keeper, s.house, s.parker} {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				s.fail(err)
			}
		})
	}
	wake(s.adopt)
	wake(s.renew)
	s.Flush()
	<-ctx.Done()
	s.mu.Lock()
	s.start = nil // no lane begins from here on
	if s.ended == nil {
		s.ended = ErrClosed
	}
	err := s.ended
	if s.empty != nil {
		close(s.empty) // Drain finds that the sink has ended
		s.empty = nil
	}
	s.mu.Unlock()
	wg.Wait()
	if errors.Is(err, ErrClosed) {
		return nil
	}
	return fmt.Errorf("kafka sink: %w", err)
}

// house trims memory and moves the stored offsets of idle partitions.
func (s *Sink) house(ctx context.Context) error {
	trim := time.NewTicker(trimEvery)
	defer trim.Stop()
	idle := time.NewTicker(idleEvery)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-trim.C:
			s.mu.Lock()
			s.free.trim()
			s.mu.Unlock()
		case <-idle.C:
			s.idleOffsets(ctx)
		}
	}
}

// idleOffsets is N8's refresh: where nothing of ours is queued or in flight, whatever we send next will stand at or above
// the end that the leader tells now. Not during a replay: what was read back stands below. Not in quarantine: it was not
// read yet. Not if anything was sent while the leader was asked: its answer may lie above that record. So the receiver
// hears of it under the lock, before the next record can be sent.
func (s *Sink) idleOffsets(ctx context.Context) {
	parts, sends, layout := s.idle()
	if len(parts) == 0 {
		return
	}
	ends, err := s.c.ListOffsets(ctx, layout, parts)
	if err != nil && ctx.Err() == nil {
		wake(s.renew) // a leader that is dead or has moved
		s.log.Debug("asking for the ends of idle partitions", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, tp := range parts {
		p := s.part(tp)
		if end, ok := ends[tp]; ok && s.resting(p) && p.sends == sends[i] { // N8
			p.end = max(p.end, end) // a record below it later is one of another topic of the name
			s.acks.Idle(tp, end)
		}
	}
}

// resting reports whether nothing of ours is on its way to p, or may stand in it unread. The lock is held.
func (s *Sink) resting(p *part) bool {
	return !s.replay && len(p.q) == 0 && !p.busy && !p.quarantine && !p.unread
}

// idle lists the partitions with nothing of ours on its way, how much was ever sent to them, and their leaders.
func (s *Sink) idle() (parts []record.TopicPartition, sends []uint64, _ *Layout) {
	layout := &Layout{Brokers: s.c.layout.Load().Brokers, Topics: map[string]TopicLayout{}}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.replay {
		return nil, nil, layout
	}
	for name, t := range s.topics {
		leaders := make([]PartitionLayout, len(t.parts))
		for i, p := range t.parts {
			leaders[i].Leader = p.leader
			if s.resting(p) && p.lane != nil {
				parts, sends = append(parts, p.tp), append(sends, p.sends)
			}
		}
		layout.Topics[name] = TopicLayout{Partitions: leaders}
	}
	return parts, sends, layout
}

// Blocked is a target whose records wait.
type Blocked struct {
	Topic     string
	Partition int32 // −1: the topic
	Kind      string
	Reason    string // for people: what happened, to what, and what to do
	Since     time.Time
	Count     int // records that wait, and those of the stream that were given back or not taken since it was parked
	Parked    bool
}

// State lists what waits and why, by topic and partition. A target that nothing waits for is not listed, whatever is wrong
// with it; the gauge of the quarantine counts partitions whether anything waits or not.
func (s *Sink) State() []Blocked {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var list []Blocked
	for _, t := range s.topics {
		if n := countRecords(t.waiting) + t.turned; n > 0 && !t.why.none() {
			list = append(list, Blocked{t.name, -1, t.why.kind, t.why.text, t.since, n, t.parked})
		}
		for _, p := range t.parts {
			n := countRecords(p.q) + p.turned
			passing := p.why.kind == kindUnreachable || p.why.kind == kindRefused
			if n == 0 || p.why.none() || !p.quarantine && !p.parked && passing && now.Sub(p.since) < sayAfter {
				continue
			}
			list = append(list, Blocked{t.name, p.tp.Partition, p.why.kind, p.why.text, p.since, n, p.parked})
		}
	}
	slices.SortFunc(list, func(a, b Blocked) int {
		if c := strings.Compare(a.Topic, b.Topic); c != 0 {
			return c
		}
		return int(a.Partition - b.Partition)
	})
	return list
}

// meter connects the gauges that are read when somebody looks.
func (s *Sink) meter() {
	m := s.c.cfg.Metrics
	m.InflightRecords.From(func() float64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return float64(s.count)
	})
	m.InflightBytes.From(func() float64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return float64(s.queued)
	})
	m.Quarantined.From(func() float64 { return float64(len(s.session.Quarantined())) })
}
