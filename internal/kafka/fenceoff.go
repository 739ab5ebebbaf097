package kafka

import (
	"context"
	"fmt"

	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

// FenceOff fences all processes that may still send with a transactional id, as a take-over does
// (N4). It sends nothing itself.
//
// It returns the earlier senders whose records a read-back still has to count, with the offsets
// where their last records can be. None of them is open in any partition. The error names partitions
// that cannot be fenced now. The call may be repeated.
//
// It retires an id when the slots of a watcher are divided again (N28).
func FenceOff(ctx context.Context, c *Client, to TakeOver) ([]record.Sender, error) {
	out, err := c.fence.Take(ctx, fence.In{
		TransactionalID: to.TransactionalID, Generation: to.Generation, Offsets: to.Offsets, Senders: to.Senders,
		Gate: to.LeaseValid, Bounds: to.Bounds, Alive: to.Alive, Event: (&Sink{log: c.cfg.Log}).logEvents(to.Event),
	})
	if err != nil {
		return nil, fmt.Errorf("fencing %s: %w", to.TransactionalID, err)
	}

	// The example is a partition of an existing topic, if there is one.
	n, example := 0, ""
	for tp, reason := range out.Quarantined {
		n++
		if example == "" || out.Missing[tp.Topic] == "" {
			example = fmt.Sprintf("%s/%d: %s", tp.Topic, tp.Partition, reason)
		}
	}
	if n > 0 {
		return nil, fmt.Errorf("fencing %s: %d partitions cannot be fenced now, such as %s", to.TransactionalID, n, example)
	}

	// The last sender is this call, which never sends.
	earlier := out.Senders[:len(out.Senders)-1]
	for i := range earlier {
		earlier[i].Generation, earlier[i].Open = 0, nil
	}
	return earlier, nil
}

// InitTransactionalID initializes a transactional id that was never used. The first owner of the id then finds
// an earlier sender whose marker it can write.
func (c *Client) InitTransactionalID(ctx context.Context, transactionalID string) (record.Sender, error) {
	p, err := c.fence.Init(ctx, transactionalID+"#0", fence.Anew, fence.Patience{})
	if err != nil {
		return record.Sender{}, fmt.Errorf("introducing %s: %w", transactionalID, err)
	}
	return record.Sender{ID: p.ID, Epoch: p.Epoch}, nil
}
