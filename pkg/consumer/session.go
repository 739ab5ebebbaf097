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
	// grace is how long what was abandoned may take to notice, before it is left behind.
	grace = 2 * time.Second
)

// session is one generation of the group.
type session struct {
	*run
	g     Generation
	soft  context.Context // ends when the partitions are to be given back
	hard  context.Context // ends when the time to drain is over
	end   context.CancelCauseFunc
	parts map[TopicPartition]*partition
	away  outage
	slots chan struct{} // one for each lane that runs; a handler that was abandoned keeps that of its own generation

	due        chan struct{} // a commit is wanted
	unreported atomic.Int64  // messages passed since the last commit, for CommitCount
	committing sync.Mutex
	over       atomic.Bool // the group went on without us
}

// Serve handles the partitions of one generation.
func (r *run) Serve(ctx context.Context, g Generation) error {
	hard, abandon := context.WithCancelCause(context.WithoutCancel(r.ctx))
	defer abandon(nil)
	soft, end := context.WithCancelCause(ctx)
	defer end(nil)
	s := &session{run: r, g: g, soft: soft, hard: hard, end: end, parts: map[TopicPartition]*partition{}, due: make(chan struct{}, 1)}
	s.slots = make(chan struct{}, r.c.s.concurrency)
	s.away.notify = func(on bool) { r.c.s.observer.Suspended("database", on) }
	s.away.report = r.report
	for _, a := range g.Partitions() {
		s.parts[a.TopicPartition] = newPartition(s, a)
	}
	r.c.s.observer.Assigned(len(s.parts))
	r.c.currentSession.Store(s)
	defer r.c.currentSession.CompareAndSwap(s, nil)
	var readers sync.WaitGroup
	for _, p := range s.parts {
		readers.Go(p.read)
	}
	readers.Go(s.commits)
	readers.Go(s.gauge)
	<-soft.Done()
	readers.Wait()
	s.drain(abandon) //nolint:contextcheck // what ends is that context; the drain outlives it
	return s.fatal()
}

// errFatal marks the cause of a session that ends the whole Run.
type errFatal struct{ error }

func (e errFatal) Unwrap() error { return e.error }

// fail ends the Run with err.
func (s *session) fail(err error) { s.end(errFatal{err}) }

func (s *session) fatal() error {
	var f errFatal
	if errors.As(context.Cause(s.soft), &f) {
		return f.error
	}
	return nil
}

// drain finishes what is in flight, or abandons it, and commits.
func (s *session) drain(abandon context.CancelCauseFunc) {
	done := make(chan struct{})
	var tracks sync.WaitGroup
	for _, p := range s.parts {
		p.close()
		tracks.Go(func() { p.tracking.Wait(); p.still.Store(true) })
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
		left := time.NewTimer(grace)
		defer left.Stop()
		select {
		case <-done:
		case <-left.C: // it does not heed its context; whatever it still commits, the inbox makes single
		}
	}
	ctx, cancel := context.WithTimeout(s.hardValues(), commitTimeout)
	defer cancel()
	if err := s.commit(ctx); err != nil && !errors.Is(err, ErrGenerationOver) {
		s.report(fmt.Errorf("committing the last offsets: %w", err))
	}
	s.release()
	for _, p := range s.parts {
		p.forget()
	}
}

// drainLimit is the time to drain: a member that takes longer than the group waits is not one any more.
func (c *Consumer) drainLimit() time.Duration {
	if t, ok := c.transport.(interface{ MemberTimeout() time.Duration }); ok {
		return min(c.s.drain, t.MemberTimeout()*3/4)
	}
	return c.s.drain
}

// hardValues is a context for what has to be done after everything ended.
func (s *session) hardValues() context.Context { return context.WithoutCancel(s.hard) }

// release gives up the inbox's claims of the partitions; they run out anyway. A partition with a handler that still runs keeps
// them until then, or somebody else would begin the same beside it.
func (s *session) release() {
	ctx, cancel := context.WithTimeout(s.hardValues(), releaseTimeout)
	defer cancel()
	var failed []error
	for tp, p := range s.parts {
		if !p.hasAttachments() || !p.still.Load() {
			continue
		}
		if err := p.releaseAttachments(ctx); err != nil {
			failed = append(failed, fmt.Errorf("releasing partition %s in the inbox: %w", tp, err))
		}
	}
	s.report(errors.Join(failed...))
}

// passed counts messages that are finished, and all before them, for the commit mode.
func (s *session) passed(n int) {
	if n == 0 {
		return
	}
	m := s.c.s.commits
	if m.kind == commitEach || m.kind == commitCount && s.unreported.Add(int64(n)) >= int64(m.n) {
		s.want()
	}
}

func (s *session) want() {
	select {
	case s.due <- struct{}{}:
	default:
	}
}

// commits runs the commit mode until the generation ends.
func (s *session) commits() {
	var tick <-chan time.Time
	if m := s.c.s.commits; m.kind == commitInterval {
		t := time.NewTicker(m.every)
		defer t.Stop()
		tick = t.C
	}
	b := retry.Reopen.Start()
	for {
		select {
		case <-s.soft.Done():
			return
		case <-tick:
		case <-s.due:
		}
		ctx, cancel := context.WithTimeout(s.hard, commitTimeout)
		err := s.commit(ctx)
		cancel()
		if err == nil {
			b.Reset()
			continue
		}
		if errors.Is(err, ErrGenerationOver) {
			return // the transport notices as well; nothing of ours counts any more
		}
		s.report(fmt.Errorf("committing offsets: %w", err))
		if b.Wait(s.soft) != nil {
			return
		}
		s.want()
	}
}

// commit stores what is finished and not committed yet.
func (s *session) commit(ctx context.Context) error {
	s.committing.Lock()
	defer s.committing.Unlock()
	if s.over.Load() {
		return ErrGenerationOver
	}
	s.unreported.Store(0)
	offsets := map[TopicPartition]int64{}
	for tp, p := range s.parts {
		if at, news := p.committable(); news {
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
			s.over.Store(true)
		}
		return err
	}
	for tp, at := range offsets {
		s.parts[tp].commit(at)
	}
	return nil
}
