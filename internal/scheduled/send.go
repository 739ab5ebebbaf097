package scheduled

import (
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/retry"
)

// sendClaimed sends claimed envelopes at their due times, until ctx ends or the outlet fails.
func (s *Scheduled) sendClaimed(ctx context.Context) error {
	for {
		select {
		case list := <-s.claimed:
			slices.SortStableFunc(list, func(a, b dueEnvelope) int { return int(a.at - b.at) })
			if err := s.sendWhenDue(ctx, list); err != nil {
				return err
			}

		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// sendWhenDue sends the envelopes of list, which is ordered by their due times.
func (s *Scheduled) sendWhenDue(ctx context.Context, list []dueEnvelope) error {
	for i := range list {
		d := &list[i]
		for now := s.Now().UnixMilli(); now < d.at; now = s.Now().UnixMilli() {
			s.Sender.Flush()
			// The clock of the server may be set back during the wait.
			wait := min(time.Duration(d.at-now)*time.Millisecond, maxIdle)
			if err := retry.Sleep(ctx, wait); err != nil {
				return err
			}
		}

		crash.At("before-scheduled-publish")
		e, due := d.timer, d.at
		err := s.Sender.SendReserved(ctx, &d.entry, func(o *ledger.Outcome) {
			crash.At("after-scheduled-publish")
			if o.End == ledger.Sent {
				s.OnSent(s.Now().Sub(time.UnixMilli(due)))
			}
		}, func() { s.endTimer(e) })
		if err != nil {
			return err
		}
		d.entry.Raw = nil
	}
	s.Sender.Flush()
	return nil
}
