package fence

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// Bounds limit the read-back (N8). If a topic has more bytes, or needs more time, the rest of its tail is skipped up to the end that
// the log had before the takeover. If the relay's records of all tails would need more memory, the rest of them is skipped. Records of
// others need none.
type Bounds struct {
	Bytes  int64         // of a topic; defaults to 2 GiB
	Time   time.Duration // defaults to 60 s
	Memory int64         // of the hits; defaults to 32 MiB
}

// hitBytes is the memory of a hit in bytes: between 52 and 84 were measured.
const hitBytes = 84

// reading is one partition that is being read.
type reading struct {
	record.TopicPartition
	tail  *Tail
	await []Producer // the read waits for markers above these
	// end is the end of the log before these markers were written, or unknownEnd. The read may skip the records below it.
	end int64
	err error // why the partition was given up

	done         bool
	lastProgress time.Time
	notBefore    time.Time // earliest time of the next fetch
	failures     int

	corruptReads int   // fetches that have found a batch corrupt, since the last progress
	skippedBase  int64 // of the corrupt batch whose offsets are being skipped, or -1
}

const (
	// unknownEnd is the end of a log whose leader has not returned it. The first fetch replaces it by an estimate.
	unknownEnd = -1
	// markerMargin is the number of offsets between such an estimate and the end of the log: a marker may be among them.
	markerMargin = 1000
)

func (p *reading) isFinished() bool {
	return p.tail.target >= 0 && p.tail.Next >= p.tail.target && p.tail.hasMarkersAbove(p.await)
}

// reader reads the tails of many partitions. In a round, one goroutine for each leader uses its
// partitions. Between the rounds only the caller of readAll uses them.
type reader struct {
	kafka    *Client
	ours     map[int64]int16 // the producer ids of the relay, with the highest epoch of each
	bounds   Bounds
	patience Patience
	idle     time.Duration // a partition is given up after this time without progress of any partition
	report   func(Event)

	began        time.Time
	lastProgress atomic.Int64 // of any partition, a time.Duration since began
	room         atomic.Int64 // the number of hits for which there is memory; negative if one had none
	regroup      atomic.Bool
}

const (
	readIdle = 2 * time.Second
	// roundTime is the longest time between two checks of the bounds, the leaders and the progress.
	roundTime  = 500 * time.Millisecond
	backoff    = 50 * time.Millisecond
	maxBackoff = 500 * time.Millisecond
	// corruptReads is how often a corrupt batch is fetched before it is skipped: its bytes may have been
	// damaged in transit.
	corruptReads = 5

	fetchBytes     = 8 << 20
	partitionBytes = 1 << 20
	fetchWait      = 100 * time.Millisecond
)

// readAll returns when each partition is done or given up. The error is the end of ctx.
func (r *reader) readAll(ctx context.Context, list []*reading) error {
	r.began = time.Now()
	r.lastProgress.Store(0)
	r.room.Store(r.bounds.Memory / hitBytes)
	topics := map[string]bool{}
	for _, p := range list {
		p.done, p.err, p.failures, p.lastProgress, p.notBefore = false, nil, 0, r.began, time.Time{}
		p.corruptReads, p.skippedBase = 0, -1
		topics[p.Topic] = true

		// The bounds apply to one read, but hits of earlier ones are still in memory.
		p.tail.target, p.tail.bytes, p.tail.room = -1, 0, &r.room
		r.room.Add(-int64(p.tail.Hits.Len()))
	}
	names := slices.Collect(maps.Keys(topics))

	for reported := false; ; {
		if err := r.patience.waitForGate(ctx); err != nil {
			return err
		}
		left := r.giveUpIdle(list)
		if left == 0 {
			return nil
		}
		if !reported && time.Since(r.began) >= reportAfter {
			reported = true
			r.report(Event{Kind: Waiting, Text: fmt.Sprintf("reading back what earlier owners sent: %d of %d partitions are left after %s",
				left, len(list), reportAfter)})
		}

		// Leaders may have moved since the last round.
		var layout *kafkawire.Layout
		patience := Patience{Gate: r.patience.Gate, Total: r.idle}
		err := patience.retry(ctx, "looking for the leaders", func() (err error) {
			layout, err = r.kafka.kafka.Metadata(ctx, names)
			return err
		})
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			// giveUpIdle ends the loop when no partition has made progress for long enough.
			for _, p := range list {
				if !p.done {
					p.err = err
				}
			}
			continue
		}

		r.applyBounds(list)
		groups := groupByLeader(list, &Health{layout: layout})
		// Each partition waits for its next attempt, or for a leader.
		if len(groups) == 0 {
			_ = retry.Sleep(ctx, backoff)
			continue
		}
		r.regroup.Store(false)
		var wg sync.WaitGroup
		for leader, group := range groups {
			wg.Go(func() { r.readGroup(ctx, leader, group) })
		}
		wg.Wait()
	}
}

