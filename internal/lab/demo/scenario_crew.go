package demo

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/demo/member"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	leaveWithin = time.Minute            // from SIGTERM to SIGKILL of a member
	countEvery  = 200 * time.Millisecond // between two queries about the progress of the members
	repeatOneOf = 10                     // one of this many records is written to its topic once more
)

// crew are the processes of a consumer group. A process that ended is not restarted. A new one
// replaces it.
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
	expected atomic.Bool // its end is intended
}

// newCrew creates the collections of the members. The members read the given topics.
func (s *stage) newCrew(ctx context.Context, role member.Role, topics ...string) (*crew, error) {
	if err := member.Prepare(ctx, s.shopDatabase()); err != nil {
		return nil, err
	}
	return &crew{s: s, spec: member.Spec{
		Role:     role,
		MongoDB:  s.stack.MongoURI(),
		Database: s.names.database,
		Brokers:  s.stack.Brokers(),
		Topics:   topics,
		Group:    s.names.groups + string(role),
	}}, nil
}

// startMember starts one more process. If the process ends unexpectedly, the scenario ends.
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
	member := &crewMember{name: spec.Name, prog: prog}
	c.live = append(c.live, member)

	c.wg.Go(func() {
		<-prog.Done()
		if !member.expected.Load() && !c.s.stopping.Load() {
			c.s.cancel(&brokenPromise{fmt.Sprintf("consumer %s ended unexpectedly: %v; the end of its log:\n%s",
				member.name, prog.Err(), member.lastLogLines())})
		}
	})
	return member, nil
}

func (m *crewMember) lastLogLines() string { return formatLastLines(m.prog) }

// startMembers starts n processes and blocks until they share the partitions.
func (c *crew) startMembers(ctx context.Context, n int) ([]*crewMember, error) {
	members := make([]*crewMember, n)
	names := make([]string, n)
	for i := range n {
		member, err := c.startMember()
		if err != nil {
			return nil, err
		}
		members[i] = member
		names[i] = member.name
	}

	what := fmt.Sprintf("%d consumers share the partitions", n)
	return members, c.s.awaitRead(ctx, what, func(ctx context.Context) (bool, error) {
		return member.Serving(ctx, c.s.shopDatabase(), names...)
	})
}

// killMember ends a process with SIGKILL.
func (c *crew) killMember(member *crewMember) error {
	member.expected.Store(true)
	return member.prog.Kill()
}

// stopMember ends a process with SIGTERM and blocks until it has ended. It records a broken promise
// if the process has to be killed or ends with an error.
func (c *crew) stopMember(member *crewMember) {
	member.expected.Store(true)
	if err := member.prog.Terminate(); err == nil {
		late := time.AfterFunc(leaveWithin, func() { _ = member.prog.Kill() })
		<-member.prog.Done()
		late.Stop()
	}

	if err := member.prog.Err(); err != nil {
		c.s.recordBroken("consumer %s did not stop gracefully: %v; the end of its log:\n%s",
			member.name, err, member.lastLogLines())
	}
}

// runningMembers returns the members that were neither killed nor stopped.
func (c *crew) runningMembers() []*crewMember {
	c.mu.Lock()
	defer c.mu.Unlock()

	var running []*crewMember
	for _, m := range c.live {
		if !m.expected.Load() {
			running = append(running, m)
		}
	}
	return running
}

// stopAll ends all members: gracefully, or with SIGKILL after a failure.
func (c *crew) stopAll(failed bool) {
	var stops sync.WaitGroup
	for _, m := range c.runningMembers() {
		if failed {
			_ = c.killMember(m)
			continue
		}
		stops.Go(func() { c.stopMember(m) })
	}
	stops.Wait()
	c.wg.Wait()
}

// awaitRead is awaitCondition for a condition that reads the database. It calls ok less often.
func (s *stage) awaitRead(ctx context.Context, what string, ok func(ctx context.Context) (bool, error)) error {
	var readErr error
	next := time.Time{}
	err := s.awaitCondition(ctx, what, patience, func() bool {
		if time.Now().Before(next) {
			return false
		}
		var done bool
		done, readErr = ok(ctx)
		next = time.Now().Add(countEvery)
		return done || readErr != nil
	})
	return errors.Join(err, readErr)
}

// repeater writes some records of a topic to it once more, with the redelivered header, as the
// relay does. So consumers receive events that they have handled at offsets that they have not.
type repeater struct {
	queue    chan devstack.Message
	seen     atomic.Int64
	repeated atomic.Int64
}

// repeatSome starts a repeater for all topics of the stage. It runs until ctx ends or done is
// called.
func (s *stage) repeatSome(ctx context.Context) (started *repeater, done func() error, err error) {
	transport, err := kafkago.New(transport.Config{Brokers: s.stack.Brokers()})
	if err != nil {
		return nil, nil, err
	}

	ctx, cancel := context.WithCancel(ctx)
	started = &repeater{queue: make(chan devstack.Message, 100)}
	// Only first records count, otherwise a repeated record would be repeated again.
	onRecord := func(message devstack.Message) {
		if message.Header(record.HeaderRedelivered) != "" || started.seen.Add(1)%repeatOneOf != 0 {
			return
		}
		select {
		case started.queue <- message:
		case <-ctx.Done():
		}
	}
	s.onRecord.Store(&onRecord)

	ended := make(chan error, 1)
	s.loads.Go(func() {
		defer transport.Close()
		ended <- started.publishAll(ctx, transport)
	})
	return started, func() error {
		s.onRecord.Store(nil)
		cancel()
		return <-ended
	}, nil
}

// publishAll publishes the queued records until ctx ends.
func (r *repeater) publishAll(ctx context.Context, publisher transport.Publisher) error {
	for {
		select {
		case message := <-r.queue:
			copied := transport.Record{Key: message.Key, Value: message.Value}
			for _, h := range message.Headers {
				copied.Headers = append(copied.Headers, event.Header{Key: h.Key, Value: h.Value})
			}
			copied.Headers = append(copied.Headers, event.Header{Key: record.HeaderRedelivered, Value: []byte("true")})
			if err := publisher.Publish(ctx, message.Topic, []transport.Record{copied}); err != nil && ctx.Err() == nil {
				return fmt.Errorf("repeating a record: %w", err)
			}
			r.repeated.Add(1)

		case <-ctx.Done():
			return nil
		}
	}
}
