package fence

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/record"
)

// The patience of one attempt to write a marker; it is repeated a second later.
const (
	oldStuck  = 300 * time.Millisecond
	oldTotal  = 3 * time.Second
	ownTotal  = 5 * time.Second // N4: our own transaction not complete by then means self-move
	retryIdle = time.Second
)

// Retry tries to release what is quarantined (N4); it is to be called every second while Quarantined is not empty. It
// reads the healthy partitions again; where the marker of an earlier sender is missing it writes that sender's own
// barrier over that partition alone. Released partitions may be written to once Senders and their offsets are saved.
// Partitions may be released beside an error: ErrSelfMove (our own barrier hangs), ErrFenced, ctx's end.
func (s *Session) Retry(ctx context.Context) (map[record.TopicPartition]*Tail, error) {
	s.txn.Lock()
	defer s.txn.Unlock()
	released := map[record.TopicPartition]*Tail{}
	waiting := s.quarantined()
	if len(waiting) == 0 || s.in.Gate != nil && !s.in.Gate() {
		return released, context.Cause(ctx)
	}
	h, err := s.c.Health(ctx, topicsOf(waiting))
	if err != nil {
		return released, context.Cause(ctx) // the cluster is away: next second
	}
	for _, tp := range waiting {
		if why := h.Reason(tp); why != "" {
			s.because(tp, why)
		}
	}
	healthy := h.Healthy(waiting)
	if err := s.reread(ctx, healthy, released); err != nil {
		return released, err
	}
	hanging := map[int]bool{}
	for _, tp := range healthy {
		if released[tp] != nil {
			continue
		}
		if err := s.barriers(ctx, tp, hanging); err != nil {
			return released, err
		}
		if tail := s.settle(&part{TopicPartition: tp, tail: s.tail(tp)}); tail != nil {
			released[tp] = tail
		}
	}
	return released, context.Cause(ctx)
}

func topicsOf(parts []record.TopicPartition) []string {
	var out []string
	for _, tp := range parts {
		out = append(out, tp.Topic)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (s *Session) tail(tp record.TopicPartition) *Tail {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[tp].tail
}

// because notes why a partition is in quarantine.
func (s *Session) because(tp record.TopicPartition, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[tp].reason = reason
}

// reread goes on reading parts from where the last read ended.
func (s *Session) reread(ctx context.Context, parts []record.TopicPartition, released map[record.TopicPartition]*Tail) error {
	list := make([]*part, 0, len(parts))
	for _, tp := range parts {
		list = append(list, &part{TopicPartition: tp, tail: s.tail(tp)})
	}
	r := s.reader()
	r.idle = min(r.idle, retryIdle)
	if err := r.read(ctx, list); err != nil {
		return err
	}
	for _, p := range list {
		if tail := s.settle(p); tail != nil {
			released[p.TopicPartition] = tail
		}
	}
	return nil
}

// barriers writes the barrier of each sender that is open in tp and whose marker was not read there. hanging holds the
// generations that did not answer in this round, so that many partitions do not wait for the same id.
func (s *Session) barriers(ctx context.Context, tp record.TopicPartition, hanging map[int]bool) error {
	tail, current, generation := s.tail(tp), s.Producer(), s.Generation()
	for _, x := range s.openIn(tp) {
		above := Producer{ID: x.ID, Epoch: x.Epoch}
		if tail.above([]Producer{above}) || hanging[x.Generation] {
			continue
		}
		var err error
		if x.ID == current.ID && x.Generation == generation {
			// Our own id, with the epoch that we send with: it is above every earlier one, and data flows on elsewhere.
			err = s.complete(ctx, tp, tail, s.in.Own)
			if err != nil && !errors.Is(err, errRefused) {
				return err
			}
		} else {
			err = s.oldBarrier(ctx, tp, tail, above, x.Generation)
			hanging[x.Generation] = err != nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			s.because(tp, fmt.Sprintf("the marker of transactional id %s cannot be written: %v", s.txid(x.Generation), err))
		}
	}
	return nil
}

// openIn lists the earlier senders that may still write to tp and that can be fenced.
func (s *Session) openIn(tp record.TopicPartition) []record.Sender {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(s.retired.open(tp), func(x record.Sender) bool { return s.gone[x.ID] })
}

// oldBarrier takes the id of an earlier generation, which nobody sends with any more, writes its marker into tp and reads it.
func (s *Session) oldBarrier(ctx context.Context, tp record.TopicPartition, tail *Tail, above Producer, generation int) error {
	pat := Patience{Stuck: oldStuck, Total: oldTotal, Gate: s.in.Gate}
	s.mu.Lock()
	p, have := s.old[generation]
	s.mu.Unlock()
	if !have {
		var err error
		if p, err = s.c.Init(ctx, s.txid(generation), Anew, pat); err != nil {
			return err
		}
		s.forgotten(ctx, generation, p)
		s.mu.Lock()
		s.old[generation] = p
		s.mu.Unlock()
	}
	refused, _, err := s.c.Barrier(ctx, s.txid(generation), p, []record.TopicPartition{tp}, pat)
	if errors.Is(err, ErrFenced) || lost(err) { // another owner took it meanwhile, or it expired: taken anew next time
		s.mu.Lock()
		delete(s.old, generation)
		s.mu.Unlock()
	}
	if err := errors.Join(err, refused[tp]); err != nil {
		return err
	}
	return s.marker(ctx, tp, tail, above, retryIdle)
}

// errRefused says that a partition could not be part of a transaction; nothing hangs.
var errRefused = errors.New("the partition cannot be part of a transaction")

// complete runs an empty transaction of our own over one partition and reads its marker, all within limit.
func (s *Session) complete(ctx context.Context, tp record.TopicPartition, tail *Tail, limit time.Duration) error {
	begin, current := time.Now(), s.Producer()
	txid := s.TransactionalID()
	refused, _, err := s.c.Barrier(ctx, txid, current, []record.TopicPartition{tp}, Patience{Stuck: limit, Total: limit, Gate: s.in.Gate})
	switch {
	case err == nil && refused[tp] != nil:
		return fmt.Errorf("%w: %w", errRefused, refused[tp])
	case err == nil:
		above := Producer{ID: current.ID, Epoch: current.Epoch - 1}
		err = s.marker(ctx, tp, tail, above, max(limit-time.Since(begin), limit/5))
	case errors.Is(err, ErrFenced) || errors.Is(err, kafka.TransactionalIDAuthorizationFailed):
		return err
	}
	if err == nil || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("marker of transactional id %s in %s not complete after %s: %w: %w", txid, tpString(tp), time.Since(begin).Round(time.Millisecond), ErrSelfMove, err)
}

// marker reads on until a marker above a producer was seen.
func (s *Session) marker(ctx context.Context, tp record.TopicPartition, tail *Tail, above Producer, limit time.Duration) error {
	r := s.reader()
	r.idle = limit
	p := &part{TopicPartition: tp, tail: tail, await: []Producer{above}}
	if err := r.read(ctx, []*part{p}); err != nil {
		return err
	}
	return p.err
}
