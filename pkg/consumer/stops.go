package consumer

import (
	"context"
	"slices"

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

// reportStops records for operators which handlers take no messages. While there are none, it costs nothing.
func (r *run) reportStops(ctx context.Context) {
	stops := r.c.listStops()
	if len(stops) == 0 && len(r.census.stops) == 0 {
		return
	}
	err := r.c.waiting.ReportStops(ctx, r.c.group, r.memberID, stops)
	if err == nil {
		r.census.stops = slices.Clone(stops)
	} else if ctx.Err() == nil {
		r.reportTrouble("cannot record the stopped handlers for operators; they are recorded again", err)
	}
}

// withdrawStops removes the record when the run ends. ctx has ended then.
func (r *run) withdrawStops(ctx context.Context) {
	if len(r.census.stops) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	// Without a response, the record expires.
	_ = r.c.waiting.ReportStops(ctx, r.c.group, r.memberID, nil)
}
