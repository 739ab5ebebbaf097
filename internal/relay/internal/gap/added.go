package gap

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
)

// Added are collections that the configuration names since a position of the stream.
type Added struct {
	Outboxes []outboxes.Outbox
	To       bson.Timestamp            // of the position
	ReadUpTo map[string]bson.Timestamp // by name; zero for a collection that was never read
}

// SweepAdded delivers the envelopes that were in collections when the configuration got their names (N27): the stream does not contain
// their inserts. As at a first start, `start` decides which of them. It precedes the stream, so the position stays until all of them are
// resolved. Until then the watcher document describes the earlier stream, and a later owner repeats the sweep.
func (r *Recovery) SweepAdded(ctx context.Context, added Added) error {
	if len(added.Outboxes) == 0 {
		return nil
	}
	defer r.Calls.KeepTicking(ctx, tickEvery)()

	// A transaction that was open at the end may have an earlier stamp.
	margin := mongodb.Margin(ctx, r.Calls.Client)
	for _, outbox := range added.Outboxes {
		upTo := mongodb.Earlier(added.ReadUpTo[outbox.NS()], margin)
		if first := outboxes.FirstStampAt(r.Config.Start.At); upTo.Before(first) {
			upTo = first
		}
		added.ReadUpTo[outbox.NS()] = upTo
	}
	// The schedules are listed in any case: no watcher has sent envelopes that are due later.
	if r.Config.Start.Now {
		return r.Schedules.NoteExisting(ctx, added.Outboxes)
	}

	claims, err := r.Collections.Registrations(ctx)
	if err != nil {
		return err
	}
	return r.sweepEntering(ctx, "added", &sweep.Sweep{
		Collections: added.Outboxes,
		From:        added.To,
		ReadUpTo:    added.ReadUpTo,
		Claims:      outboxes.ByUUID(claims),
		To:          added.To,
		Margin:      margin,
		Skip:        r.Skip,
		Publisher:   enteringPublisher{sweptPublisher{r}},
	})
}

// sweepEntering runs a sweep of collections that got watched names. The position stays before that until all of their envelopes are
// resolved.
func (r *Recovery) sweepEntering(ctx context.Context, reason string, entering *sweep.Sweep) error {
	var names []string
	for _, outbox := range entering.Collections {
		names = append(names, outbox.NS())
	}
	r.Log.Warn("sweeping collections that got watched names", "reason", reason, "collections", names)

	entering.Client, entering.OldIDs, entering.Memory = r.Calls.Client, r.sweepsOldIDs(), int64(r.Config.Limits.Memory)/4
	res, err := entering.Run(ctx)
	if err != nil {
		return err
	}

	r.Dispatcher.Flush()
	if err := r.warnOfOldIDs(ctx, entering); err != nil {
		return err
	}
	r.AppendEvent(ctx, nodes.GapClosed, bson.D{
		{Key: "reason", Value: reason},
		{Key: "collections", Value: names},
		{Key: "swept", Value: res.Swept},
	})

	// The outboxes must be on the list before the position passes their names: a later owner looks for scheduled envelopes only
	// in outboxes on that list.
	return r.Schedules.NoteExisting(ctx, entering.Collections)
}
