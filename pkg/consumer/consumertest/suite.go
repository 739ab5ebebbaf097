// Package consumertest is the contract of a consumer.Transport as tests: Kafka's passes them, and pkg/memory's does
// without a server.
//
//	func TestContract(t *testing.T) {
//		consumertest.Run(t, func(t *testing.T) consumertest.Fixture { … })
//	}
//
// The tests run in parallel, each on topics and groups of its own. They wait for signals, up to Patience.
package consumertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// Patience is how long a test waits for something that must happen.
const Patience = 2 * time.Minute

// Fixture is what the tests need of a transport.
type Fixture struct {
	// Transport makes a transport; all of one fixture are connected to the same servers.
	Transport func(t *testing.T) consumer.Transport
	// Topic makes a topic of the test's own with that many partitions.
	Topic func(t *testing.T, partitions int) string
	// Later is the name of a topic of the test's own that does not exist, and what creates it.
	Later func(t *testing.T) (name string, create func())
}

// Factory makes a fixture; it registers what has to be closed by t.Cleanup.
type Factory func(t *testing.T) Fixture

// Run tests everything that a consumer relies on.
func Run(t *testing.T, factory Factory) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"bytes arrive as they are", testBytesArrive},
		{"order and partition of a key", testKeyOrder},
		{"a group goes on where it committed", testResumesAtCommit},
		{"what was not committed comes again", testRedelivery},
		{"groups are independent", testIndependentGroups},
		{"members share the partitions", testMembersShare},
		{"commit at the end of a generation", testCommitAtEnd},
		{"a past generation cannot commit", testPastGeneration},
		{"fetch waits and is bounded", testFetchBounds},
		{"offsets that are not there", testMissingOffsets},
		{"several topics", testSeveralTopics},
		{"a topic comes later", testLateTopic},
		{"join ends", testJoinEnds},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.test(t, factory(t))
		})
	}
}

func assertEqual[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func groupName() string { return fmt.Sprintf("group-%08x", rand.Uint32()) }

// publishValues writes messages of a key whose values are those texts.
func publishValues(t *testing.T, tr consumer.Transport, topic, key string, values ...string) {
	t.Helper()
	ms := make([]*consumer.Message, len(values))
	for i, v := range values {
		ms[i] = &consumer.Message{Key: []byte(key), Value: []byte(v)}
	}
	publishAll(t, tr, topic, ms)
}

func publishAll(t *testing.T, tr consumer.Transport, topic string, ms []*consumer.Message) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	if err := tr.Publish(ctx, topic, ms); err != nil {
		t.Fatal(err)
	}
}

// funcSession serves by a function.
type funcSession struct {
	t     *testing.T
	serve func(ctx context.Context, g consumer.Generation) error
}

func (s funcSession) Serve(ctx context.Context, g consumer.Generation) error { return s.serve(ctx, g) }
func (s funcSession) Fault(err error)                                        { s.t.Logf("the transport reports: %v", err) }

// member is a membership that runs until it is left.
type member struct {
	t           *testing.T
	generations chan servedGeneration
	stop        context.CancelFunc
	done        chan error
}

// servedGeneration is one generation of a member, which ends its Serve by closing over.
type servedGeneration struct {
	consumer.Generation
	ctx    context.Context // of Serve, to see it end
	finish chan struct{}
}

// joinGroup begins a membership. Its generations are to be taken one by one; each Serve lasts until its generation is let go.
func joinGroup(t *testing.T, tr consumer.Transport, group string, topics ...string) *member {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	m := &member{t: t, generations: make(chan servedGeneration), stop: cancel, done: make(chan error, 1)}
	go func() {
		m.done <- tr.Join(ctx, group, topics, funcSession{t, func(ctx context.Context, g consumer.Generation) error {
			s := servedGeneration{g, ctx, make(chan struct{})}
			select {
			case m.generations <- s:
			case <-ctx.Done():
				return nil
			}
			<-s.finish
			return nil
		}})
	}()
	t.Cleanup(cancel)
	return m
}

// nextGeneration is the next generation.
func (m *member) nextGeneration() servedGeneration {
	m.t.Helper()
	select {
	case s := <-m.generations:
		return s
	case err := <-m.done:
		m.t.Fatalf("Join returned %v", err)
	case <-time.After(Patience):
		m.t.Fatal("no generation came")
	}
	return servedGeneration{}
}

