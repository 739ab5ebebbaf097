package kafka

import (
	"context"
	"fmt"

	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

// FenceOff fences whoever may still send with a transactional id, as a take-over does (N4), and sends nothing itself. What it
// returns are the producer ids whose records a read-back has to go on counting, none of them open in any partition, with
// the places where their last records can stand. An error names the partitions that cannot be fenced now; the call may be
// made again.
//
// It is for who retires an id: the slots of a watcher that is divided anew (N28).
func FenceOff(ctx context.Context, c *Client, to TakeOver) ([]record.Sender, error) {
	out, err := c.fence.Take(ctx, fence.In{
		TransactionalID: to.TransactionalID, Generation: to.Generation, Offsets: to.Offsets, Senders: to.Senders,
		Gate: to.Gate, Bounds: to.Bounds, Alive: to.Alive, Event: (&Sink{log: c.cfg.Log}).logEvents(to.Event),
	})
	if err != nil {
		return nil, fmt.Errorf("fencing %s: %w", to.TransactionalID, err)
	}
	n, some := 0, ""
	for tp, why := range out.Quarantined {
		if n++; some == "" || out.Missing[tp.Topic] == "" {
			some = fmt.Sprintf("%s/%d: %s", tp.Topic, tp.Partition, why)
		}
	}
	if n > 0 {
		return nil, fmt.Errorf("fencing %s: %d partitions cannot be fenced now, such as %s", to.TransactionalID, n, some)
	}
	earlier := out.Senders[:len(out.Senders)-1] // the last one are we, who never send
	for i := range earlier {
		earlier[i].Generation, earlier[i].Open = 0, nil
	}
	return earlier, nil
}

// Introduce takes a transactional id that nobody has used, so that its first owner finds an earlier sender whose marker it can
// write.
func (c *Client) Introduce(ctx context.Context, transactionalID string) (record.Sender, error) {
	p, err := c.fence.Init(ctx, transactionalID+"#0", fence.Anew, fence.Patience{})
	if err != nil {
		return record.Sender{}, fmt.Errorf("introducing %s: %w", transactionalID, err)
	}
	return record.Sender{ID: p.ID, Epoch: p.Epoch}, nil
}
