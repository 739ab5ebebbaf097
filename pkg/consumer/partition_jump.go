package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// identify notes which topic the offsets are of. A group may have the offsets of a topic that was deleted for a while, so
// only a fetch that succeeded says so.
func (p *partition) identify(ctx context.Context) {
	if log, err := p.s.g.Log(ctx, p.tp); err == nil {
		p.id = &log.ID
	}
}

// jump goes on where the partition has records again: after records that retention removed, at the end of a topic that lost
// its last ones, or at the start of one that was created anew.
func (p *partition) jump(ctx context.Context, gap *RangeError) {
	if p.s.c.s.haltOnGap {
		p.s.fail(gap)
		return
	}
	if gap.Offset < gap.Start { // retention: what was not finished below is no more
		p.s.report(fmt.Errorf("%w; going on from %d", gap, gap.Start))
		p.mu.Lock()
		defer p.mu.Unlock()
		p.next = gap.Start
		p.lost(0, gap.Start)
		p.fetched = max(p.fetched, gap.Start)
		p.s.passed(p.trim())
		return
	}

	// The topic's id tells a truncation, as by an unclean leader election, from a new topic of the same name.
	log, err := p.s.g.Log(ctx, p.tp)
	if err != nil {
		p.s.report(fmt.Errorf("%w; asking for the topic: %w", gap, err))
		return // the next fetch comes here again
	}
	from, truncated := gap.Start, p.id != nil && *p.id != "" && log.ID == *p.id
	if p.id == nil || *p.id == "" {
		truncated = gap.Diverged // no topic id is known, but epochs do not grow by creating a topic anew
	}
	if truncated {
		if gap.Diverged {
			log.End = gap.End
		}
		from = log.End
		if gap.Offset <= from {
			return // it has grown again
		}
	}
	p.s.report(fmt.Errorf("%w; going on from %d", gap, from))
	if truncated {
		p.abandon(from, from)
		p.settle(ctx)
		p.lower(ctx, log)
		return
	}
	p.id = nil
	p.abandon(0, from)
}

// abandon gives up all entries from that offset on and continues at next: the log has other records there, or none. What
// waits in memory would, once the inbox knows of the log, move the watermarks past records that are still to come.
func (p *partition) abandon(from, next int64) {
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
			x.part.state = waiting
			p.shed(x.entry)
		}
		t.queue = kept
	}
	at := sort.Search(len(p.entries), func(i int) bool { return p.entries[i].offset >= from })
	for _, e := range p.entries[at:] {
		p.unfire(e)
		e.orphan.Store(true)
		if e.any(started) {
			p.orphans = append(p.orphans, e)
		}
	}
	p.entries = slices.Delete(p.entries, at, len(p.entries))
	p.next, p.fetched, p.committed = next, next, -1
	p.rewind = at > 0 // what is left may have to be fetched again
	p.attached = map[string]*attachment{}
}

// settle waits for the handlers of abandoned entries, which may move the watermarks until they end. A new generation of a
// topic that was created anew needs no wait: it refuses them.
func (p *partition) settle(ctx context.Context) {
	tick := time.NewTicker(settlePoll)
	defer tick.Stop()
	for {
		p.mu.Lock()
		p.orphans = slices.DeleteFunc(p.orphans, func(e *entry) bool { return !e.any(started) })
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

// lower takes the watermarks of a truncated log back to its end, and commits that. The log need not be read again, as for an
// attach: that the offsets which were fetched are gone proves it.
func (p *partition) lower(ctx context.Context, log inbox.Log) {
	b := retry.Reopen.Start()
	for _, r := range p.s.c.reg.snapshot().all {
		for r.mode != inbox.None && ctx.Err() == nil {
			_, err := p.s.inbox.Attach(ctx, p.s.c.inboxConsumer(r), p.tp.Topic, p.tp.Partition, log)
			if err == nil {
				break
			}
			if errors.As(err, new(*inbox.RecreatedError)) {
				p.s.fail(err)
				return
			}
			if !errors.Is(err, inbox.ErrUnconfirmed) {
				p.s.report(fmt.Errorf("lowering the watermarks of %s in partition %s: %w", r.name, p.tp, err))
			}
			_ = b.Wait(ctx)
		}
	}
	p.s.want()
}

// settlePoll is how often settle looks whether handlers have ended.
const settlePoll = 50 * time.Millisecond
