package term

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/purge"
	"github.com/outrelay/outrelay/internal/waiting"
)

// deliveryRecorder records deliveries on their envelopes.
type deliveryRecorder struct {
	held      *lease.Held
	recording string
	log       *slog.Logger
	refusedAt map[string]time.Time // when a collection last refused a recorded delivery
}

// Sent implements pipeline.Recorder.
func (d *deliveryRecorder) Sent(ctx context.Context, batch []*pipeline.Sent) error {
	list := make([]purge.Sent, len(batch))
	for i, s := range batch {
		list[i] = purge.Sent{NS: s.NS, ID: s.ID, TS: s.TS}
		for _, a := range s.Answers {
			p := outboxes.Place{Topic: a.Topic, Partition: a.Partition, Offset: a.Offset}
			list[i].Places = append(list[i].Places, p)
		}
	}
	return d.writeDeliveries(ctx, list)
}

// removeRefusing removes the deliveries of collections that have recently rejected a recorded
// delivery.
func (d *deliveryRecorder) removeRefusing(list []purge.Sent) []purge.Sent {
	return slices.DeleteFunc(list, func(s purge.Sent) bool {
		at, refused := d.refusedAt[s.NS]
		return refused && time.Since(at) < recordingPause
	})
}

// writeDeliveries records deliveries on their envelopes. If MongoDB rejects one, because a
// validator of the collection does not allow the fields, it stays unrecorded: the envelope was
// delivered, and the watermark must not wait for a write that cannot succeed.
func (d *deliveryRecorder) writeDeliveries(ctx context.Context, list []purge.Sent) error {
	write := func(part []purge.Sent) error {
		part = d.removeRefusing(slices.Clone(part))
		if len(part) == 0 {
			return nil
		}
		return purge.RecordSent(ctx, d.held, d.recording, part)
	}

	reject := func(s purge.Sent, err error) error {
		d.refusedAt[s.NS] = time.Now()
		d.log.Error("a collection rejects recorded deliveries; allow the field sentAt in its validator",
			"collection", s.NS, "again_in", recordingPause, "error", err)
		return nil
	}

	return waiting.WriteHalves(list, write, reject)
}

// recordingPause is how long the deliveries of a collection are not recorded after it has
// rejected a record. Without the pause, each envelope would cost a transaction.
const recordingPause = time.Minute
