package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// newEntry decodes a record and finds its handlers. It blocks while the record has to be decoded again, so nothing that follows
// in the partition overtakes it: until then, nobody knows its handlers. It returns nil if the partition is paused or given back
// before.
func (p *partition) newEntry(r *transport.Record) *entry {
	d := p.decodeUntilDecided(r)
	if d == nil {
		return nil
	}

	e := &entry{
		offset:    r.Offset,
		lane:      inbox.Lane(r.Key, r.Offset),
		rec:       *r,
		m:         d.message,
		size:      r.Size(),
		writtenAt: r.Time.UnixMilli(),
		decodeErr: d.err,
		givenUp:   d.verdict,
	}
	if d.err != nil {
		e.shares = []share{{reg: p.s.c.poison, attempts: d.earlier}}
	} else {
		e.shares = p.s.c.routeMessage(e.m)
	}
	e.openShares = len(e.shares)
	return e
}

// routeMessage returns a part for each handler of the message. If there is none, it returns a part for the registration
// that decides about such messages. A message that is only for another group has no parts.
//
// N18: a message in a retry topic is only for one handler. If the handler is not registered, the message becomes a dead
// letter, without WithUnknown too: the handler may have been renamed, or this process may not have it yet.
func (c *Consumer) routeMessage(m *Message) []share {
	all := c.reg.snapshot().forType(m.Name)
	only, forOne := m.Header(record.HeaderOnly)
	ours := !forOne || bytes.HasPrefix(only, []byte(c.group+"/"))

	var parts []share
	for _, r := range all {
		if forOne && string(only) != c.inboxConsumer(r) {
			continue
		}
		parts = append(parts, share{reg: r})
	}

	switch {
	case len(parts) > 0 || !ours:
		return parts
	// A removed handler's messages need a decision of a person, while unknown types are normal.
	case forOne:
		return append(parts, share{reg: c.orphaned})
	default:
		return append(parts, share{reg: c.unknown})
	}
}

// attachment is the state of a handler's attachment to a partition in the inbox.
type attachment struct {
	mu         sync.Mutex // held during Attach, so that it is called once
	done       bool
	generation int64 // of the partition in the inbox
}

// errNoLog reports that the end of a partition could not be read from Kafka. The database is not to blame.
var errNoLog = errors.New("the end of the partition is unknown")

// attachHandler attaches the handler to the partition in the inbox, unless it is attached. The inbox has then recorded that this
// process begins with the partition. N29
func (t *track) attachHandler(ctx context.Context) error {
	p, r := t.p, t.reg
	p.mu.Lock()
	a := p.attached[r.name]
	if a == nil {
		a = &attachment{}
		p.attached[r.name] = a
	}
	p.mu.Unlock()

	// One track attaches, and the others wait for it without the lock of the partition.
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.done {
		return nil
	}

	// The end of the log confirms to the inbox that the watermarks belong to this topic.
	log, err := p.s.g.Log(ctx, p.tp)
	if err != nil {
		return &inboxFailure{fmt.Errorf("reading partition %s: %w: %w", p.tp, errNoLog, err)}
	}

	t.trouble.watchDatabase(t, maxQuerySilence)
	defer t.trouble.stopWatching()
	g, err := p.s.inbox.Attach(ctx, p.s.c.inboxConsumer(r), p.tp.Topic, p.tp.Partition, log)
	if err != nil {
		return &inboxFailure{fmt.Errorf("attaching %s to partition %s: %w", r.name, p.tp, err)}
	}
	a.done, a.generation = true, g.Number
	return nil
}

// generationOf returns the generation of the partition at the last attachHandler, or 0 if there was none.
func (p *partition) generationOf(r *registration) int64 {
	p.mu.Lock()
	a := p.attached[r.name]
	p.mu.Unlock()
	if a == nil {
		return 0
	}

	a.mu.Lock()
	defer a.mu.Unlock()
	return a.generation
}

// listAttached returns the partition in the inbox for each attached handler.
func (p *partition) listAttached() []inbox.Partition {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []inbox.Partition
	for name := range p.attached {
		list = append(list, inbox.Partition{Consumer: p.s.c.group + "/" + name, Topic: p.tp.Topic, Number: p.tp.Partition})
	}
	return list
}

// detachHandler forgets the attachment of the handler, so that the next attachHandler calls the inbox again.
func (p *partition) detachHandler(r *registration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.attached, r.name)
}

// inboxConsumer returns the name of a handler in the inbox.
func (c *Consumer) inboxConsumer(r *registration) string { return c.group + "/" + r.name }
