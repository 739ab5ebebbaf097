package pipeline

import (
	"context"

	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Swept delivers the envelopes of sweeps. It may be used between two events of the stream, by the goroutine of the pump.
type Swept struct {
	feed
	stored StoredTopics
}

// NewSwept returns a Swept. stored finds the envelopes that it must not send again.
func NewSwept(build BuildConfig, feedConfig FeedConfig, stored StoredTopics) *Swept {
	swept := &Swept{feed: newFeed(build, feedConfig), stored: stored}
	// An envelope may have been sent earlier than the read-back reaches.
	swept.meta.Redelivered = true
	swept.isSweep = true
	return swept
}

// DeliverSwept delivers an envelope of a sweep, flagged as redelivered. pos is its position if it has to wait (N15). It blocks
// while the dispatcher has no room.
func (s *Swept) DeliverSwept(ctx context.Context, envelope *outboxes.Envelope, pos string) error {
	s.readAt = s.Now()
	now := s.readAt.UnixMilli()
	s.ev = changes.Event{
		Op:          changes.Insert,
		Document:    envelope.Raw,
		HasDocument: true,
		DB:          envelope.DB,
		Coll:        envelope.Coll,
		ClusterTime: envelope.TS,
		// The record gets the time at which it is sent (N12).
		WallMS: now,
		Pos:    []byte(pos),
	}
	s.rereading = s.Dispatcher.IsRereading()
	s.meta.Position = pos
	// The lag counts from the insert.
	commit := now
	if !envelope.TS.IsZero() {
		commit = int64(envelope.TS.T) * 1000
	}

	s.eventCount++
	if s.eventCount%flushEvery == 0 {
		s.Dispatcher.Flush()
	}
	var before stored
	var err error
	if before.topics, before.found, err = s.stored.TopicsOf(ctx, s.namespace(), s.ev.Document); err != nil {
		return err
	}
	// One large record must not keep its memory until the next envelope.
	defer s.filler.Release()
	return s.deliverInsert(ctx, commit, before)
}
