package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// reportRecreated reports that a topic was deleted and created again. With WithHaltOnLoss, it ends the Run and returns an error.
func (s *session) reportRecreated(tp transport.TopicPartition) error {
	err := fmt.Errorf("%w: the topic of partition %s was deleted and created again", transport.ErrGap, tp)
	if s.c.s.haltsOnLoss() {
		err = fmt.Errorf("%w; to go on from its start, run once without WithHaltOnLoss", err)
		s.failRun(err)
		return err
	}
	s.report(fmt.Errorf("%w; going on from its start", err))
	return nil
}

// restartIfRecreated continues at the start of the topic if it was deleted and created again, and reports whether it was. With
// WithHaltOnLoss it ends the Run instead.
func (p *partition) restartIfRecreated(ctx context.Context) (bool, error) {
	log, err := p.s.g.Log(ctx, p.tp)
	if err != nil || !isAnotherTopic(p.topicID, log.ID) {
		return false, err
	}
	if err := p.s.reportRecreated(p.tp); err != nil {
		return false, err
	}
	p.restart(log, 0)
	return true, nil
}

// restart continues in another topic, at an offset at its start. If retention has removed the first records, the next fetch moves
// on.
func (p *partition) restart(log inbox.Log, start int64) {
	p.idProved = false
	p.abandonEntries(0, start)
	p.mu.Lock()
	p.topicID = log.ID
	p.mu.Unlock()
	p.s.requestCommit()
}

// skipGap moves the partition to an offset that exists. There are three cases: after the records
// that retention removed, at the end of a truncated topic, and at the start of a recreated topic.
// With WithHaltOnLoss it ends the Run instead.
func (p *partition) skipGap(ctx context.Context, gap *transport.RangeError) {
	if p.s.c.s.haltsOnLoss() {
		p.s.failRun(gap)
		return
	}

	// Retention removed the records. The unfinished entries below Start no longer exist.
	if gap.Offset < gap.Start {
		p.s.report(fmt.Errorf("%w; going on from %d", gap, gap.Start))
		p.mu.Lock()
		defer p.mu.Unlock()
		p.nextFetch = gap.Start
		p.finishLostLocked(0, gap.Start)
		p.fetchedTo = max(p.fetchedTo, gap.Start)
		p.s.countFinished(p.trimLocked())
		return
	}

	// The topic id distinguishes a truncation, for example by an unclean leader election, from a
	// new topic of the same name.
	log, err := p.s.g.Log(ctx, p.tp)
	if err != nil {
		p.s.report(fmt.Errorf("%w; asking for the topic: %w", gap, err))
		// The next fetch leads here again.
		return
	}

	truncated := p.topicID != "" && log.ID == p.topicID
	if p.topicID == "" || !p.idProved {
		// Without a topic id, epochs decide: they do not grow when a topic is recreated.
		truncated = gap.Diverged
	}
	if !truncated {
		p.s.report(fmt.Errorf("%w; going on from %d", gap, gap.Start))
		p.restart(log, gap.Start)
		return
	}

	// The transport has found the end of the common part of both logs.
	if gap.Diverged {
		log.End = gap.End
	}
	if gap.Offset <= log.End {
		// The log has grown again.
		return
	}
	// Only lanes at the end of the log can be affected, so the entries below it stay.
	p.s.report(fmt.Errorf("%w; going on from %d", gap, log.End))
	p.abandonEntries(log.End, log.End)
	p.awaitOrphans(ctx)
	p.lowerWatermarks(ctx, log)
}

// abandonEntries abandons all entries from offset from on and continues at next. The log has no
// records at these offsets, or different ones. If the entries stayed queued, they would move the
// watermarks past records that are still to come as soon as the inbox accepts the new log.
func (p *partition) abandonEntries(from, next int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.orphans = nil

	for _, t := range p.tracks {
		var kept []task
		for _, x := range t.queue {
			if x.entry.offset < from {
				kept = append(kept, x)
				continue
			}
			x.share.state = shareWaiting
			p.dropBodyLocked(x.entry)
		}
		t.queue = kept
	}

	at := sort.Search(len(p.entries), func(i int) bool { return p.entries[i].offset >= from })
	for _, e := range p.entries[at:] {
		e.orphan.Store(true)
		if e.hasShareLocked(shareStarted) {
			p.orphans = append(p.orphans, e)
		}
	}
	p.entries = slices.Delete(p.entries, at, len(p.entries))

	p.nextFetch, p.fetchedTo, p.committed.Offset = next, next, -1
	// The remaining entries may have lost their bodies.
	p.refetch = at > 0
	p.attached = map[string]*attachment{}
}

// awaitOrphans blocks until no handler of an abandoned entry runs, or ctx ends. Such a handler may
// still move the watermarks. A recreated topic does not need this: the inbox rejects handlers of
// the old topic.
func (p *partition) awaitOrphans(ctx context.Context) {
	tick := time.NewTicker(orphanPoll)
	defer tick.Stop()

	for {
		p.mu.Lock()
		p.orphans = slices.DeleteFunc(p.orphans, func(entry *entry) bool { return !entry.hasShareLocked(shareStarted) })
		if len(p.orphans) == 0 || ctx.Err() != nil {
			p.orphans = nil
			p.attached = map[string]*attachment{}
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()

		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// lowerWatermarks lowers the watermarks of a truncated log to its end, and requests a commit.
// Unlike an attach, it needs no second read of the log: the missing offsets prove the truncation.
func (p *partition) lowerWatermarks(ctx context.Context, log inbox.Log) {
	backoff := retry.Reopen.Start()

	for _, r := range p.s.c.reg.snapshot().all {
		// Only handlers with an inbox have watermarks.
		for r.mode.usesInbox() && ctx.Err() == nil {
			_, err := p.s.inbox.Attach(ctx, p.s.c.inboxConsumer(r), p.tp.Topic, p.tp.Partition, log)
			if err == nil {
				break
			}
			if errors.Is(err, inbox.ErrRecreated) {
				p.s.failRun(err)
				return
			}
			if !errors.Is(err, inbox.ErrUnconfirmed) {
				p.s.report(fmt.Errorf("lowering the watermarks of %s in partition %s: %w", r.name, p.tp, err))
			}
			_ = backoff.Wait(ctx)
		}
	}
	p.s.requestCommit()
}

// orphanPoll is how often awaitOrphans checks whether handlers have ended.
const orphanPoll = 50 * time.Millisecond
