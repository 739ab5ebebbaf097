package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

const (
	commitTimeout  = 5 * time.Second
	releaseTimeout = 2 * time.Second
	// abandonGrace is how long an abandoned handler may take to return before the session ends without it.
	abandonGrace = 2 * time.Second
)

// session is one generation of the group.
type session struct {
	*run
	g         transport.Generation
	serveCtx  context.Context // ends when all partitions have to be given back
	drainCtx  context.Context // outlives serveCtx; the contexts of the partitions end when the time to drain is over
	endServe  context.CancelCauseFunc
	loops     sync.WaitGroup // all that ends with serveCtx
	outage    outage
	laneSlots chan struct{} // one for each running lane; an abandoned handler keeps its slot

	partitionsMu sync.Mutex
	partitions   map[transport.TopicPartition]*partition
	strays       map[transport.TopicPartition]*partition // that no member reads, and this one retries
	pastStrays   []*partition

	roomsMu sync.Mutex
	rooms   map[*registration]*waitingRoom
	closing bool // no room starts another loop

	commitRequested  chan struct{}
	finishedMessages atomic.Int64 // since the last commit, for CommitCount
	commitMu         sync.Mutex
	generationOver   atomic.Bool // the group has moved on without this member
}

// Serve handles the partitions of one generation. It blocks until ctx ends, then drains and
// commits. It returns an error only if the whole Run has to end.
func (r *run) Serve(ctx context.Context, generation transport.Generation) error {
	// Handlers finish after the generation has ended, so their context does not end with it.
	drainCtx, endDrain := context.WithCancel(context.WithoutCancel(r.ctx))
	defer endDrain()
	serveCtx, endServe := context.WithCancelCause(ctx)
	defer endServe(nil)

	session := &session{
		run: r, g: generation, serveCtx: serveCtx, drainCtx: drainCtx, endServe: endServe,
		partitions:      map[transport.TopicPartition]*partition{},
		strays:          map[transport.TopicPartition]*partition{},
		rooms:           map[*registration]*waitingRoom{},
		laneSlots:       make(chan struct{}, r.c.s.concurrency),
		commitRequested: make(chan struct{}, 1),
	}
	session.outage.noteLocked = func(began bool) {
		if began {
			r.c.health.note(healthOutage, errors.New(healthOutage))
		} else {
			r.c.health.note(healthOutage, nil)
		}
	}
	session.outage.report = func(err *outageError) {
		r.c.measureStop("database", !err.Over)
		r.report(err)
	}
	r.c.currentSession.Store(session)
	defer r.c.currentSession.CompareAndSwap(session, nil)
	r.c.health.join(true)
	defer r.c.health.join(false)
	r.serving.set(true)
	defer r.serving.set(false)
	r.noTopic.Store(false)

	// This goroutine counts as a loop, so that others may be added until serveCtx ends.
	session.loops.Add(1)
	session.addPartitions(generation.Partitions())
	session.loops.Go(session.commitLoop)
	session.loops.Go(session.reportGauges)
	session.loops.Go(session.explainIdle)
	for _, reg := range r.c.reg.snapshot().all {
		session.openRoom(reg)
	}
	if r.c.waiting != nil {
		session.loops.Go(session.carryOutRequests)
	}

	for serveCtx.Err() == nil {
		select {
		case <-serveCtx.Done():
		case change := <-generation.Changes():
			session.applyChange(change) //nolint:contextcheck // the drain outlives serveCtx
		}
	}
	if r.ctx.Err() != nil {
		r.note("leaving the group; messages in progress are finished first", "at_most", r.c.drainLimit())
	}
	// A room that is opened from now on starts no loop, so Wait misses none.
	session.roomsMu.Lock()
	session.closing = true
	session.roomsMu.Unlock()
	session.loops.Done()
	session.loops.Wait()
	session.drainPartitions(session.listAll()) //nolint:contextcheck // ctx has ended; the drain outlives it
	r.c.measure(telemetry.Measurement{Metric: telemetry.Assigned, N: 0})
	return session.fatalError()
}

