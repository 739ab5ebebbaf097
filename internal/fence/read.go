package fence

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
	"github.com/outrelay/outrelay/internal/record"
)

// Bounds limit the reading of a topic's tail (N8). A longer tail is read at its start and at its end, with a gap between.
type Bounds struct {
	Bytes int64         // defaults to 2 GiB
	Time  time.Duration // defaults to 60 s
}

// part is one partition being read.
type part struct {
	record.TopicPartition
	tail  *Tail
	await []Producer // markers above these are worth waiting for
	err   error      // why it was given up

	done      bool
	moved     time.Time // last progress
	notBefore time.Time // not asked again before
	fails     int
}

func (p *part) finished() bool {
	return p.tail.target >= 0 && p.tail.Next >= p.tail.target && p.tail.above(p.await)
}

// reader reads the tails of many partitions. In a round one goroutine per leader owns its partitions; between rounds
// nobody does.
type reader struct {
	c      *Client
	ours   map[int64]bool
	alias  Alias
	bounds Bounds
	pat    Patience
	idle   time.Duration // a partition without progress anywhere for that long is given up
	event  func(Event)

	begin   time.Time
	moved   atomic.Int64 // last progress of any partition, Unix nanoseconds
	regroup atomic.Bool
}

const (
	readIdle  = 2 * time.Second
	slice     = 500 * time.Millisecond
	keepTail  = 1000 // offsets before the end that a jump never skips: the marker stands there
	backoff   = 50 * time.Millisecond
	backoffUp = 500 * time.Millisecond
)

// read returns when each part is done or given up; the error is the end of ctx.
func (r *reader) read(ctx context.Context, parts []*part) error {
	r.begin = time.Now()
	r.moved.Store(r.begin.UnixNano())
	topics := map[string]bool{}
	for _, p := range parts {
		p.done, p.err, p.fails, p.moved, p.notBefore = false, nil, 0, r.begin, time.Time{}
		p.tail.target, p.tail.bytes, p.tail.span = -1, 0, 0 // the bounds are those of one read
		topics[p.Topic] = true
	}
	names := make([]string, 0, len(topics))
	for t := range topics {
		names = append(names, t)
	}
	for {
		if err := r.pat.open(ctx); err != nil {
			return err
		}
		left := r.settle(parts)
		if left == 0 {
			return nil
		}
		h, err := r.c.healthy(ctx, names, Patience{Gate: r.pat.Gate, Total: r.idle})
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			r.fail(parts, err)
			continue
		}
		r.cut(parts)
		groups := r.place(parts, h)
		if len(groups) == 0 {
			pause(ctx, backoff)
			continue
		}
		r.regroup.Store(false)
		var wg sync.WaitGroup
		for leader, group := range groups {
			wg.Go(func() { r.group(ctx, leader, group) })
		}
		wg.Wait()
	}
}

// settle gives up who has waited too long and counts who is left.
func (r *reader) settle(parts []*part) (left int) {
	now, any := time.Now(), time.Unix(0, r.moved.Load())
	for _, p := range parts {
		if p.done {
			continue
		}
		last := p.moved
		if any.After(last) {
			last = any
		}
		if now.Sub(last) > r.idle {
			p.done = true
			if p.err == nil {
				p.err = errors.New("no marker above every earlier sender was written yet")
			}
			continue
		}
		left++
	}
	return left
}

func (r *reader) fail(parts []*part, err error) {
	for _, p := range parts {
		if !p.done {
			p.err = err
		}
	}
}

// place groups the partitions that may be asked now by their leaders.
func (r *reader) place(parts []*part, h *Health) map[int32][]*part {
	groups := map[int32][]*part{}
	now := time.Now()
	for _, p := range parts {
		if p.done {
			continue
		}
		s, ok := h.Partitions[p.TopicPartition]
		if !ok || s.Leader < 0 {
			p.err = errors.New(h.Reason(p.TopicPartition))
			continue
		}
		if now.After(p.notBefore) {
			groups[s.Leader] = append(groups[s.Leader], p)
		}
	}
	return groups
}

// group reads the partitions of one leader, one Fetch for all of them per round, for a slice of time: then the bounds, the
// leaders and those without progress are looked at again.
func (r *reader) group(ctx context.Context, leader int32, parts []*part) {
	until, budget := time.Now().Add(min(slice, r.idle/4)), r.bounds.Bytes/8
	var scratch bytes.Buffer
	for turn := 0; budget > 0 && time.Now().Before(until) && !r.regroup.Load(); turn++ {
		var from []fetchFrom
		at := map[record.TopicPartition]*part{}
		for i := range parts { // a rotating start: the answer's size is limited, and the first are served first
			if p := parts[(i+turn)%len(parts)]; !p.done {
				from = append(from, fetchFrom{p.TopicPartition, p.tail.Next})
				at[p.TopicPartition] = p
			}
		}
		if len(from) == 0 || r.pat.open(ctx) != nil {
			return
		}
		got, err := r.c.fetch(ctx, leader, from, int32(min(partitionBytes, max(r.bounds.Bytes/16, 1))))
		if err != nil {
			r.c.refresh(ctx)
			for _, p := range at {
				r.bad(p, err)
			}
			return
		}
		for i := range got.Partitions {
			if p := at[got.Partitions[i].TopicPartition]; p != nil {
				r.take(ctx, leader, p, &got.Partitions[i], &scratch)
				budget -= int64(len(got.Partitions[i].Set))
			}
		}
		crash.At("mid-read-back")
	}
}

