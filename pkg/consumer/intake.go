package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// newEntry decodes a record and finds its handlers. It blocks while the record has to be decoded again, so nothing that follows
// in the partition overtakes it: until then, nobody knows its handlers. It returns nil if the partition is paused or given back
// before.
func (p *partition) newEntry(record *transport.Record) *entry {
	decoded := p.decodeUntilDecided(record)
	if decoded == nil {
		return nil
	}

	entry := &entry{
		offset:    record.Offset,
		lane:      inbox.Lane(record.Key, record.Offset),
		rec:       *record,
		m:         decoded.message,
		size:      record.Size(),
		writtenAt: record.Time.UnixMilli(),
		decodeErr: decoded.err,
		givenUp:   decoded.verdict,
	}
	if decoded.err != nil {
		entry.shares = []share{{reg: p.s.c.poison, attempts: decoded.earlier}}
	} else {
		entry.shares = p.s.c.routeMessage(entry.m)
	}
	entry.openShares = len(entry.shares)
	return entry
}

// routeMessage returns a part for each handler of the message. If there is none, it returns a part for the registration
// that decides about such messages. A message that is only for another group has no parts.
//
// N18: a message in a retry topic is only for one handler. If the handler is not registered, the message becomes a dead
// letter, with WithSkip too: the handler may have been renamed, or this process may not have it yet.
func (c *Consumer) routeMessage(message *Message) []share {
	all := c.reg.snapshot().forType(message.Name)
	only, forOne := message.Header(record.HeaderOnly)
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
	case forOne:
		return append(parts, share{reg: c.orphaned})
	case c.s.skips(message.Name):
		return append(parts, share{reg: c.skipped})
	default:
		return append(parts, share{reg: c.unknown})
	}
}

// skips reports whether WithSkip names the type.
func (s *settings) skips(typ string) bool {
	return slices.ContainsFunc(s.skip, func(pattern string) bool { return glob.Match(pattern, typ) })
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
func (t *track) attachHandler(ctx context.Context) (generation int64, err error) {
	partition, registration := t.p, t.reg
	partition.mu.Lock()
	attached := partition.attached[registration.name]
	if attached == nil {
		attached = &attachment{}
		partition.attached[registration.name] = attached
	}
	partition.mu.Unlock()

	// One track attaches, and the others wait for it without the lock of the partition.
	attached.mu.Lock()
	defer attached.mu.Unlock()
	if attached.done {
		return attached.generation, nil
	}

	// The end of the log confirms to the inbox that the watermarks belong to this topic.
	log, err := partition.s.g.Log(ctx, partition.tp)
	if err != nil {
		return 0, &inboxFailure{fmt.Errorf("reading partition %s: %w: %w", partition.tp, errNoLog, err)}
	}
	// The records in memory are those of the deleted topic. They must not move the watermarks of the new one.
	if partition.wasRecreated(log) {
		partition.isDoubtful.Store(true)
		return 0, &inboxFailure{errOrphan}
	}
	log.Accepted = partition.isAccepted()

	t.trouble.watchDatabase(t, maxQuerySilence)
	defer t.trouble.stopWatching()
	begun, err := partition.s.inbox.Attach(ctx, partition.s.c.inboxConsumer(registration), partition.tp.Topic, partition.tp.Partition, log)
	if err != nil {
		return 0, &inboxFailure{fmt.Errorf("attaching %s to partition %s: %w", registration.name, partition.tp, err)}
	}
	attached.done, attached.generation = true, begun.Number
	return begun.Number, nil
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
func (p *partition) detachHandler(registration *registration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.attached, registration.name)
}

// inboxConsumer returns the name of a handler in the inbox.
func (c *Consumer) inboxConsumer(registration *registration) string {
	return c.group + "/" + registration.name
}
