package demo

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/demo/member"
	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/pkg/consumer"
)

const (
	redelivered = "outrelay-redelivered"

	leaveWithin = time.Minute            // a member has to be gone after SIGTERM
	countEvery  = 200 * time.Millisecond // between two looks at how far the members are
	repeatOneOf = 10                     // records, one of so many is written to its topic once more
)

// crew are the members of a consumer group as processes. A dead one is not started again: a new one takes its place.
type crew struct {
	s    *stage
	spec member.Spec
	seq  int

	mu   sync.Mutex
	live []*crewMember
	wg   sync.WaitGroup
}

// crewMember is one process.
type crewMember struct {
	name     string
	prog     *devstack.Program
	expected atomic.Bool
}

// newCrew makes the collections of the members, which read these topics.
func (s *stage) newCrew(ctx context.Context, role member.Role, topics ...string) (*crew, error) {
	if err := member.Prepare(ctx, s.shopDatabase()); err != nil {
		return nil, err
	}
	return &crew{s: s, spec: member.Spec{
		Role: role, MongoDB: s.stack.MongoURI(), Database: s.names.database, Brokers: s.stack.Brokers(), Topics: topics, Group: s.names.groups + string(role),
	}}, nil
}

// startMember starts one more process. One that ends by itself ends the scenario.
func (c *crew) startMember() (*crewMember, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	spec := c.spec
	spec.Name = "c-" + strconv.Itoa(c.seq)
	prog, err := c.s.stack.Run(spec.Name, removeSettings(c.s.options.Env), c.s.options.Binary, member.Command, spec.Arg())
	if err != nil {
		return nil, err
	}
	h := &crewMember{name: spec.Name, prog: prog}
	c.live = append(c.live, h)
	c.wg.Go(func() {
		<-prog.Done()
		if !h.expected.Load() && !c.s.stopping.Load() {
			c.s.cancel(&brokenPromise{fmt.Sprintf("consumer %s ended by itself: %v; the end of its log:\n%s", h.name, prog.Err(), h.lastLogLines())})
		}
	})
	return h, nil
}

func (h *crewMember) lastLogLines() string { return formatLastLines(h.prog) }

// startMembers starts n processes and waits until they share the partitions.
func (c *crew) startMembers(ctx context.Context, n int) ([]*crewMember, error) {
	hands, names := make([]*crewMember, n), make([]string, n)
	for i := range n {
		h, err := c.startMember()
		if err != nil {
			return nil, err
		}
		hands[i], names[i] = h, h.name
	}
	return hands, c.s.awaitRead(ctx, fmt.Sprintf("%d consumers share the partitions", n), func(ctx context.Context) (bool, error) {
		return member.Serving(ctx, c.s.shopDatabase(), names...)
	})
}

// killMember ends a process by SIGKILL.
func (c *crew) killMember(h *crewMember) error {
	h.expected.Store(true)
	return h.prog.Kill()
}

// stopMember asks a process to leave the group, and waits until it is gone. That it has to be killed, or ends with an error,
// breaks the promise.
func (c *crew) stopMember(h *crewMember) {
	h.expected.Store(true)
	if err := h.prog.Terminate(); err == nil {
		late := time.AfterFunc(leaveWithin, func() { _ = h.prog.Kill() })
		<-h.prog.Done()
		late.Stop()
	}
	if err := h.prog.Err(); err != nil {
		c.s.recordBroken("consumer %s did not leave as asked: %v; the end of its log:\n%s", h.name, err, h.lastLogLines())
	}
}

// runningMembers are those that were neither killed nor asked to leave.
func (c *crew) runningMembers() []*crewMember {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []*crewMember
	for _, h := range c.live {
		if !h.expected.Load() {
			list = append(list, h)
		}
	}
	return list
}

// stopAll ends all: gracefully, or after a failure at once.
func (c *crew) stopAll(failed bool) {
	var all sync.WaitGroup
	for _, h := range c.runningMembers() {
		if failed {
			_ = c.killMember(h)
			continue
		}
		all.Go(func() { c.stopMember(h) })
	}
	all.Wait()
	c.wg.Wait()
}

// awaitRead is await with a look into the database, less often.
func (s *stage) awaitRead(ctx context.Context, what string, ok func(ctx context.Context) (bool, error)) error {
	var failed error
	next := time.Time{}
	err := s.awaitCondition(ctx, what, patience, func() bool {
		if time.Now().Before(next) {
			return false
		}
		yes, err := ok(ctx)
		failed, next = err, time.Now().Add(countEvery)
		return yes || err != nil
	})
	return errors.Join(err, failed)
}

// repeater writes some records of a topic to it once more, flagged as the relay flags what may repeat, so that consumers
// meet events that they have handled at offsets that they have not.
type repeater struct {
	queue    chan devstack.Message
	seen     atomic.Int64
	repeated atomic.Int64
}

// repeatSome starts a repeater of all topics that the stage listens to, until ctx ends or done is called.
func (s *stage) repeatSome(ctx context.Context) (r *repeater, done func() error, err error) {
	t, err := consumer.NewKafka(consumer.KafkaConfig{Brokers: s.stack.Brokers()})
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	r = &repeater{queue: make(chan devstack.Message, 100)}
	hear := func(m devstack.Message) {
		if m.Header(redelivered) != "" || r.seen.Add(1)%repeatOneOf != 0 {
			return
		}
		select {
		case r.queue <- m:
		case <-ctx.Done():
		}
	}
	s.onRecord.Store(&hear)
	ended := make(chan error, 1)
	s.loads.Go(func() {
		defer t.Close()
		ended <- r.publishAll(ctx, t)
	})
	return r, func() error { s.onRecord.Store(nil); cancel(); return <-ended }, nil
}

func (r *repeater) publishAll(ctx context.Context, p consumer.Publisher) error {
	for {
		select {
		case m := <-r.queue:
			c := &consumer.Message{Key: m.Key, Value: m.Value}
			for _, h := range m.Headers {
				c.Headers = append(c.Headers, consumer.Header{Key: h.Key, Value: h.Value})
			}
			c.SetHeader(redelivered, []byte("true"))
			if err := p.Publish(ctx, m.Topic, []*consumer.Message{c}); err != nil && ctx.Err() == nil {
				return fmt.Errorf("writing a record once more: %w", err)
			}
			r.repeated.Add(1)
		case <-ctx.Done():
			return nil
		}
	}
}
