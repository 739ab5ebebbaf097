package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

const (
	commitTimeout  = 5 * time.Second
	releaseTimeout = 2 * time.Second
	// abandonGrace is how long what was abandoned may take to notice, before it is left behind.
	abandonGrace = 2 * time.Second
)

// session is one generation of the group.
type session struct {
	*run
	g     Generation
	serveCtx  context.Context // ends when the partitions are to be given back
	drainCtx  context.Context // ends when the time to drain is over
	endServe   context.CancelCauseFunc
	partitions map[TopicPartition]*partition
	outage  outage
	laneSlots chan struct{} // one for each lane that runs; a handler that was abandoned keeps that of its own generation

	commitRequested        chan struct{} // a commit is wanted
	finishedMessages atomic.Int64  // messages passed since the last commit, for CommitCount
	commitMu sync.Mutex
	generationOver       atomic.Bool // the group went on without us
}

// Serve handles the partitions of one generation.
func (r *run) Serve(ctx context.Context, g Generation) error {
	hard, abandon := context.WithCancelCause(context.WithoutCancel(r.ctx))
	defer abandon(nil)
	soft, end := context.WithCancelCause(ctx)
	defer end(nil)
	s := &session{run: r, g: g, serveCtx: soft, drainCtx: hard, endServe: end, partitions: map[TopicPartition]*partition{}, commitRequested: make(chan struct{}, 1)}
	s.laneSlots = make(chan struct{}, r.c.s.concurrency)
	s.outage.notify = func(on bool) { r.c.s.observer.Suspended("database", on) }
	s.outage.report = r.report
	for _, a := range g.Partitions() {
		s.partitions[a.TopicPartition] = newPartition(s, a)
	}
	r.c.s.observer.Assigned(len(s.partitions))
	r.c.currentSession.Store(s)
	defer r.c.currentSession.CompareAndSwap(s, nil)
	var readers sync.WaitGroup
	for _, p := range s.partitions {
		readers.Go(p.fetchLoop)
	}
	readers.Go(s.commitLoop)
	readers.Go(s.reportGauges)
	<-soft.Done()
	readers.Wait()
	s.drainPartitions(abandon) //nolint:contextcheck // what ends is that context; the drain outlives it
	return s.fatalError()
}

// errFatal marks the cause of a session that ends the whole Run.
type errFatal struct{ error }

func (e errFatal) Unwrap() error { return e.error }

// failRun ends the Run with err.
func (s *session) failRun(err error) { s.endServe(errFatal{err}) }

func (s *session) fatalError() error {
	var f errFatal
	if errors.As(context.Cause(s.serveCtx), &f) {
		return f.error
	}
	return nil
}

// drainPartitions finishes what is in flight, or abandons it, and commits.
func (s *session) drainPartitions(abandon context.CancelCauseFunc) {
	done := make(chan struct{})
	var tracks sync.WaitGroup
	for _, p := range s.partitions {
		p.stopStarting()
		tracks.Go(func() { p.trackGroup.Wait(); p.stopped.Store(true) })
	}
	go func() { tracks.Wait(); close(done) }()
	limit := s.c.drainLimit()
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		s.report(fmt.Errorf("%w (%v)", ErrAbandoned, limit))
		abandon(ErrAbandoned)
		left := time.NewTimer(abandonGrace)
		defer left.Stop()
		select {
		case <-done:
		case <-left.C: // it does not heed its context; whatever it still commits, the inbox makes single
		}
	}
	ctx, cancel := context.WithTimeout(s.cleanupContext(), commitTimeout)
	defer cancel()
	if err := s.commitOffsets(ctx); err != nil && !errors.Is(err, ErrGenerationOver) {
		s.report(fmt.Errorf("committing the last offsets: %w", err))
	}
	s.releaseClaims()
	for _, p := range s.partitions {
		p.releaseBuffers()
	}
}

// drainLimit is the time to drain: a member that takes longer than the group waits is not one any more.
func (c *Consumer) drainLimit() time.Duration {
	if t, ok := c.transport.(interface{ MemberTimeout() time.Duration }); ok {
		return min(c.s.drain, t.MemberTimeout()*3/4)
	}
	return c.s.drain
}

// cleanupContext is a context for what has to be done after everything ended.
func (s *session) cleanupContext() context.Context { return context.WithoutCancel(s.drainCtx) }

// releaseClaims gives up the inbox's claims of the partitions; they run out anyway. A partition with a handler that still runs keeps
// them until then, or somebody else would begin the same beside it.
func (s *session) releaseClaims() {
	ctx, cancel := context.WithTimeout(s.cleanupContext(), releaseTimeout)
	defer cancel()
	var failed []error
	for tp, p := range s.partitions {
		if !p.hasAttachments() || !p.stopped.Load() {
			continue
		}
		if err := p.releaseAttachments(ctx); err != nil {
			failed = append(failed, fmt.Errorf("releasing partition %s in the inbox: %w", tp, err))
		}
	}
	s.report(errors.Join(failed...))
}

// countFinished counts messages that are finished, and all before them, for the commit mode.
func (s *session) countFinished(n int) {
	if n == 0 {
		return
	}
	m := s.c.s.commitMode
	if m.kind == commitEach || m.kind == commitCount && s.finishedMessages.Add(int64(n)) >= int64(m.n) {
		s.requestCommit()
	}
}

func (s *session) requestCommit() {
	select {
	case s.commitRequested <- struct{}{}:
	default:
	}
}

// commitLoop runs the commit mode until the generation ends.
func (s *session) commitLoop() {
	var tick <-chan time.Time
	if m := s.c.s.commitMode; m.kind == commitInterval {
		t := time.NewTicker(m.every)
		defer t.Stop()
		tick = t.C
	}
	b := retry.Reopen.Start()
	for {
		select {
		case <-s.serveCtx.Done():
			return
		case <-tick:
		case <-s.commitRequested:
		}
		ctx, cancel := context.WithTimeout(s.drainCtx, commitTimeout)
		err := s.commitOffsets(ctx)
		cancel()
		if err == nil {
			b.Reset()
			continue
		}
		if errors.Is(err, ErrGenerationOver) {
			return // the transport notices as well; nothing of ours counts any more
		}
		s.report(fmt.Errorf("committing offsets: %w", err))
		if b.Wait(s.serveCtx) != nil {
			return
		}
		s.requestCommit()
	}
}

// commitOffsets stores what is finished and not committed yet.
func (s *session) commitOffsets(ctx context.Context) error {
	s.commitMu.Lock()
	defer s.commitMu.Unlock()
	if s.generationOver.Load() {
		return ErrGenerationOver
	}
	s.finishedMessages.Store(0)
	offsets := map[TopicPartition]int64{}
	for tp, p := range s.partitions {
		if at, news := p.uncommittedOffset(); news {
			offsets[tp] = at
		}
	}
	if len(offsets) == 0 {
		return nil
	}
	err := s.g.Commit(ctx, offsets)
	s.c.s.observer.Committed(err)
	if err != nil {
		if errors.Is(err, ErrGenerationOver) {
			s.generationOver.Store(true)
		}
		return err
	}
	for tp, at := range offsets {
		s.partitions[tp].setCommitted(at)
	}
	return nil
}
