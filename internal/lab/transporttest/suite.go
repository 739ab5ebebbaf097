// Package transporttest tests the contract of a transport.Transport. The Kafka transports and the
// transport of internal/lab/memory, which needs no server, pass the tests.
//
//	func TestContract(t *testing.T) {
//		transporttest.Run(t, func(t *testing.T) transporttest.Fixture { … })
//	}
//
// The tests run in parallel, each with its own topics and groups. They wait for events, at most for
// patience.
package transporttest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/service/transport"
)

// patience is how long a test waits for an expected event.
const patience = 2 * time.Minute

// Fixture has the functions with which the tests create transports and topics.
type Fixture struct {
	// Transport returns a new transport. All transports of a fixture use the same servers.
	Transport func(t *testing.T) transport.Transport
	// Topic creates a topic for this test with so many partitions, and returns its name.
	Topic func(t *testing.T, partitions int) string
	// Later returns the name of a topic that does not exist, and a function that creates it.
	Later func(t *testing.T) (name string, create func())
}

// Factory returns a fixture. It releases resources with t.Cleanup.
type Factory func(t *testing.T) Fixture

// Run tests all properties of a transport on which a consumer relies.
func Run(t *testing.T, factory Factory) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"bytes arrive as they are", testBytesArrive},
		{"order and partition of a key", testKeyOrder},
		{"a group goes on where it committed", testResumesAtCommit},
		{"uncommitted messages are delivered again", testRedelivery},
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

// assertEqual reports an error unless got and want are deeply equal.
func assertEqual[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func groupName() string { return fmt.Sprintf("group-%08x", rand.Uint32()) }

// publishValues publishes one message with the key for each of values.
func publishValues(t *testing.T, tr transport.Transport, topic, key string, values ...string) {
	t.Helper()
	ms := make([]transport.Record, len(values))
	for i, v := range values {
		ms[i] = transport.Record{Key: []byte(key), Value: []byte(v)}
	}
	publishAll(t, tr, topic, ms)
}

func publishAll(t *testing.T, tr transport.Transport, topic string, ms []transport.Record) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := tr.Publish(ctx, topic, ms); err != nil {
		t.Fatal(err)
	}
}

// funcSession is a consumer.Session whose Serve calls a function.
type funcSession struct {
	t     *testing.T
	serve func(ctx context.Context, g transport.Generation) error
}

func (s funcSession) Serve(ctx context.Context, generation transport.Generation) error {
	return s.serve(ctx, generation)
}

func (s funcSession) Fault(err error) { s.t.Logf("the transport reports: %v", err) }

// member is a member of a group until leaveGroup is called.
type member struct {
	t           *testing.T
	generations chan servedGeneration
	stop        context.CancelFunc
	done        chan error
}

// servedGeneration is one generation of a member, or the time between two changes of it. Its Serve returns, or the change is
// done, when finish is closed.
type servedGeneration struct {
	transport.Generation
	id         int32
	partitions []transport.TopicPartition
	ctx        context.Context // ends when the generation has to end, or changes
	finish     chan struct{}
}

// ID returns the number of the generation when it began.
func (s servedGeneration) ID() int32 { return s.id }

// Partitions returns the partitions between two changes.
func (s servedGeneration) Partitions() []transport.TopicPartition { return s.partitions }

// serveChanges sends a servedGeneration for the generation, or for each time between two of its changes.
func (m *member) serveChanges(ctx context.Context, generation transport.Generation) error {
	partitions := generation.Partitions()
	begun := generation.Changes() == nil
	for {
		spell, end := context.WithCancel(ctx)
		servedGeneration := servedGeneration{generation, generation.ID(), slices.Clone(partitions), spell, make(chan struct{})}
		taken := false
		offer := m.generations
		if !begun {
			offer = nil
		}

		var change transport.Change
		for change.Done == nil && ctx.Err() == nil {
			select {
			case offer <- servedGeneration:
				taken, offer = true, nil
			case change = <-generation.Changes():
			case <-ctx.Done():
			}
		}
		end()
		if taken {
			<-servedGeneration.finish
		}
		if change.Done == nil {
			return nil
		}

		begun = true
		partitions = slices.DeleteFunc(partitions, func(tp transport.TopicPartition) bool {
			return slices.Contains(change.Revoked, tp)
		})
		partitions = append(partitions, change.Added...)
		change.Done()
	}
}

// joinGroup joins the group. The test receives the generations one by one. Each Serve blocks until
// finish is closed.
func joinGroup(t *testing.T, tr transport.Transport, group string, topics ...string) *member {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))

	member := &member{t: t, generations: make(chan servedGeneration), stop: cancel, done: make(chan error, 1)}
	go func() {
		member.done <- tr.Join(ctx, group, topics, funcSession{t, member.serveChanges})
	}()
	t.Cleanup(cancel)
	return member
}

// nextGeneration returns the next generation.
func (m *member) nextGeneration() servedGeneration {
	m.t.Helper()
	select {
	case generation := <-m.generations:
		return generation
	case err := <-m.done:
		m.t.Fatalf("Join returned before the test left the group: %v", err)
	case <-time.After(patience):
		m.t.Fatalf("no generation within %v", patience)
	}
	return servedGeneration{}
}

