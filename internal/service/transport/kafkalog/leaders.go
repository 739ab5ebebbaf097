package kafkalog

import (
	"context"
	"fmt"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// leaders finds the leaders of the partitions of some topics. It is safe for concurrent use.
type leaders struct {
	client *kafkawire.Client
	topics []string

	mu     sync.Mutex
	layout *kafkawire.Layout // nil: to be read
}

// findAddr returns the address of the leader of tp. After forget it reads the layout first.
func (l *leaders) findAddr(ctx context.Context, tp transport.TopicPartition) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.layout == nil {
		layout, err := l.client.Metadata(ctx, l.topics)
		if err != nil {
			return "", err
		}
		l.layout = layout
	}

	addr := l.layout.LeaderAddr(record.TopicPartition(tp))
	if addr == "" {
		err := l.layout.Topics[tp.Topic].Err
		// The next call reads the layout again.
		l.layout = nil
		if err == nil {
			err = kafkawire.LeaderNotAvailable
		}
		return "", fmt.Errorf("finding the leader of partition %s: %w", tp, err)
	}
	return addr, nil
}

// findBroker returns the address of a broker, or "" if it is unknown.
func (l *leaders) findBroker(id int32) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.layout == nil {
		return ""
	}
	return l.layout.Brokers[id]
}

// epochOf returns the epoch of the leader that findAddr has found, or -1 if it is unknown.
func (l *leaders) epochOf(tp transport.TopicPartition) int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.layout == nil {
		return -1
	}
	partitions := l.layout.Topics[tp.Topic].Partitions
	if int(tp.Partition) >= len(partitions) {
		return -1
	}
	return partitions[tp.Partition].Epoch
}

// forget makes the next call of findAddr read the layout, because a request to a leader has failed.
func (l *leaders) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.layout = nil
}

// readEdge returns one end of a partition from its leader, and the epoch of the leader.
func (l *leaders) readEdge(
	ctx context.Context, tp transport.TopicPartition, edge kafkawire.LogEdge,
) (kafkawire.LogOffset, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	addr, err := l.findAddr(ctx, tp)
	if err != nil {
		return kafkawire.LogOffset{}, err
	}

	at, err := l.client.LeaderOffset(ctx, addr, record.TopicPartition(tp), edge)
	if err != nil {
		l.forget()
	}
	return at, err
}

// readTopicID returns the id of the topic of a partition from its leader.
func (l *leaders) readTopicID(ctx context.Context, tp transport.TopicPartition) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	addr, err := l.findAddr(ctx, tp)
	if err != nil {
		return "", err
	}

	id, err := l.client.TopicID(ctx, addr, tp.Topic)
	if err != nil {
		l.forget()
	}
	return id, err
}

// epochs has the leader epoch of the last batch that was read from each partition.
type epochs struct {
	leaders *leaders
	last    sync.Map // TopicPartition to int32
	checked sync.Map // TopicPartition to int32: the epoch of the leader at the last check
}

// epochOf returns the leader epoch of the last record that was read from a partition, or -1 if it is unknown. It belongs into the
// commit, so that the next member also notices when a leader has lost records. An epoch that is later than the committed record
// does no harm: the leader then returns the end of the last epoch before it.
func (e *epochs) epochOf(tp transport.TopicPartition) int32 {
	if last, ok := e.last.Load(tp); ok {
		return last.(int32)
	}
	return -1
}

// checkFetched calls check if the leader has changed since the last fetch, and stores the epoch of the last batch. The epoch rises
// with each election. If there is no new batch, only the epoch in the layout shows that.
func (e *epochs) checkFetched(ctx context.Context, walker *walker) error {
	leader := e.leaders.epochOf(walker.tp)
	checked, ok := e.checked.Load(walker.tp)
	isNew := leader >= 0 && (!ok || checked != leader)
	if isNew || walker.first > e.epochOf(walker.tp) {
		if err := e.check(ctx, walker.tp, walker.from); err != nil {
			return err
		}
	}
	if isNew {
		e.checked.Store(walker.tp, leader)
	}

	if walker.last >= 0 {
		e.last.Store(walker.tp, walker.last)
	}
	return nil
}

// check reports records below an offset that the leader has lost after they were read, also if it has other records at their
// offsets. The leader returns where the epoch of the last batch ended (KIP-320). The error is a *RangeError.
func (e *epochs) check(ctx context.Context, tp transport.TopicPartition, offset int64) error {
	before := e.epochOf(tp)
	if before < 0 {
		return nil
	}
	end, err := e.readEnd(ctx, tp, before)
	if err != nil {
		return fmt.Errorf("reading the end of a leader epoch of partition %s: %w", tp, err)
	}
	if end < 0 || end >= offset {
		return nil
	}

	// The log of the leader ends before the records that were read: these are lost.
	start, err := e.leaders.readEdge(ctx, tp, kafkawire.LogStart)
	if err != nil {
		return err
	}
	return &transport.RangeError{TopicPartition: tp, Offset: offset, Start: min(start.Offset, end), End: end, Diverged: true}
}

// readEnd returns the offset after an epoch, or -1 if the leader does not have it.
func (e *epochs) readEnd(ctx context.Context, tp transport.TopicPartition, epoch int32) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	addr, err := e.leaders.findAddr(ctx, tp)
	if err != nil {
		return 0, err
	}
	end, err := e.leaders.client.EpochEnd(ctx, addr, record.TopicPartition(tp), epoch)
	if err != nil {
		e.leaders.forget()
	}
	return end, err
}
