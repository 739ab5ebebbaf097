package fence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/record"
)

// Session is the identity that an owner sends with, and the partitions that it may not write to yet. Its methods are safe
// for concurrent use; those that run transactions (Retry, KeepAlive, NextGeneration) exclude each other.
type Session struct {
	c  *Client
	in In

	txn sync.Mutex // one transaction of ours at a time
	say sync.Mutex // Event

	mu         sync.Mutex // the fields below; held for no I/O, and by Take not at all: it has no rival
	current    Producer
	generation int
	retired    senders
	held       map[record.TopicPartition]*held // quarantine
	old        map[int]Producer                // identities taken of earlier generations, for their own barriers
	gone       map[int64]bool                  // producer ids that the coordinator has forgotten
}

// held is a partition in quarantine.
type held struct {
	tail   *Tail
	reason string
}

func newSession(c *Client, in In) *Session {
	in.Idle, in.Own, in.epochs = cmp.Or(in.Idle, readIdle), cmp.Or(in.Own, ownTotal), cmp.Or(in.epochs, MaxEpoch)
	in.Bounds.Bytes, in.Bounds.Time = cmp.Or(in.Bounds.Bytes, 2<<30), cmp.Or(in.Bounds.Time, time.Minute)
	return &Session{
		c: c, in: in, generation: in.Generation,
		held: map[record.TopicPartition]*held{}, old: map[int]Producer{}, gone: map[int64]bool{},
	}
}

// Producer is the identity to send with; it changes in NextGeneration only.
func (s *Session) Producer() Producer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// Generation of the transactional id.
func (s *Session) Generation() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation
}

// TransactionalID is the id in use, with its generation.
func (s *Session) TransactionalID() string { return s.txid(s.Generation()) }

// Senders is the list to save: earlier senders where they are still open or still counted by a read-back, ourselves last.
func (s *Session) Senders() []record.Sender {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append(s.retired.clone(), record.Sender{ID: s.current.ID, Epoch: s.current.Epoch, Generation: s.generation})
}

// Quarantined lists the partitions that nothing may be sent to, with the reason for people.
func (s *Session) Quarantined() map[record.TopicPartition]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[record.TopicPartition]string, len(s.held))
	for tp, q := range s.held {
		out[tp] = q.reason
	}
	return out
}

func (s *Session) txid(generation int) string {
	return s.in.TransactionalID + "#" + strconv.Itoa(generation)
}

func (s *Session) pat() Patience {
	return Patience{Stuck: s.in.Stuck, Gate: s.in.Gate, Waiting: func(step string, err error) {
		s.tell(Event{Kind: Waiting, Text: fmt.Sprintf("%s: tried for %s: %v", step, sayAfter, err)})
	}}
}

func (s *Session) tell(e Event) {
	if s.in.Event == nil {
		return
	}
	s.say.Lock()
	defer s.say.Unlock()
	s.in.Event(e)
}

func (s *Session) reader() *reader {
	s.mu.Lock()
	defer s.mu.Unlock()
	ours := map[int64]bool{s.current.ID: true}
	for _, x := range s.retired {
		ours[x.ID] = true
	}
	return &reader{c: s.c, ours: ours, alias: s.in.Alias, bounds: s.in.Bounds, pat: s.pat(), idle: s.in.Idle, event: s.tell}
}

func (s *Session) quarantined() []record.TopicPartition {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]record.TopicPartition, 0, len(s.held))
	for tp := range s.held {
		out = append(out, tp)
	}
	slices.SortFunc(out, compareTP)
	return out
}

// fences lists the identities above which a marker has to be read in tp. Those that the coordinator has forgotten are not
// among them: no such marker can ever be written.
func (s *Session) fences(tp record.TopicPartition) []Producer {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Producer
	for _, x := range s.retired.open(tp) {
		if !s.gone[x.ID] {
			out = append(out, Producer{ID: x.ID, Epoch: x.Epoch})
		}
	}
	return out
}

// settle releases a partition that was read and is fenced, or keeps it with the reason.
//
// N4: a partition is released when a marker above every earlier sender that is open in it was READ, and it was read at
// least up to that marker. The read is in order, so having seen the marker is having read up to it.
func (s *Session) settle(p *part) *Tail {
	want := s.fences(p.TopicPartition)
	s.mu.Lock()
	defer s.mu.Unlock()
	tail := p.tail
	if tail.target < 0 || tail.Next < tail.target || !tail.above(want) {
		if p.err != nil {
			s.held[p.TopicPartition].reason = p.err.Error()
		} else if !tail.above(want) {
			s.held[p.TopicPartition].reason = "no marker above every earlier sender was read yet"
		}
		return nil
	}
	delete(s.held, p.TopicPartition)
	s.retired.close(p.TopicPartition, tail.Next)
	return tail
}

// forgotten notes the earlier senders of a generation that the coordinator knows no more: it gave out another producer id,
// or an epoch that is not above theirs. Their batches cannot be fenced by anybody.
func (s *Session) forgotten(ctx context.Context, generation int, got Producer) {
	s.mu.Lock()
	var before *Producer
	for _, x := range s.retired {
		if x.Generation != generation || s.gone[x.ID] || x.ID == got.ID && x.Epoch < got.Epoch {
			continue
		}
		s.gone[x.ID] = true
		if last := len(s.in.Senders) - 1; last >= 0 && s.in.Senders[last].ID == x.ID {
			before = &Producer{ID: x.ID, Epoch: x.Epoch}
		}
	}
	s.mu.Unlock()
	if before == nil {
		return // not the owner before us: it was told when it happened
	}
	// N5: an id that nobody kept alive for longer than the cluster remembers is expected to change.
	alarm, age := true, "it is not known when it was last kept alive"
	if !s.in.Alive.IsZero() {
		idle, limit := time.Since(s.in.Alive), s.c.Expiry(ctx).TransactionalID
		alarm, age = idle < limit, fmt.Sprintf("it was last kept alive %s ago and expires after %s", idle.Round(time.Second), limit)
	}
	s.tell(Event{Kind: ProducerIDChanged, Alarm: alarm, Old: *before, Text: fmt.Sprintf(
		"transactional id %s had %v and has %v now (%s): the earlier owner cannot be fenced in Kafka any more; make sure that no process of it is left",
		s.txid(generation), *before, got, age)})
}

// nextGeneration takes the first transactional id of a higher generation that does not hang. If none can be had, identity
// and generation stay as they belong together: what is saved must say with which id our batches can be fenced.
func (s *Session) nextGeneration(ctx context.Context) (err error) {
	before := s.Generation()
	defer func() {
		if err != nil {
			s.mu.Lock()
			s.generation = before
			s.mu.Unlock()
		}
	}()
	for {
		s.mu.Lock()
		s.generation++
		g := s.generation
		s.mu.Unlock()
		got, err := s.c.Init(ctx, s.txid(g), Anew, s.pat())
		if errors.Is(err, ErrStuck) {
			continue
		}
		if err != nil {
			return err
		}
		s.forgotten(ctx, g, got)
		s.mu.Lock()
		s.current = got
		s.mu.Unlock()
		s.tell(Event{Kind: GenerationMoved, Text: fmt.Sprintf("transactional id %s was left for %s", s.txid(g-1), s.txid(g))})
		return nil
	}
}