// applyChange gives back the revoked partitions, and then adds the new ones.
func (s *session) applyChange(change transport.Change) {
	var revoked []*partition
	for _, tp := range change.Revoked {
		if partition := s.findPartition(tp); partition != nil {
			revoked = append(revoked, partition)
		}
	}

	if len(revoked) > 0 {
		s.note("partitions are given back", "partitions", formatPartitions(change.Revoked))
		s.drainPartitions(revoked)
		s.forgetPartitions(revoked)
	}
	s.addPartitions(change.Added)
	change.Done()
}

// addPartitions begins to read partitions.
func (s *session) addPartitions(list []transport.TopicPartition) {
	added := make([]*partition, len(list))
	s.partitionsMu.Lock()
	for i, tp := range list {
		added[i] = newPartition(s, tp)
		s.dropStrayLocked(tp)
		s.partitions[tp] = added[i]
	}
	n := len(s.partitions)
	s.partitionsMu.Unlock()
	s.c.measure(telemetry.Measurement{Metric: telemetry.Assigned, N: int64(n)})
	if len(list) > 0 {
		s.note("partitions are assigned", "partitions", formatPartitions(list), "generation", s.g.ID())
	}

	loaded := s.loadQueues(added)
	for _, p := range added {
		s.loops.Go(func() {
			select {
			case <-loaded:
			case <-p.serveCtx.Done():
			}
			p.fetchLoop()
		})
	}
}

// forgetPartitions removes partitions that are drained.
func (s *session) forgetPartitions(list []*partition) {
	s.partitionsMu.Lock()
	for _, p := range list {
		delete(s.partitions, p.tp)
	}
	s.partitionsMu.Unlock()

	for _, r := range s.listRooms() {
		for _, p := range list {
			r.forget(p.tp)
		}
	}
}

// listPartitions returns the current partitions.
func (s *session) listPartitions() []*partition {
	s.partitionsMu.Lock()
	defer s.partitionsMu.Unlock()
	return slices.Collect(maps.Values(s.partitions))
}

// listAll returns the current partitions, and the partitions without a reader whose messages this member has retried.
func (s *session) listAll() []*partition {
	s.partitionsMu.Lock()
	defer s.partitionsMu.Unlock()
	return slices.Concat(slices.Collect(maps.Values(s.partitions)), slices.Collect(maps.Values(s.strays)), s.pastStrays)
}

// findPartition returns a current partition, or one that no member reads and this one retries, or nil.
func (s *session) findPartition(tp transport.TopicPartition) *partition {
	s.partitionsMu.Lock()
	defer s.partitionsMu.Unlock()
	if partition := s.partitions[tp]; partition != nil {
		return partition
	}
	return s.strays[tp]
}

// listRooms returns the waiting rooms.
func (s *session) listRooms() []*waitingRoom {
	s.roomsMu.Lock()
	defer s.roomsMu.Unlock()
	return slices.Collect(maps.Values(s.rooms))
}

// errFatal marks the cause of a session that ends the whole Run.
type errFatal struct{ error }

func (e errFatal) Unwrap() error { return e.error }

// failRun ends the Run with err.
func (s *session) failRun(err error) {
	// Users see one error for all losses.
	if errors.Is(err, inbox.ErrRecreated) {
		err = fmt.Errorf("%w: %w", transport.ErrGap, err)
	}
	s.endServe(errFatal{err})
}

// fatalError returns the error that was passed to failRun, or nil.
func (s *session) fatalError() error {
	var fatal errFatal
	if errors.As(context.Cause(s.serveCtx), &fatal) {
		return fatal.error
	}
	return nil
}