// giveUpIdle gives up partitions that have waited too long, and returns the number of the others.
func (r *reader) giveUpIdle(list []*reading) (left int) {
	now, anyProgress := time.Now(), r.began.Add(time.Duration(r.lastProgress.Load()))
	for _, p := range list {
		if p.done {
			continue
		}

		last := p.lastProgress
		// Responses are limited in size, so a partition may only have waited for its turn.
		if anyProgress.After(last) {
			last = anyProgress
		}
		if now.Sub(last) <= r.idle {
			left++
			continue
		}
		p.done = true
		if p.err == nil {
			p.err = errNoMarker
		}
	}
	return left
}

var errNoMarker = errors.New("no marker above every earlier sender was read yet")

// groupByLeader returns the partitions that may be fetched now, by the address of their leader.
func groupByLeader(list []*reading, health *Health) map[string][]*reading {
	groups := map[string][]*reading{}
	now := time.Now()

	for _, p := range list {
		if p.done {
			continue
		}

		leader := health.layout.LeaderAddr(p.TopicPartition)
		if leader == "" {
			p.err = errors.New(health.Reason(p.TopicPartition).Cause)
			continue
		}
		// A partition whose fetch has failed waits for its next attempt.
		if now.After(p.notBefore) {
			groups[leader] = append(groups[leader], p)
		}
	}
	return groups
}

// readGroup reads the partitions of one leader for roundTime, with one fetch for all of them at a time.
func (r *reader) readGroup(ctx context.Context, leader string, list []*reading) {
	until, budget := time.Now().Add(min(roundTime, r.idle/4)), r.bounds.Bytes/8
	// A single fetch must not exceed a small bound by much.
	limits := kafkawire.FetchLimits{
		MaxBytes:          fetchBytes,
		MaxPartitionBytes: int(min(partitionBytes, max(r.bounds.Bytes/16, 1))),
		MaxWait:           fetchWait,
	}

	for turn := 0; budget > 0 && time.Now().Before(until) && !r.regroup.Load(); turn++ {
		// The size of a response is limited, and the first partitions are served first. So the start
		// rotates.
		var from []kafkawire.FetchFrom
		fetching := map[record.TopicPartition]*reading{}
		for i := range list {
			if reading := list[(i+turn)%len(list)]; !reading.done {
				from = append(from, kafkawire.FetchFrom{TopicPartition: reading.TopicPartition, Offset: reading.tail.Next})
				fetching[reading.TopicPartition] = reading
			}
		}
		if len(from) == 0 || r.patience.waitForGate(ctx) != nil {
			return
		}

		got, err := r.kafka.kafka.Fetch(ctx, leader, from, limits)
		if err != nil {
			for _, p := range fetching {
				r.retryLater(p, err)
			}
			return
		}
		for i := range got.Partitions {
			if reading := fetching[got.Partitions[i].TopicPartition]; reading != nil {
				r.handleFetched(ctx, leader, reading, &got.Partitions[i])
				budget -= int64(len(got.Partitions[i].Set))
			}
		}
		crash.At("mid-read-back")
	}
}

func (r *reader) noteProgress(reading *reading) {
	reading.lastProgress = time.Now()
	r.lastProgress.Store(int64(reading.lastProgress.Sub(r.began)))
	reading.failures, reading.err = 0, nil
}

// retryLater delays the next fetch of a partition, and ends the round: its leader may have moved.
func (r *reader) retryLater(reading *reading, err error) {
	reading.failures++
	reading.err = err
	reading.notBefore = time.Now().Add(min(time.Duration(reading.failures)*backoff, maxBackoff))
	r.regroup.Store(true)
}

// handleFetched handles the part of one partition in a response. Leaders move, and after an election
// offsets are not available for a while, so most error codes are retried.
func (r *reader) handleFetched(ctx context.Context, leader string, reading *reading, got *fetched.Partition) {
	switch code := kafkawire.Code(got.Code); code {
	case 0:
	case kafkawire.OffsetOutOfRange:
		r.restartInRange(ctx, leader, reading)
		return
	case kafkawire.TopicAuthorizationFailed:
		reading.done = true
		reading.err = fmt.Errorf("topic %s may not be read: grant READ on it, a takeover reads its tail (%w)", reading.Topic, code)
		return
	default:
		r.retryLater(reading, code)
		return
	}

	// The read goes at least to the end that the partition has now, also if it waits for no marker.
	if reading.tail.target < 0 {
		reading.tail.target = got.High
	}
	if reading.end == unknownEnd {
		reading.end = max(got.High-markerMargin, 0)
	}
	before, behind, truncated := reading.tail.Next, reading.tail.Next < reading.tail.target, reading.tail.Truncated
	reading.tail.bytes += int64(len(got.Set))
	if err := reading.tail.readSet(got.Set, r.ours); err != nil {
		r.skipCorrupt(reading, err, got.High)
		return
	}

	if reading.tail.Truncated && !truncated {
		r.report(Event{
			Kind: Truncated, Topic: reading.Topic,
			Text: fmt.Sprintf("records of the tail of %s from offset %d on do not fit into the memory of the read-back; "+
				"records that are sent again may be duplicates", formatPartition(reading.TopicPartition), before),
		})
	}

	reading.failures, reading.corruptReads, reading.skippedBase = 0, 0, -1
	reading.done = reading.isFinished()
	if reading.done || behind && reading.tail.Next > before {
		r.noteProgress(reading)
	}
}

