package term

import (
	"context"
	"slices"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/internal/gap"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/watched"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/resume"
)

// startPoint determines where the stream of a term starts, and saves in the watcher document what
// depends on how far the stream has come since.
type startPoint struct {
	slot        *Runner
	held        *lease.Held
	calls       *readiness.Calls
	collections *watched.Collections
	plan        *gap.Plan
	resolver    *pipeline.Resolver
	progress    *progress

	// mu guards these fields: the end of a sweep replaces them while the monitor saves them.
	mu                 sync.Mutex
	from               resume.Position        // where the stream was started
	drainedSlots       []pipeline.DrainedSlot // delivered by the slots of the previous division
	unsavedDescription *lease.Update          // of the new stream; saved once the position has passed from

	// added is swept before the stream is read. It is of the goroutine that takes over and reads the stream.
	added gap.Added
}

// chooseStart sets from to the position that stays until the stream moves it, and drainedSlots and unsavedDescription to
// their values of the document. It returns where to open the stream. began is a cluster time before the collections were listed.
func (s *startPoint) chooseStart(
	ctx context.Context, doc *lease.Document, began bson.Timestamp,
) (changes.Start, error) {
	hash := s.slot.scope.PipelineHash()
	s.drainedSlots = pipeline.ParseDrainedSlots(doc)
	s.from = doc.Position()
	if at, ok := s.from.Time(); ok {
		outboxes, readUpTo := s.collections.CompareWatched(doc.Collections, at)
		if doc.PipelineHash != hash {
			// The stream is opened by time, because it may not contain the event of the token. So no event is read again after the token (N23).
			s.from = resume.Position{ClusterTime: at}
		}
		// A position of another publisher comes without collections. With the same pipeline, the stream includes new collections.
		if doc.PipelineHash != lease.AdoptedHash && doc.PipelineHash != hash {
			s.added = gap.Added{Outboxes: outboxes, ReadUpTo: readUpTo, To: at}
			s.progress.undescribed.Store(true)
		}
	}
	identities := s.collections.CollectionIdentities()
	update := lease.Update{PipelineHash: &hash, Collections: &identities}

	if doc.Gap != nil {
		// An ordered sweep has no end yet.
		if doc.Gap.To.IsZero() && s.from.IsZero() {
			s.from = resume.Position{ClusterTime: began}
			update.Checkpoint.Position = s.from
		}
		return s.plan.ResumeGap(ctx, doc, update, began, s.added)
	}
	if !s.from.IsZero() {
		start := changes.Start{Position: doc.Position(), PipelineHash: doc.PipelineHash}
		for _, c := range doc.Collections {
			known := changes.KnownCollection{NS: c.NS}
			copy(known.UUID[:], c.UUID.Data)
			start.Collections = append(start.Collections, known)
		}

		// The hash may only be saved with a position that was reached with this pipeline (N23): see
		// saveDescription.
		s.unsavedDescription = &update
		return start, nil
	}

	at, err := s.findFirstStart(ctx, began)
	if err != nil {
		return changes.Start{}, err
	}

	// All slots of a watcher without a checkpoint start where the first of them starts. If they
	// started at different times, events in between would be missing or sent twice.
	err = s.calls.RetryCall(ctx, func(ctx context.Context) (err error) {
		at, err = s.slot.shared.Divisions.StartAt(ctx, s.slot.cfg.Watcher, s.slot.Slot, at)
		return err
	})
	if err != nil {
		return changes.Start{}, err
	}

	// The position is persisted before the first event. After a crash from here on, the next owner
	// starts at the same place.
	s.from = resume.Position{ClusterTime: at}
	update.Checkpoint.Position = s.from
	hidden, err := s.plan.HasUnstampedBacklog(ctx, began)
	if err != nil {
		return changes.Start{}, err
	}
	if hidden {
		return s.plan.PlanSweep(ctx, gap.ReasonBacklog, bson.Timestamp{}, began, update)
	}
	return changes.Start{Position: s.from}, s.held.Save(ctx, update)
}

// findFirstStart returns where a watcher without a checkpoint starts: at the oldest envelope of the
// backlog, at a configured time, or at now. now is a cluster time before the outboxes were listed.
func (s *startPoint) findFirstStart(ctx context.Context, now bson.Timestamp) (start bson.Timestamp, err error) {
	if s.slot.cfg.Start.Now {
		return now, nil
	}
	if when := s.slot.cfg.Start.At; !when.IsZero() {
		return bson.Timestamp{T: outboxes.FirstStampAt(when).T, I: 1}, nil
	}

	// The reads must see everything that was committed up to now. Otherwise the oldest of it could
	// lie before the start.
	session, err := mongodb.Causal(ctx, s.slot.shared.Mongo.Stream, now)
	if err != nil {
		return start, err
	}
	defer session.EndSession(ctx)
	ctx = mongo.NewSessionContext(ctx, session)

	oldest := now
	for _, c := range s.collections.WatchedOutboxes() {
		coll := mongodb.Database(s.slot.shared.Mongo.Stream, c.DB).Collection(c.Coll)
		err := s.calls.RetryRead(ctx, func(ctx context.Context) error {
			ts, ok, err := outboxes.OldestTS(ctx, coll)
			if err == nil && ok && ts.Before(oldest) {
				oldest = ts
			}
			return err
		})
		if err != nil {
			return start, err
		}
	}
	return oldest, nil
}

// saveDescription saves the pipeline hash and the collections of the stream, together with the
// first position that was reached with them. Before the stream has reached one, it does nothing.
func (s *startPoint) saveDescription(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plan.IsSweeping() {
		return
	}
	reached, ok := s.resolver.Reached()
	if !ok {
		return
	}
	s.forgetDrainedSlotsLocked(ctx, reached)
	if s.unsavedDescription == nil || reached.Compare(s.from) <= 0 {
		return
	}

	// The checkpoint is part of the same write: the hash must never be stored with an older
	// position.
	update := *s.unsavedDescription
	identities := s.collections.CollectionIdentities()
	update.Collections = &identities
	update.Current = s.progress.checkpointOfStream
	if err := s.held.Save(ctx, update); err != nil {
		// The renewal fails with the same error, and reports it.
		return
	}
	s.unsavedDescription = nil
	s.progress.undescribed.Store(false)
}

// noteSwept adds the bounds of a sweep that precedes the stream to the description. An owner that starts within them flags the envelopes that
// the stream brings again (N27).
func (s *startPoint) noteSwept(end, until bson.Timestamp) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unsavedDescription != nil && !end.IsZero() {
		s.unsavedDescription.Swept = &lease.Swept{To: end, Until: until}
	}
}

// forgetDrainedSlotsLocked removes the drained slots from the document once the position has
// passed their positions. The caller holds mu.
func (s *startPoint) forgetDrainedSlotsLocked(ctx context.Context, reached resume.Position) {
	notPassed := func(slot pipeline.DrainedSlot) bool { return outboxes.PosOf(reached) <= slot.Pos }
	if s.drainedSlots == nil || slices.ContainsFunc(s.drainedSlots, notPassed) {
		return
	}

	// If the save fails, the renewal fails with the same error and reports it.
	if s.held.Save(ctx, lease.Update{Current: s.progress.checkpoint, ClearPassed: true}) == nil {
		s.drainedSlots = nil
	}
}

// setStart sets the position that a sweep has reached. The document contains nothing else of the
// stream before it.
func (s *startPoint) setStart(position resume.Position) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.from = position
	s.unsavedDescription = nil
	s.progress.undescribed.Store(false)
	s.drainedSlots = nil
}