// nextWithPartitions lets generations pass until one has n partitions.
func (m *member) nextWithPartitions(n int) servedGeneration {
	m.t.Helper()
	for {
		s := m.nextGeneration()
		if len(s.Partitions()) == n {
			return s
		}
		s.waitForEnd(m.t)
		close(s.finish)
	}
}

// readUntil lets generations pass until one brings that value, and returns it.
func (m *member) readUntil(value string) servedGeneration {
	m.t.Helper()
	for {
		s := m.nextGeneration()
		if s.readsValue(value) {
			return s
		}
		s.waitForEnd(m.t)
		close(s.finish)
	}
}

// readsValue reads the partitions until the value comes or the generation ends.
func (s servedGeneration) readsValue(value string) bool {
	found, stop := context.WithCancelCause(s.ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	for _, a := range s.Partitions() {
		wg.Go(func() {
			for offset := a.Offset; found.Err() == nil; {
				f, err := s.Fetch(found, a.TopicPartition, offset, 1<<20)
				if err != nil { // the generation has ended, or what is away comes back
					select {
					case <-found.Done():
					case <-time.After(10 * time.Millisecond):
					}
					continue
				}
				offset = f.Next
				for _, r := range f.Records {
					if string(r.Value) == value {
						stop(errStop)
					}
				}
			}
		})
	}
	wg.Wait()
	return errors.Is(context.Cause(found), errStop)
}

// waitForEnd waits until the generation is to end.
func (s servedGeneration) waitForEnd(t *testing.T) {
	t.Helper()
	select {
	case <-s.ctx.Done():
	case <-time.After(Patience):
		t.Fatal("the generation did not end")
	}
}

// leaveGroup ends the membership: the generation that is given is let go first.
func (m *member) leaveGroup(s servedGeneration) {
	m.t.Helper()
	m.stop()
	if s.finish != nil {
		close(s.finish)
	}
	select {
	case err := <-m.done:
		if err != nil {
			m.t.Errorf("Join returned %v", err)
		}
	case <-time.After(Patience):
		m.t.Fatal("Join did not return")
	}
}

// readRecords fetches the partitions of a generation until it has n records at least, and returns them by partition with the
// offsets to go on from.
func (s servedGeneration) readRecords(t *testing.T, n int) (map[consumer.TopicPartition][]consumer.Record, map[consumer.TopicPartition]int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	enough, stop := context.WithCancel(ctx)
	defer stop()
	var mu sync.Mutex
	records, next, total := map[consumer.TopicPartition][]consumer.Record{}, map[consumer.TopicPartition]int64{}, 0
	var wg sync.WaitGroup
	for _, a := range s.Partitions() {
		wg.Go(func() {
			for offset := a.Offset; enough.Err() == nil; {
				f, err := s.Fetch(enough, a.TopicPartition, offset, 1<<20)
				if err != nil {
					if enough.Err() == nil {
						t.Errorf("fetching %s from %d: %v", a, offset, err)
						stop()
					}
					return
				}
				offset = f.Next
				mu.Lock()
				records[a.TopicPartition] = append(records[a.TopicPartition], f.Records...)
				next[a.TopicPartition] = f.Next
				if total += len(f.Records); total >= n {
					stop()
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if total < n {
		t.Fatalf("%d records came, want %d: %v", total, n, ctx.Err())
	}
	return records, next
}

func (s servedGeneration) commitOffsets(t *testing.T, offsets map[consumer.TopicPartition]int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience)
	defer cancel()
	if err := s.Commit(ctx, offsets); err != nil {
		t.Fatalf("committing: %v", err)
	}
}

// countValues counts the values of all records.
func countValues(records map[consumer.TopicPartition][]consumer.Record) map[string]int {
	out := map[string]int{}
	for _, list := range records {
		for _, r := range list {
			out[string(r.Value)]++
		}
	}
	return out
}

func eachOnce(names ...string) map[string]int {
	out := map[string]int{}
	for _, n := range names {
		out[n] = 1
	}
	return out
}

var errStop = errors.New("stop")
