package consumer

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// position is what the group and the inbox have stored about a partition. The lock of the partition guards it, except for idProved,
// which only fetchLoop uses.
type position struct {
	located   bool                  // it is known where the group goes on
	topicID   string                // of the topic that the offsets belong to; "" if the brokers have no ids
	committed transport.GroupOffset // what the group has stored; an offset of -1 stands for something else
	storedID  string                // what the inbox has stored
	idProved  bool                  // the offset certainly belongs to the topic with this id
	accepted  bool                  // the group has read the topic before: it went on after an earlier topic was deleted
}

// locateStart finds out where the group goes on with the partition, and reads the id of the topic. An offset of a topic that was
// deleted and created again is not used: the partition then begins at the start of the new topic. With WithHaltOnLoss, locateStart
// ends the Run instead.
//
// The id is stored with each committed offset. The group may have no offset, because a broker deletes it with the topic, or one
// without an id, because a tool has committed it. Then the id in the inbox decides.
func (p *partition) locateStart(ctx context.Context) error {
	at, err := p.s.g.Resume(ctx, p.tp)
	if err != nil {
		return err
	}
	// Read after the offset: a topic that is created again in between is detected.
	log, err := p.s.g.Log(ctx, p.tp)
	if err != nil {
		return fmt.Errorf("reading the topic of partition %s: %w", p.tp, err)
	}
	stored, err := p.readStoredID(ctx)
	if err != nil {
		return err
	}

	before := cmp.Or(at.TopicID, stored)
	if isAnotherTopic(before, log.ID) {
		if err := p.reportRecreated(); err != nil {
			return err
		}
		at = transport.Start{Uncommitted: true}
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	p.nextFetch, p.fetchedTo, p.committed = at.Offset, at.Offset, at.GroupOffset
	if at.Uncommitted {
		p.committed.Offset = -1
		p.s.requestCommit()
	}
	p.topicID, p.storedID, p.located = log.ID, stored, true
	p.idProved = before == log.ID
	p.accepted = p.idProved && before != ""
	return nil
}

// isAccepted reports whether the group has read the topic before. It is false until the start is located, which a retry does not wait for.
func (p *partition) isAccepted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// readStoredID returns the id of the topic that the inbox has stored for the group, or "".
func (p *partition) readStoredID(ctx context.Context) (string, error) {
	place := p.inboxPlace()
	ids, err := p.s.inbox.TopicIDs(ctx, []inbox.Partition{place})
	if err != nil {
		return "", fmt.Errorf("partition %s: %w", p.tp, err)
	}
	return ids[place], nil
}

// inboxPlace returns the partition in the inbox, for the whole group.
func (p *partition) inboxPlace() inbox.Partition {
	return inbox.Partition{Consumer: p.s.c.group, Topic: p.tp.Topic, Number: p.tp.Partition}
}

// isAnotherTopic reports whether two ids are those of a deleted topic and of one that was created under its name. An id is "" if
// it is unknown. A topic of another cluster may be a copy with the same offsets.
func isAnotherTopic(oldID, newID string) bool {
	cluster, _, _ := strings.Cut(oldID, "/")
	return oldID != "" && oldID != newID && strings.HasPrefix(newID, cluster+"/")
}

// uncommittedOffset returns the offset to commit, and reports whether it differs from the committed one. A partition that is given
// back has been committed: the entries that held its offset back are released.
func (p *partition) uncommittedOffset() (handled transport.GroupOffset, changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	handled = transport.GroupOffset{Offset: p.finishedToLocked(), TopicID: p.topicID}
	return handled, p.located && !p.forgotten && handled != p.committed
}

func (p *partition) setCommitted(committed transport.GroupOffset) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.committed = committed
}

// unstoredID returns the id of the topic if the group has committed an offset of the topic, and the inbox has another id or none.
func (p *partition) unstoredID() (id string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	isCommitted := p.committed.Offset >= 0 && p.committed.TopicID == p.topicID
	return p.topicID, p.topicID != "" && isCommitted && p.storedID != p.topicID
}

func (p *partition) setStoredID(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.storedID = id
}
