package consumer

import (
	"context"

	"github.com/outrelay/outrelay/internal/service/setaside"
)

// listStops returns the handlers that take no messages in this process.
func (c *Consumer) listStops() (list []setaside.Stop) {
	if c.gate.isPaused() {
		list = append(list, setaside.Stop{})
	}
	for _, h := range c.handlerStatus() {
		if h.Suspended {
			list = append(list, setaside.Stop{Handler: h.Name, Until: h.SuspendedUntil.UTC(), Reason: h.LastError})
		}
	}
	return list
}

// leaveCensus removes the record of this member when the run ends. ctx has ended then.
func (r *run) leaveCensus(ctx context.Context) {
	if !r.census.recorded {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	// Without a response, the record expires.
	_ = r.c.waiting.Leave(ctx, r.c.group, r.memberID)
}
