package pipeline

import (
	"context"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// DeliverSwept delivers an envelope of a sweep, flagged as redelivered: it may have been sent
// earlier than the read-back reaches. pos is its position if it has to wait (N15).
func (p *Pump) DeliverSwept(ctx context.Context, e *outboxes.Envelope, pos string) error {
	now := p.Now().UnixMilli()
	p.ev = changestream.Event{
		Op:          changestream.Insert,
		Document:    e.Raw,
		HasDocument: true,
		DB:          e.DB,
		Coll:        e.Coll,
		ClusterTime: e.TS,
		// The record gets the time at which it is sent (N12).
		WallMS: now,
		Data:   []byte(pos),
	}
	// The lag counts from the insert.
	commit := now
	if !e.TS.IsZero() {
		commit = int64(e.TS.T) * 1000
	}

	// The events of the stream that follow use the same meta.
	p.meta.Redelivered, p.swept = true, true
	defer func() { p.meta.Redelivered, p.swept = false, false }()
	p.eventCount++
	if p.eventCount%flushEvery == 0 {
		p.Dispatcher.Flush()
	}
	return p.deliverInsert(ctx, commit)
}

// SetCurrent sets the current event. A sweep within the handling of an event overwrites it.
func (p *Pump) SetCurrent(ev changestream.Event) { p.ev = ev }

// deliveredBySweep reports whether the sweep before this stream has delivered p.ev. If the sweep
// may have delivered it, p.ev is flagged as redelivered.
func (p *Pump) deliveredBySweep() bool {
	p.meta.Redelivered = false
	if p.sweptEvents.IsPast(p.ev.ClusterTime) {
		p.sweptEvents = nil
		return false
	}

	known, doubtful := p.sweptEvents.WasSwept(p.ev.DB, p.ev.Coll, p.ev.IDType, p.ev.ID, p.ev.Document)
	p.meta.Redelivered = doubtful
	return known
}