// drainPartitions finishes the running tasks of some partitions, commits and releases the inbox's claims. It abandons
// handlers that run longer than the drain limit.
func (s *session) drainPartitions(list []*partition) {
	drained := make(chan struct{})
	// All partitions drain at the same time, within one limit.
	var tracks sync.WaitGroup
	for _, p := range list {
		p.endServe()
		p.stopStarting()
		tracks.Go(func() {
			<-p.fetchEnded
			p.trackGroup.Wait()
			p.stopped.Store(true)
		})
	}
	go func() { tracks.Wait(); close(drained) }()

	s.awaitTracks(drained, list)

	ctx, cancel := context.WithTimeout(s.drainCtx, commitTimeout)
	defer cancel()
	if err := s.commitOffsets(ctx); err != nil && !errors.Is(err, transport.ErrGenerationOver) {
		s.reportTrouble("cannot commit the last offsets; the next owner handles the messages again", fmt.Errorf("committing the last offsets: %w", err))
	}

	// Claims are released after the commit: another member may then begin with these messages.
	s.releaseClaims(list)
	for _, p := range list {
		p.releaseBuffers()
		if !p.isStray {
			p.closeGauges()
		}
	}
}

// awaitTracks blocks until drained is closed. After the drain limit it abandons the handlers of the partitions and waits for
// at most abandonGrace.
func (s *session) awaitTracks(drained <-chan struct{}, list []*partition) {
	limit := s.c.drainLimit()
	late := time.NewTimer(limit)
	defer late.Stop()

	select {
	case <-drained:
		return
	case <-late.C:
	}

	s.reportTrouble("cannot wait longer for handlers; the next owner handles their messages", fmt.Errorf("%w (%v)", errAbandoned, limit))
	for _, p := range list {
		p.abandon(errAbandoned)
	}
	left := time.NewTimer(abandonGrace)
	defer left.Stop()

	// A handler that ignores its context is left running. If it still commits, the inbox prevents a
	// second effect.
	select {
	case <-drained:
	case <-left.C:
	}
}

// drainLimit returns how long a drain may take. It is shorter than the group's timeout for a
// member: a slower member would lose its membership.
func (c *Consumer) drainLimit() time.Duration {
	if limited, ok := c.transport.(interface{ MemberTimeout() time.Duration }); ok {
		return max(min(c.s.drain, limited.MemberTimeout()*3/4), 0)
	}
	return max(c.s.drain, 0)
}

// releaseClaims releases the inbox's claims of the partitions. A claim that cannot be released
// expires later. A partition with a running handler keeps its claims, so that no other member
// starts the same messages at the same time.
func (s *session) releaseClaims(list []*partition) {
	ctx, cancel := context.WithTimeout(s.drainCtx, releaseTimeout)
	defer cancel()

	var attached []inbox.Partition
	for _, p := range list {
		if p.stopped.Load() {
			attached = append(attached, p.listAttached()...)
		}
	}
	if len(attached) == 0 {
		return
	}
	if err := s.inbox.Release(ctx, attached...); err != nil {
		s.reportTrouble("cannot release partitions in the inbox; their claims expire", fmt.Errorf("releasing partitions in the inbox: %w", err))
	}
}

// countFinished counts n messages that are finished together with all earlier messages, and
// requests a commit if the commit mode wants one now.
func (s *session) countFinished(n int) {
	if n == 0 {
		return
	}

	mode := s.c.s.commitMode
	if mode.count > 0 && s.finishedMessages.Add(int64(n)) >= int64(mode.count) {
		s.requestCommit()
	}
}

// requestCommit wakes the commit loop. It does not block.
func (s *session) requestCommit() {
	retry.Signal(s.commitRequested)
}

// idleCommit is how often a group that commits by count commits offsets that are not those of messages.
const idleCommit = 5 * time.Second