// skipCorrupt skips a corrupt batch that was fetched often enough. It would stay corrupt until retention
// removes it, and keep its partition in quarantine until then. If its end is not plausible, the offsets
// are skipped one by one, until the broker returns another batch.
func (r *reader) skipCorrupt(reading *reading, err error, high int64) {
	tail := reading.tail
	corrupt, ok := errors.AsType[*corruptError](err)
	reading.corruptReads++
	if !ok || reading.corruptReads < corruptReads || tail.Next >= high {
		r.retryLater(reading, err)
		return
	}

	end := corrupt.end
	known := end > max(tail.Next, corrupt.base) && end <= high
	if !known {
		end = tail.Next + 1
	}
	if reading.skippedBase != corrupt.base {
		r.report(Event{
			Kind: Corrupt, Topic: reading.Topic,
			Text: fmt.Sprintf("%s cannot be read at offset %d and is skipped (%v): check the disks of its brokers; "+
				"records that are sent again may be duplicates", formatPartition(reading.TopicPartition), tail.Next, err),
		})
	}
	tail.Next, tail.Truncated = end, true
	r.noteProgress(reading)

	// Further offsets of the same batch are skipped at once.
	reading.corruptReads, reading.skippedBase = 0, -1
	if !known {
		reading.corruptReads, reading.skippedBase = corruptReads-1, corrupt.base
	}
}

// restartInRange continues at the start of the log, because retention has passed the stored offset, or
// the topic was deleted and created again (N8, N9). That is not a reason to stop.
func (r *reader) restartInRange(ctx context.Context, leader string, reading *reading) {
	at, err := r.kafka.kafka.LeaderOffset(ctx, leader, reading.TopicPartition, kafkawire.LogStart)
	if err != nil {
		r.retryLater(reading, err)
		return
	}

	start := at.Offset
	// The start of the log is not readable either. Another attempt is no progress.
	if start == reading.tail.Next {
		r.retryLater(reading, kafkawire.OffsetOutOfRange)
		return
	}

	r.report(Event{
		Kind: OutOfRange, Topic: reading.Topic,
		Text: fmt.Sprintf("offset %d of %s is not in its log (retention passed it, or the topic was created again): "+
			"reading from %d; records that are sent again may be duplicates",
			reading.tail.Next, formatPartition(reading.TopicPartition), start),
	})
	if start > reading.tail.Next {
		// Retention: the part that was read before stays valid.
		reading.tail.From, reading.tail.Next = start, start
	} else {
		// Another log: everything that was read of the old one is void.
		r.room.Add(int64(reading.tail.Hits.Len()))
		*reading.tail = *newTail(start)
		reading.tail.room = &r.room
	}
	reading.tail.OutOfRange = true
	r.noteProgress(reading)
}

// applyBounds skips the rest of the tails that exceed the bounds.
func (r *reader) applyBounds(list []*reading) {
	bytes := map[string]int64{} // by topic
	for _, p := range list {
		bytes[p.Topic] += p.tail.bytes
	}

	used := time.Since(r.began) >= r.bounds.Time || r.room.Load() < 0
	for _, p := range list {
		if used || bytes[p.Topic] >= r.bounds.Bytes {
			r.skipTo(p, p.end)
		}
	}
}

// skipTo skips the part of a tail below an offset.
func (r *reader) skipTo(reading *reading, offset int64) {
	tail := reading.tail
	if reading.done || offset <= tail.Next {
		return
	}

	r.report(Event{
		Kind: Truncated, Topic: reading.Topic,
		Text: fmt.Sprintf("the tail of %s is longer than the bound of the read-back: offsets %d to %d are not read; "+
			"records that are sent again may be duplicates", formatPartition(reading.TopicPartition), tail.Next, offset-1),
	})
	tail.Next, tail.Truncated = offset, true
	r.noteProgress(reading)
}
