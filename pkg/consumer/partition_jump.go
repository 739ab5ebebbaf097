package consumer

import (
	"context"
	"fmt"
	"slices"
	"sort"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// reportRecreated reports that a topic was deleted and created again. With WithHaltOnLoss, it ends the Run and returns an error.
func (p *partition) reportRecreated() error {
	err := fmt.Errorf("%w: the topic of partition %s was deleted and created again", transport.ErrGap, p.tp)
	if p.s.c.s.haltsOnLoss() {
		err = fmt.Errorf("%w; to go on from its start, run once without WithHaltOnLoss", err)
		p.s.failRun(err)
		return err
	}
	p.reportLost(fmt.Errorf("%w; going on from its start", err))
	return nil
}

// reportLost reports that the partition no longer has records that the group has not read.
func (p *partition) reportLost(err error, attrs ...any) {
	p.reportTrouble("records are missing in the partition; the consumer goes on after them", err, attrs...)
}

// reportGap is reportLost with the offset that was to be read, and the one that is read next.
func (p *partition) reportGap(gap *transport.RangeError, next int64) {
	p.reportLost(fmt.Errorf("%w; going on from %d", gap, next), "offset", gap.Offset, "next", next)
}

// restartIfRecreated continues at the start of the topic if it was deleted and created again, and reports whether it was. With
// WithHaltOnLoss it ends the Run instead.
func (p *partition) restartIfRecreated(ctx context.Context) (bool, error) {
	p.isDoubtful.Store(false)
	log, err := p.s.g.Log(ctx, p.tp)
	if err != nil || !p.wasRecreated(log) {
		return false, err
	}
	if err := p.reportRecreated(); err != nil {
		return false, err
	}
	p.restart(log, 0)
	return true, nil
}

// wasRecreated reports whether log is that of another topic than the records that were read.
func (p *partition) wasRecreated(log inbox.Log) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return isAnotherTopic(p.topicID, log.ID)
}

// restart continues in another topic, at an offset at its start. If retention has removed the first records, the next fetch moves
// on.
func (p *partition) restart(log inbox.Log, start int64) {
	p.idProved = false
	p.abandonEntries(0, start)
	p.mu.Lock()
	p.topicID, p.epochRead = log.ID, -1
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
		p.reportGap(gap, gap.Start)
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
		p.reportTrouble("cannot find out why records are missing; the partition waits", fmt.Errorf("%w; asking for the topic: %w", gap, err))
		// The next fetch leads here again.
		return
	}

	truncated := p.topicID != "" && log.ID == p.topicID
	if p.topicID == "" || !p.idProved {
		// Without a topic id, epochs decide: they do not grow when a topic is recreated.
		truncated = gap.Diverged
	}
	if !truncated {
		p.reportGap(gap, gap.Start)
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
	// The entries below are still in the log. The watermarks do not cover the records of the new leader.
	p.reportGap(gap, log.End)
	p.abandonEntries(log.End, log.End)
	p.s.requestCommit()
}

// findReplaced returns the first of the fetched records that has replaced another one, which this member has read before: its
// leader epoch is higher than the highest one that was read, up to an offset above it. Such a record is read after an unclean
// election if the partition is fetched again from an offset that is still in the log.
func (p *partition) findReplaced(fetched transport.Fetched) (gap *transport.RangeError, found bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := slices.IndexFunc(fetched.Records, func(record transport.Record) bool {
		return record.Offset < p.fetchedTo && record.LeaderEpoch > p.epochRead
	})
	if at < 0 {
		return nil, false
	}
	first := fetched.Records[at].Offset
	return &transport.RangeError{TopicPartition: p.tp, Offset: p.fetchedTo, Start: first, End: first, Diverged: true}, true
}

// abandonEntries abandons all entries from offset from on and continues at next. The log has no
// records at these offsets, or different ones. If the entries stayed queued, they would move the
// watermarks past records that are still to come as soon as the inbox accepts the new log.
func (p *partition) abandonEntries(from, next int64) {
	p.mu.Lock()
	defer p.mu.Unlock()

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
	}
	p.entries = slices.Delete(p.entries, at, len(p.entries))

	p.nextFetch, p.fetchedTo, p.committed.Offset = next, next, -1
	// The remaining entries may have lost their bodies.
	p.refetch = at > 0
	p.attached = map[string]*attachment{}
}