// commitLoop commits offsets according to the commit mode until the generation ends.
func (s *session) commitLoop() {
	var tick <-chan time.Time
	if mode := s.c.s.commitMode; mode.every > 0 {
		ticker := time.NewTicker(mode.every)
		defer ticker.Stop()
		tick = ticker.C
	}

	// A marker of a transaction or of a takeover is no message, so no count passes it, and the group would keep a lag.
	var idle <-chan time.Time
	if mode := s.c.s.commitMode; mode.count > 0 {
		ticker := time.NewTicker(idleCommit)
		defer ticker.Stop()
		idle = ticker.C
	}
	backoff := retry.Reopen.Start()

	for {
		select {
		case <-s.serveCtx.Done():
			return
		case <-tick:
		case <-s.commitRequested:
		case <-idle:
			// Otherwise the count decides.
			if s.finishedMessages.Load() > 0 {
				continue
			}
		}

		ctx, cancel := context.WithTimeout(s.drainCtx, commitTimeout)
		err := s.commitOffsets(ctx)
		cancel()
		if err == nil {
			backoff.Reset()
			continue
		}

		// The transport ends the generation as well. Further commits of this member would be rejected.
		if errors.Is(err, transport.ErrGenerationOver) {
			return
		}

		// One lost connection to MongoDB is no trouble: the next attempt follows at once.
		if backoff.Attempts() > 0 || !isTransient(err) {
			s.reportTrouble("cannot commit offsets; they are committed again", fmt.Errorf("committing offsets: %w", err))
		}
		if backoff.Wait(s.serveCtx) != nil {
			return
		}
		s.requestCommit()
	}
}

// commitOffsets commits the offsets of finished messages that are not committed yet. After
// ErrGenerationOver, every later call returns that error too.
func (s *session) commitOffsets(ctx context.Context) error {
	committed, err := s.commitOffsetsOnce(ctx)
	if committed {
		result := "ok"
		if err != nil {
			result = "failed"
		}
		s.c.measure(telemetry.Measurement{Metric: telemetry.Committed, N: 1, Reason: result})
	}
	return err
}

// commitOffsetsOnce is commitOffsets without the measurement. It reports whether there was something to commit.
func (s *session) commitOffsetsOnce(ctx context.Context) (committed bool, err error) {
	s.commitMu.Lock()
	defer s.commitMu.Unlock()

	if s.generationOver.Load() {
		return false, transport.ErrGenerationOver
	}
	// Messages that finish from here on count for the next commit.
	s.finishedMessages.Store(0)

	offsets, list := map[transport.TopicPartition]transport.GroupOffset{}, s.listPartitions()
	for _, p := range list {
		if offset, changed := p.uncommittedOffset(); changed {
			offsets[p.tp] = offset
		}
	}
	if len(offsets) == 0 {
		return false, s.storeTopicIDs(ctx, list)
	}

	err = s.g.Commit(ctx, offsets)
	// The partitions belong to other members now: a commit could move their offsets back.
	if errors.Is(err, transport.ErrGenerationOver) {
		s.generationOver.Store(true)
	}
	if err != nil {
		return true, err
	}

	// A failed commit leaves the offsets uncommitted, and the next one contains them.
	for _, p := range list {
		if offset, ok := offsets[p.tp]; ok {
			p.setCommitted(offset)
		}
	}
	return true, s.storeTopicIDs(ctx, list)
}

// storeTopicIDs stores the ids of the topics in the inbox. It comes after the commit: if the order were the other way round, a
// crash in between would leave a new topic without a sign that it has to be read from its start.
func (s *session) storeTopicIDs(ctx context.Context, list []*partition) error {
	ids := map[inbox.Partition]string{}
	for _, p := range list {
		if id, ok := p.unstoredID(); ok {
			ids[p.inboxPlace()] = id
		}
	}
	if len(ids) == 0 {
		return nil
	}
	if err := s.inbox.StoreTopicIDs(ctx, ids); err != nil {
		return err
	}

	for _, p := range list {
		if id, ok := ids[p.inboxPlace()]; ok {
			p.setStoredID(id)
		}
	}
	return nil
}
