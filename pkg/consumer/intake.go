package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// newEntry decodes a record and finds its handlers.
func (p *partition) newEntry(r *Record) *entry {
	r.Headers, r.Key = restoredFor(p.s.c.group, r.Headers, r.Key)
	e := &entry{offset: r.Offset, lane: inbox.Lane(r.Key, r.Offset), rec: *r, size: recordSize(r), time: r.Time.UnixMilli()}
	m, err := p.s.decodeRecord(r)
	if errors.Is(err, ErrDrop) {
		p.s.c.s.observer.Dropped("", 1)
		e.m = m
		return e
	}
	if err != nil {
		e.cause = &DecodeError{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Err: err}
		e.m = completeMessage(newMessage(r), r, p.s.c.group)
		p.s.c.keepOwnControls(e.m, time.Now())
		e.parts = []part{{reg: p.s.c.poison}}
	} else {
		e.m = m
		e.parts = p.s.c.routeMessage(m)
	}
	e.open = len(e.parts)
	return e
}

func recordSize(r *Record) int {
	n := len(r.Key) + len(r.Value) + 128
	for i := range r.Headers {
		n += len(r.Headers[i].Key) + len(r.Headers[i].Value) + 32
	}
	return n
}

// decodeRecord makes the message of a record. A panic of what a user gave is an error.
func (s *session) decodeRecord(r *Record) (m *Message, err error) {
	defer recoverPanic(&err)
	if r.Err != nil {
		return nil, r.Err
	}
	m, err = s.c.s.decoder(r)
	if err != nil {
		return nil, err
	}
	if m == nil {
		return nil, errors.New("the decoder returned no message")
	}
	m = completeMessage(m, r, s.c.group)
	s.c.keepOwnControls(m, time.Now())
	for _, f := range s.c.s.receive {
		got, err := f(s.soft, m)
		if err != nil {
			return m, err
		}
		if got == nil {
			return nil, errors.New("a function of Receive returned no message")
		}
		m = completeMessage(got, r, s.c.group)
	}
	return m, checkIdentity(m)
}

// routeMessage finds who handles the message. N18: what was retried or requeued for one handler is for that one alone. If that
// handler is no more, the message is parked whatever AckUnknown says: a handler that was renamed, or that this process does not
// have yet, may still want it. What is for another group passes.
func (c *Consumer) routeMessage(m *Message) []part {
	all := c.reg.snapshot().of(m.Type)
	only, narrowed := m.Header(HeaderOnly)
	narrowed = narrowed && string(only) != c.group+"/" // for whoever takes it: it was parked
	ours := !narrowed || bytes.HasPrefix(only, []byte(c.group+"/"))
	var out []part
	taken := false
	for _, r := range all {
		if narrowed && string(only) != c.group+"/"+r.name {
			continue
		}
		if r.once && !r.fired.CompareAndSwap(false, true) {
			taken = true
			continue
		}
		out = append(out, part{reg: r})
	}
	switch {
	case len(out) > 0 || taken || !ours:
	case narrowed:
		out = append(out, part{reg: c.orphaned})
	default:
		out = append(out, part{reg: c.unknown})
	}
	return out
}

// attachment is what the inbox said of a handler's partition.
type attachment struct {
	mu   sync.Mutex
	done bool
}

// attachHandler tells the inbox, once for each handler, that this process begins with the partition. N29
func (p *partition) attachHandler(ctx context.Context, r *registration) error {
	p.mu.Lock()
	a := p.attached[r.name]
	if a == nil {
		a = &attachment{}
		p.attached[r.name] = a
	}
	p.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.done {
		return nil
	}
	log, err := p.s.g.Log(ctx, p.tp)
	if err != nil {
		return &inboxFailure{fmt.Errorf("asking for the end of partition %s: %w", p.tp, err)}
	}
	if _, err := p.s.inbox.Attach(ctx, p.s.c.inboxConsumer(r), p.tp.Topic, p.tp.Partition, log); err != nil {
		return &inboxFailure{fmt.Errorf("attaching %s to partition %s: %w", r.name, p.tp, err)}
	}
	a.done = true
	return nil
}

// releaseAttachments gives up what the inbox holds of the partition for the handlers that attached to it.
func (p *partition) releaseAttachments(ctx context.Context) error {
	p.mu.Lock()
	names := slices.Collect(maps.Keys(p.attached))
	p.mu.Unlock()
	var errs []error
	for _, name := range names {
		errs = append(errs, p.s.inbox.Release(ctx, p.s.c.group+"/"+name, p.tp.Topic, p.tp.Partition))
	}
	return errors.Join(errs...)
}

// detachHandler makes the next attach ask again.
func (p *partition) detachHandler(r *registration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.attached, r.name)
}

func (p *partition) hasAttachments() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.attached) > 0
}

// inboxConsumer is the identity of a handler in the inbox.
func (c *Consumer) inboxConsumer(r *registration) string { return c.group + "/" + r.name }
