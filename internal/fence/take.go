package fence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/record"
)

// MaxEpoch is the epoch at which a transactional id is left for the next generation: at 32,767 the coordinator would hand
// out another producer id, which cannot fence the old one.
const MaxEpoch = 30_000

// In is what a take-over starts from: what the watcher document said when the lease was acquired.
type In struct {
	// TransactionalID without its generation: `outrelay.<instance>.<watcher>.<slot>` (N5).
	TransactionalID string
	// Generation in use; the highest of Senders counts if that is higher.
	Generation int
	// Offsets are the stored offsets by topic. Their topics are the targets of the take-over, with all partitions that
	// exist now; one without an entry is read from 0 (N9).
	Offsets map[string][]int64
	// Senders as they were saved. The last one is the owner before us and counts as open everywhere.
	Senders []record.Sender
	// Gate reports whether the lease is valid; while it is not, nothing is done. nil is always valid.
	Gate func() bool
	// Bounds of the read-back.
	Bounds Bounds
	// Alias is how the records of one collection may stand there from before.
	Alias Alias
	// Alive is when the transactional id was last kept alive, as far as is known: at the latest the end of the earlier
	// owner's lease. With it, a changed producer id is told from an expired one (N5).
	Alive time.Time
	// Event is called, from any goroutine but never concurrently, with what an operator may want to know. It must not block.
	Event func(Event)
	// Stuck is how long a hanging transaction is waited for before the next generation. Defaults to 10 s (N4).
	Stuck time.Duration
	// Idle is how long a partition without any progress is waited for. Defaults to 2 s; its read-back goes on in Retry.
	Idle time.Duration
	// Own is how long a transaction of our own may take before ErrSelfMove. Defaults to 5 s (N4).
	Own time.Duration

	epochs int16 // MaxEpoch, unless a test cannot wait for it
}

// Out is the result of a take-over. Nothing may be sent before Senders and the offsets (each released Tail's From) are
// saved in one fenced write.
type Out struct {
	Producer    Producer // to send with
	Generation  int
	Senders     []record.Sender
	Released    map[record.TopicPartition]*Tail
	Quarantined map[record.TopicPartition]string // why, for people
	Missing     map[string]string                // stored topics that are not there; their partitions are quarantined
	Session     *Session
}

// Take takes the transactional id over (N4): Init, barrier over the healthy partitions, read of each from its stored offset
// until the markers are seen, conditional re-init. Partitions that cannot be fenced now are quarantined, not an error.
// Errors: ErrFenced when somebody else takes the id at the same time, the code of a refusal (authorisation), ctx's end.
func (c *Client) Take(ctx context.Context, in In) (*Out, error) {
	t := &takeOver{Session: newSession(c, in), released: map[record.TopicPartition]*Tail{}}
	for _, s := range in.Senders {
		t.generation = max(t.generation, s.Generation)
	}
	h, err := c.healthy(ctx, t.topics(), t.pat())
	if err != nil {
		return nil, err
	}
	t.targets(h)
	if err := t.acquire(ctx); err != nil {
		return nil, err
	}
	return t.out(), nil
}

// takeOver is the state of one Take; it becomes the Session.
type takeOver struct {
	*Session
	released map[record.TopicPartition]*Tail
	missing  map[string]string
}