func (r *reader) progress(p *part) {
	p.moved = time.Now()
	r.moved.Store(p.moved.UnixNano())
	p.fails, p.err = 0, nil
}

// bad puts a partition off and asks for a new placement.
func (r *reader) bad(p *part, err error) {
	p.fails++
	p.err = err
	p.notBefore = time.Now().Add(min(time.Duration(p.fails)*backoff, backoffUp))
	r.regroup.Store(true)
}

// take handles one partition's share of an answer.
func (r *reader) take(ctx context.Context, leader int32, p *part, got *fetched.Partition, scratch *bytes.Buffer) {
	if got.Code != 0 {
		r.refused(ctx, leader, p, kafka.Error(got.Code))
		return
	}
	if p.tail.target < 0 {
		p.tail.target = got.High
	}
	before, behind := p.tail.Next, p.tail.Next < p.tail.target
	p.tail.bytes += int64(len(got.Set))
	p.tail.alias = r.alias
	err := p.tail.walk(got.Set, r.ours, scratch)
	if err != nil {
		r.bad(p, err)
		return
	}
	p.fails = 0
	if p.finished() {
		p.done = true
	}
	if p.done || behind && p.tail.Next > before {
		r.progress(p)
	}
}

// refused handles an error code. Leaders move, and right after an election offsets are not available yet: asked again.
func (r *reader) refused(ctx context.Context, leader int32, p *part, code kafka.Error) {
	if code != kafka.OffsetOutOfRange {
		if code == kafka.TopicAuthorizationFailed {
			p.done, p.err = true, fmt.Errorf("topic %s may not be read: grant READ on it, a take-over reads its tail (%w)", p.Topic, code)
			return
		}
		r.bad(p, code)
		return
	}
	// N8, N9: retention has passed the stored offset, or the topic was created anew. That is no reason to stop.
	start, err := r.c.offset(ctx, leader, p.TopicPartition, first)
	if err != nil {
		r.bad(p, err)
		return
	}
	r.event(Event{
		Kind: OutOfRange, Topic: p.Topic,
		Text: fmt.Sprintf("offset %d of %s is not in its log (retention passed it, or the topic was created anew): reading from %d; what is sent again may be a duplicate", p.tail.Next, tpString(p.TopicPartition), start),
	})
	if start > p.tail.Next { // retention: what was read before it stays true
		p.tail.From, p.tail.Next = start, start
	} else { // beyond the end: another log, and what was read of the old one is worth nothing
		*p.tail = *newTail(start)
	}
	p.tail.OutOfRange = true
	r.progress(p)
}

// cut applies the bounds, topic by topic: once half of the bound is used and what remains will not fit into the other
// half, the rest of the bound is spent on the end of the tail.
func (r *reader) cut(parts []*part) {
	type sums struct{ bytes, span, rest int64 }
	topics := map[string]*sums{}
	for _, p := range parts {
		s := topics[p.Topic]
		if s == nil {
			s = &sums{}
			topics[p.Topic] = s
		}
		s.bytes += p.tail.bytes
		s.span += p.tail.span
		if !p.done && p.tail.target > p.tail.Next {
			s.rest += p.tail.target - p.tail.Next
		}
	}
	spent := time.Since(r.begin)
	for topic, s := range topics {
		if s.span == 0 || s.rest == 0 {
			continue
		}
		allowed := math.MaxFloat64 // offsets that may still be read
		if each := float64(s.bytes) / float64(s.span); s.bytes >= r.bounds.Bytes/2 {
			allowed = float64(r.bounds.Bytes-s.bytes) / each
		}
		if spent >= r.bounds.Time/2 {
			allowed = min(allowed, float64(s.span)/spent.Seconds()*(r.bounds.Time-spent).Seconds())
		}
		if allowed = max(allowed, 0); float64(s.rest) <= allowed {
			continue
		}
		for _, p := range parts {
			if p.Topic == topic && !p.done {
				r.jump(p, allowed/float64(s.rest))
			}
		}
	}
}

// jump leaves only that share of what remains of a partition.
func (r *reader) jump(p *part, share float64) {
	t := p.tail
	to := t.target - max(int64(float64(t.target-t.Next)*share), keepTail)
	if to <= t.Next {
		return
	}
	r.event(Event{
		Kind: Truncated, Topic: p.Topic,
		Text: fmt.Sprintf("the tail of %s is longer than the bound of the read-back: offsets %d to %d are not read; what is sent again may be a duplicate", tpString(p.TopicPartition), t.Next, to-1),
	})
	t.Next, t.Truncated = to, true
	r.progress(p)
}
