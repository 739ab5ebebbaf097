package kafka

import (
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

// part is one partition of a topic. All fields are guarded by the sink's lock, but for the head batch while busy.
type part struct {
	t  *topic
	tp record.TopicPartition

	q    []*pending // in order; the head is the one that is sent
	open *pending   // the last of q while it still takes records
	seq  int32      // sequence of the next batch that is frozen
	hint int        // bytes of the last batch: where the next one's buffer grows to
	end  int64      // one above the last offset that was acked

	sends uint64 // records ever queued

	leader int32
	epoch  int32     // of the leader, the highest that a broker has named
	named  time.Time // when a broker last named that epoch
	lane   *lane     // of the leader; nil without one
	slow   bool      // its last request was refused after a long wait: it uses a lane of its own
	busy   bool      // a lane works on the head, or its answer is being told
	listed bool      // waits in its lane
	later  bool      // a timer will list it

	quarantine bool         // N4: nothing may be sent
	unread     bool         // N11: it was parked with a batch that may be in it; nothing may be sent until a take-over has read it
	flag       bool         // a stretch was not read back: what is sent in the replay may be a second copy
	used       time.Time    // last batch or marker of our producer id, for the keep-alive
	hits       *fence.Known // N7: what a read-back has found, while it counts
	tries      int

	obstruction
	parking
	asks  bool      // parked because of what brokers answered: only an answer says when it is well, and single records ask for it
	tried time.Time // when it was parked, or a record was let through last to ask
	kept  bool      // hits and flag outlast the replay, for deliveries outside of the stream's order
}

// obstruction is what holds a partition or a topic, for State.
type obstruction struct {
	why   obstacle
	since time.Time
	bad   time.Time // since when why is one that parks
}

// obstruct notes why nothing moves; the first reason's time counts until it moves again.
func (o *obstruction) obstruct(why obstacle, now time.Time, parks func(obstacle) bool) (changed bool) {
	if o.why.none() {
		o.since = now
	}
	if parks(why) && !parks(o.why) {
		o.bad = now
	}
	changed = o.why != why
	o.why = why
	return changed
}

// parking is what a topic and a partition remember while they are parked (N11).
type parking struct {
	parked bool
	turned int // records of the stream that were given back, or not taken, since then
}

// pending is one batch, open or frozen.
type pending struct {
	b       batch.Builder
	tickets []record.Ticket
	parts   []int32 // of a topic's waiting records only: the partition that each asks for
	bytes   int     // what its records have reserved
	hint    int     // what it is expected to grow to

	frozen bool // it was given to a lane: same bytes, same boundaries, until the answer is definite
	sealed []byte
	zipped []byte // the memory of sealed, if it was compressed
	unsure bool   // it may have been appended
	seq    int32
	first  time.Time // when it was first sent
	plain  bool      // without compression: the broker could not read it compressed
	bad    int       // how often the broker found it corrupt
}

func (p *part) hold(o obstacle, now time.Time) { p.obstruct(o, now, obstacle.parks) }

func (p *part) moves() { p.why, p.tries = obstacle{}, 0 }

// countRecords counts the records of batches.
func countRecords(q []*pending) int {
	n := 0
	for _, b := range q {
		n += len(b.tickets)
	}
	return n
}

// stranded reports whether records wait for a leader.
func (p *part) stranded() bool { return p.lane == nil && (len(p.q) > 0 || p.parked) && !p.quarantine }

// pop removes the head.
func (p *part) pop() {
	if p.open == p.q[0] {
		p.open = nil
	}
	n := copy(p.q, p.q[1:])
	p.q[n] = nil
	p.q = p.q[:n]
}

// replaceHead puts batches where the head was.
func (p *part) replaceHead(with ...*pending) {
	if p.open == p.q[0] {
		p.open = nil
	}
	rest := p.q[1:]
	p.q = append(append(make([]*pending, 0, len(with)+len(rest)), with...), rest...)
}

// topic is one target.
type topic struct {
	name  string
	parts []*part // empty until it is adopted
	// grows: it has more partitions than parts; new records wait until the old ones have drained (N9).
	grows   bool
	waiting []*pending // records for a topic that is not adopted, in order
	next    time.Time  // not looked at for adoption before
	max     int        // max.message.bytes; 0: unknown
	limit   int        // where batches are cut
	stale   bool       // max and compacted have to be read again

	compacted bool // N10: it keeps the newest record of a key, or that is not known

	counts []int                // how many partitions it had before, where known: where earlier records of a key may stand
	hits   int                  // left of the read-back in all partitions
	sent   map[sentKey]struct{} // N10: keys of which something was sent in this replay
	all    bool                 // N10: too many for sent; every key counts as one of them

	obstruction
	parking
	kept bool // one of the partitions is
}

// had notes a number of partitions that the topic had before.
func (t *topic) had(n int) {
	if n > 0 && !slices.Contains(t.counts, n) {
		t.counts = append(t.counts, n)
	}
}

func (t *topic) ready() bool { return len(t.parts) > 0 && !t.grows }

func (t *topic) hold(o obstacle, now time.Time) (changed bool) {
	return t.obstruct(o, now, obstacle.parksTopic)
}

// forget drops what was read back, after the replay; what waits for the topic or in quarantine, or was turned away there,
// has still to be looked up.
func (t *topic) forget() {
	if len(t.waiting) > 0 {
		return
	}
	t.hits = 0
	for _, p := range t.parts {
		if p.kept || p.quarantine && len(p.q) > 0 {
			t.hits += p.hits.Len()
			continue
		}
		p.hits, p.flag = nil, false
	}
	if t.hits == 0 {
		t.sent, t.all = nil, false
	}
}

// idle reports whether nothing is queued or in flight.
func (t *topic) idle() bool {
	for _, p := range t.parts {
		if len(p.q) > 0 || p.busy {
			return false
		}
	}
	return true
}