func (t *takeOver) topics() []string {
	var out []string
	for topic := range t.in.Offsets {
		out = append(out, topic)
	}
	for _, s := range t.in.Senders {
		for _, tp := range s.Open {
			out = append(out, tp.Topic)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// targets lists the partitions to take over; all begin in quarantine.
func (t *takeOver) targets(h *Health) {
	var all []record.TopicPartition
	for topic, stored := range t.in.Offsets {
		n := max(len(stored), h.Counts[topic])
		if err := h.Missing[topic]; err != nil {
			if t.missing == nil {
				t.missing = map[string]string{}
			}
			t.missing[topic] = missingText(topic, err)
			n = max(n, 1)
		}
		for p := range n {
			all = append(all, record.TopicPartition{Topic: topic, Partition: int32(p)})
		}
	}
	t.retired = earlier(t.in.Senders, all, t.in.Offsets)
	for _, s := range t.retired { // of a topic that is no longer stored
		all = append(all, s.Open...)
	}
	for _, tp := range all {
		if t.held[tp] == nil {
			t.held[tp] = &held{tail: newTail(storedOffset(t.in.Offsets, tp)), reason: cmp.Or(h.Reason(tp), "not read yet")}
		}
	}
}

// acquire is the order of N4.
func (t *takeOver) acquire(ctx context.Context) error {
	got, err := t.c.Init(ctx, t.txid(t.generation), Anew, t.pat())
	crash.At("after-init")
	switch {
	case errors.Is(err, ErrStuck):
		hung := t.txid(t.generation) // nobody can write a marker of this id now
		if err := t.nextGeneration(ctx); err != nil {
			return err
		}
		return t.hung(ctx, hung)
	case err != nil:
		return err
	}
	t.current = got
	t.forgotten(ctx, t.generation, got)
	if len(t.held) == 0 { // first start: nobody holds this epoch, nothing to read
		return nil
	}
	return t.fence(ctx)
}

// fence writes the barrier, reads, and takes an epoch for sending.
func (t *takeOver) fence(ctx context.Context) error {
	h, err := t.c.healthy(ctx, t.topics(), t.pat())
	if err != nil {
		return err
	}
	covered := h.Healthy(t.quarantined())
	refused, _, err := t.c.Barrier(ctx, t.txid(t.generation), t.current, covered, t.pat())
	crash.At("after-barrier")
	stuck := errors.Is(err, ErrStuck)
	if err != nil && !stuck {
		return err
	}
	for tp, why := range refused {
		t.held[tp].reason = why.Error()
	}
	// The read begins at once, beside the re-init, which answers when all markers are written.
	var wg sync.WaitGroup
	barrier, next := t.current, t.current
	var reinit error
	if !stuck && barrier.Epoch < t.in.epochs {
		wg.Go(func() { next, reinit = t.c.Init(ctx, t.txid(t.generation), barrier, t.pat()) })
	}
	err = t.read(ctx, h, without(covered, refused))
	wg.Wait()
	switch {
	case err != nil:
		return err
	case stuck || errors.Is(reinit, ErrStuck) || barrier.Epoch >= t.in.epochs:
		return t.nextGeneration(ctx) // nothing was ever sent with the epoch of the barrier
	case reinit != nil:
		return reinit
	}
	t.current = next
	return nil
}

// read reads every partition that has a leader and releases those that are fenced. It waits for the markers of the current
// id in covered; others are found or not.
func (t *takeOver) read(ctx context.Context, h *Health, covered []record.TopicPartition) error {
	waits := map[record.TopicPartition]bool{}
	for _, tp := range covered {
		waits[tp] = true
	}
	var parts []*part
	for tp, q := range t.held {
		if state, ok := h.Partitions[tp]; !ok || state.Leader < 0 {
			q.reason = h.Reason(tp)
			continue
		}
		p := &part{TopicPartition: tp, tail: q.tail}
		for _, s := range t.fences(tp) {
			if waits[tp] && s.ID == t.current.ID {
				p.await = append(p.await, s)
			}
		}
		parts = append(parts, p)
	}
	if err := t.reader().read(ctx, parts); err != nil {
		return err
	}
	for _, p := range parts {
		if tail := t.settle(p); tail != nil {
			t.released[p.TopicPartition] = tail
		}
	}
	return nil
}

// hung reads what stands in the logs already (the transaction that hangs may have fenced some partitions) and tells what
// blocks the id.
func (t *takeOver) hung(ctx context.Context, txid string) error {
	h, err := t.c.healthy(ctx, t.topics(), t.pat())
	if err != nil {
		return err
	}
	if err := t.read(ctx, h, nil); err != nil {
		return err
	}
	var sick []string
	for _, tp := range t.quarantined() {
		if why := h.Reason(tp); why != "" {
			sick = append(sick, tpString(tp)+" ("+why+")")
		}
	}
	where := "no partition is known to be sick; look at the brokers' logs"
	if len(sick) > 0 {
		where = "sick: " + strings.Join(sick[:min(len(sick), 20)], ", ")
	}
	t.tell(Event{
		Kind: Hung,
		Text: fmt.Sprintf("transactional id %s has a transaction that does not end; %d of %d partitions cannot be fenced and wait until it does; %s",
			txid, len(t.held), len(t.held)+len(t.released), where),
	})
	return nil
}

func (t *takeOver) out() *Out {
	return &Out{
		Producer: t.current, Generation: t.generation, Senders: t.Senders(), Released: t.released,
		Quarantined: t.Quarantined(), Missing: t.missing, Session: t.Session,
	}
}
