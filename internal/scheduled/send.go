package scheduled

import (
	"container/heap"
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/waiting"
)

const (
	// maxHeldBytes bounds the claimed envelopes that wait for their due times in memory. One claim more may wait for room.
	maxHeldBytes = 2 * mongodb.MaxBytes
	sendFlush    = 64 // envelopes between two flushes
)

// sendClaimed sends claimed envelopes at their due times, until ctx ends or the outlet fails.
func (s *Scheduled) sendClaimed(ctx context.Context) error {
	var held claimedHeap
	wait := time.NewTimer(maxIdle)
	defer wait.Stop()

	for {
		if err := s.sendDue(ctx, &held); err != nil {
			return err
		}
		if len(held.list) > 0 {
			wait.Reset(time.Until(held.list[0].sendAt))
		}

		// A claim may bring an envelope that is due earlier than the others.
		claimed := s.claimed
		if held.bytes >= maxHeldBytes {
			claimed = nil
		}
		select {
		case list := <-claimed:
			for i := range list {
				heap.Push(&held, &list[i])
			}
		case <-wait.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// sendDue sends the envelopes of held that are due.
func (s *Scheduled) sendDue(ctx context.Context, held *claimedHeap) error {
	sent := 0
	for len(held.list) > 0 && !time.Now().Before(held.list[0].sendAt) {
		d := heap.Pop(held).(*dueEnvelope)
		crash.At("before-scheduled-publish")
		e, due := d.timer, d.due
		err := s.Sender.SendReserved(ctx, &d.entry, func(o *ledger.Outcome) {
			crash.At("after-scheduled-publish")
			if o.End == ledger.Sent {
				s.OnSent(s.Now().Sub(time.UnixMilli(due)))
			}
		}, func() { s.endTimer(e) })
		if err != nil {
			return err
		}

		// The list holds the envelope until the last one of its claim is sent.
		d.entry = waiting.Entry{}
		if sent++; sent%sendFlush == 0 {
			s.Sender.Flush()
		}
	}
	if sent > 0 {
		s.Sender.Flush()
	}
	return nil
}

// claimedHeap holds claimed envelopes, ordered by their due times.
type claimedHeap struct {
	list  []*dueEnvelope
	bytes int
}

func (h *claimedHeap) Len() int           { return len(h.list) }
func (h *claimedHeap) Less(i, j int) bool { return h.list[i].sendAt.Before(h.list[j].sendAt) }
func (h *claimedHeap) Swap(i, j int)      { h.list[i], h.list[j] = h.list[j], h.list[i] }

func (h *claimedHeap) Push(x any) {
	d := x.(*dueEnvelope)
	h.list = append(h.list, d)
	h.bytes += d.entry.Size()
}

func (h *claimedHeap) Pop() any {
	last := len(h.list) - 1
	d := h.list[last]
	h.list[last] = nil
	h.list = h.list[:last]
	h.bytes -= d.entry.Size()
	return d
}