// nextWithPartitions returns the next generation with n partitions. It waits for the end of
// generations before it.
func (m *member) nextWithPartitions(n int) servedGeneration {
	m.t.Helper()
	for {
		generation := m.nextGeneration()
		if len(generation.Partitions()) == n {
			return generation
		}
		generation.waitForEnd(m.t)
		close(generation.finish)
	}
}

// readUntil returns the next generation in which a record with the value is read. It waits for the
// end of generations before it.
func (m *member) readUntil(value string) servedGeneration {
	m.t.Helper()
	for {
		generation := m.nextGeneration()
		if generation.readsValue(value) {
			return generation
		}
		generation.waitForEnd(m.t)
		close(generation.finish)
	}
}

// readsValue reads the partitions and reports whether a record with the value was read before the
// generation ended.
func (s servedGeneration) readsValue(value string) bool {
	found, stop := context.WithCancelCause(s.ctx)
	defer stop(nil)

	var wg sync.WaitGroup
	for _, tp := range s.Partitions() {
		wg.Go(func() {
			offset, resumed := int64(0), false
			for found.Err() == nil {
				var fetched transport.Fetched
				var err error
				if resumed {
					fetched, err = s.Fetch(found, tp, transport.FetchFrom{Offset: offset}, 1<<20)
				} else {
					var at transport.Start
					at, err = s.Resume(found, tp)
					fetched.Next, resumed = at.Offset, err == nil
				}
				// The generation has ended, or a server is away for a while.
				if err != nil {
					select {
					case <-found.Done():
					case <-time.After(10 * time.Millisecond):
					}
					continue
				}

				offset = fetched.Next
				for _, r := range fetched.Records {
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

// waitForEnd blocks until the generation has to end.
func (s servedGeneration) waitForEnd(t *testing.T) {
	t.Helper()
	select {
	case <-s.ctx.Done():
	case <-time.After(patience):
		t.Fatalf("the generation did not end within %v", patience)
	}
}

// leaveGroup leaves the group: it finishes generation generation and waits for Join to return.
func (m *member) leaveGroup(generation servedGeneration) {
	m.t.Helper()
	m.stop()
	if generation.finish != nil {
		close(generation.finish)
	}

	select {
	case err := <-m.done:
		if err != nil {
			m.t.Errorf("Join after leaving: got %v, want nil", err)
		}
	case <-time.After(patience):
		m.t.Fatalf("Join did not return within %v", patience)
	}
}

// readRecords fetches the partitions of a generation until it has at least n records. It returns
// them by partition, with the next offset of each partition.
func (s servedGeneration) readRecords(
	t *testing.T, n int,
) (map[transport.TopicPartition][]transport.Record, map[transport.TopicPartition]int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	enough, stop := context.WithCancel(ctx)
	defer stop()

	var mu sync.Mutex
	records := map[transport.TopicPartition][]transport.Record{}
	next := map[transport.TopicPartition]int64{}
	total := 0

	var wg sync.WaitGroup
	for _, tp := range s.Partitions() {
		wg.Go(func() {
			//nolint:contextcheck // resume has its own deadline
			for offset := s.resume(t, tp).Offset; enough.Err() == nil; {
				fetched, err := s.Fetch(enough, tp, transport.FetchFrom{Offset: offset}, 1<<20)
				if err != nil {
					if enough.Err() == nil {
						t.Errorf("fetching %s from %d: %v", tp, offset, err)
						stop()
					}
					return
				}

				offset = fetched.Next
				mu.Lock()
				records[tp] = append(records[tp], fetched.Records...)
				next[tp] = fetched.Next
				if total += len(fetched.Records); total >= n {
					stop()
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()

	if total < n {
		t.Fatalf("got %d records, want at least %d: %v", total, n, ctx.Err())
	}
	return records, next
}

// resume returns where the group goes on with a partition.
func (s servedGeneration) resume(t *testing.T, tp transport.TopicPartition) transport.Start {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	at, err := s.Resume(ctx, tp)
	if err != nil {
		t.Errorf("resuming %s: %v", tp, err)
	}
	return at
}

// topicID returns the id that is committed with offsets of a topic.
func topicID(topic string) string { return "cluster/" + topic }

func (s servedGeneration) commitOffsets(t *testing.T, next map[transport.TopicPartition]int64) {
	t.Helper()
	offsets := map[transport.TopicPartition]transport.GroupOffset{}
	for tp, at := range next {
		offsets[tp] = transport.GroupOffset{Offset: at, TopicID: topicID(tp.Topic)}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	if err := s.Commit(ctx, offsets); err != nil {
		t.Fatalf("committing: %v", err)
	}
}

// countValues returns how often each value occurs in records.
func countValues(records map[transport.TopicPartition][]transport.Record) map[string]int {
	out := map[string]int{}
	for _, list := range records {
		for _, r := range list {
			out[string(r.Value)]++
		}
	}
	return out
}

// eachOnce returns a count of one for each name.
func eachOnce(names ...string) map[string]int {
	out := map[string]int{}
	for _, n := range names {
		out[n] = 1
	}
	return out
}

var errStop = errors.New("stop")
