package fence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// FenceOff fences all processes that may still send with a transactional id, as a takeover does
// (N4). It sends nothing itself.
//
// It returns the earlier senders whose records a read-back still has to count, with the offsets
// where their last records can be. None of them is open in any partition. The error names partitions
// that cannot be fenced now. The call may be repeated.
//
// It retires an id when the slots of a watcher are divided again (N28).
func (c *Client) FenceOff(ctx context.Context, input In) ([]record.Sender, error) {
	out, err := c.Take(ctx, input)
	if err != nil {
		return nil, fmt.Errorf("fencing %s: %w", input.TransactionalID, err)
	}

	for tp, reason := range out.Quarantined {
		return nil, fmt.Errorf("fencing %s: %d partitions cannot be fenced now, such as %s/%d: %s",
			input.TransactionalID, len(out.Quarantined), tp.Topic, tp.Partition, reason.Cause)
	}

	// The last sender is this call, which never sends.
	earlier := out.Senders[:len(out.Senders)-1]
	for i := range earlier {
		earlier[i].Generation, earlier[i].Open = 0, nil
	}
	return earlier, nil
}

// LogEvents returns a handler that logs events and passes them to handle, unless it is nil.
func LogEvents(log *slog.Logger, handle func(Event)) func(Event) {
	return func(event Event) {
		write := log.Warn
		if event.Kind == ProducerIDChanged && !event.Alarm {
			write = log.Info
		}
		write(event.Text, "event", string(event.Kind), "topic", event.Topic)
		if handle != nil {
			handle(event)
		}
	}
}

// InitTransactionalID initializes a transactional id that was never used. The first owner of the id then finds
// an earlier sender whose marker it can write.
func (c *Client) InitTransactionalID(ctx context.Context, transactionalID string) (record.Sender, error) {
	producer, err := c.Init(ctx, transactionalID+"#0", anyEpoch, Patience{})
	if err != nil {
		return record.Sender{}, fmt.Errorf("introducing %s: %w", transactionalID, err)
	}
	return record.Sender{ID: producer.ID, Epoch: producer.Epoch}, nil
}

// TryTransactionalID initializes id, to find out whether this user may use it. No other process may use
// id: it would be fenced. The call needs WRITE and DESCRIBE on the id and touches no partition. The
// brokers forget the id after transactional.id.expiration.ms.
//
// The first transactional id of a cluster makes Kafka create the topic of the coordinators. The call
// waits for it.
func (c *Client) TryTransactionalID(ctx context.Context, id string) error {
	_, err := c.Init(ctx, id, anyEpoch, Patience{Total: 5 * time.Second})
	if errors.Is(err, errStuck) {
		// The coordinator has accepted the id, and is busy with it.
		return nil
	}
	return err
}
