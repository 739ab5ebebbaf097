package app

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/resume"
)

// dirtyList is the list of collections that hold exceptions or scheduled envelopes, as the watcher document has it: a
// take-over, and the reconciler, ask those alone (N17).
type dirtyList struct {
	t      *term
	mu     sync.Mutex
	listed map[string]bool
}

func newDirtyList(t *term, doc *lease.Document) *dirtyList {
	d := &dirtyList{t: t, listed: map[string]bool{}}
	for _, ns := range doc.Dirty {
		d.listed[ns] = true
	}
	return d
}

// mark puts a collection on the list, majority-committed when it returns nil; one that is on it costs nothing.
func (d *dirtyList) mark(ctx context.Context, ns string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listed[ns] {
		return nil
	}
	if err := d.t.held.Save(ctx, lease.Update{Dirty: []string{ns}}); err != nil {
		return err
	}
	d.listed[ns] = true
	return nil
}

// addCommitted notes what a fenced transaction has put on the list.
func (d *dirtyList) addCommitted(ns string) {
	d.mu.Lock()
	d.listed[ns] = true
	d.mu.Unlock()
}

// dirtyOutboxes are those on the list that this watcher reads, with what others put there meanwhile.
func (d *dirtyList) dirtyOutboxes() []store.Outbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, ns := range d.t.held.Dirty() {
		d.listed[ns] = true
	}
	if len(d.listed) == 0 {
		return nil
	}
	return slices.DeleteFunc(d.t.watchedOutboxes(), func(o store.Outbox) bool { return !d.listed[o.NS()] })
}

// markAllNonEmpty puts those collections on the list that hold something although nobody told of it: what was appended before a watcher's
// first position, or in a stretch of the stream that was lost.
func (d *dirtyList) markAllNonEmpty(ctx context.Context) error {
	for _, o := range d.t.watchedOutboxes() {
		if err := d.markIfNonEmpty(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// markIfNonEmpty is find for one collection.
func (d *dirtyList) markIfNonEmpty(ctx context.Context, o store.Outbox) error {
	still := false
	if err := d.t.retryRead(ctx, func(ctx context.Context) (err error) {
		still, err = store.StillDirty(ctx, store.Majority(d.t.mongo.state.Database(o.DB).Collection(o.Coll)), o.Part)
		return err
	}); err != nil || !still {
		return err
	}
	return d.mark(ctx, o.NS())
}

const (
	// cleanShare bounds what looking through the list may cost: where it takes long, the next time comes so many times later.
	cleanShare = 50
	// cleanTimeout bounds the transaction, in which nothing else can be put on the list.
	cleanTimeout = time.Second
)

// cleanPeriodically takes collections off the list until ctx ends.
func (d *dirtyList) cleanPeriodically(ctx context.Context) error {
	for wait := d.t.pace.clean; retry.Sleep(ctx, wait) == nil; {
		began := time.Now()
		for _, o := range d.dirtyOutboxes() {
			if err := d.removeIfEmpty(ctx, o); err != nil && ctx.Err() == nil {
				d.t.log.Debug("a collection stays on the list of those with exceptions", "collection", o.NS(), "reason", err)
			}
		}
		wait = max(d.t.pace.clean, cleanShare*time.Since(began))
	}
	return nil
}

// removeIfEmpty takes one off if it holds nothing any more. Most do hold something, and a plain read says so, beside everything else.
func (d *dirtyList) removeIfEmpty(ctx context.Context, o store.Outbox) error {
	reached, _ := d.t.dispatcher.Reached()
	if holds, err := d.holdsWork(ctx, d.t.mongo.state, store.Majority, o, reached); err != nil || holds {
		return err
	}
	return d.removeInTransaction(ctx, o)
}

// holdsWork reports whether a collection holds an exception or a scheduled envelope, or a dead letter of what the stream would bring to a
// successor once more.
func (d *dirtyList) holdsWork(ctx context.Context, client *mongo.Client, as func(*mongo.Collection) *mongo.Collection, o store.Outbox, at resume.Position) (bool, error) {
	db := client.Database(o.DB)
	if still, err := store.StillDirty(ctx, as(db.Collection(o.Coll)), o.Part); err != nil || still {
		return still, err
	}
	return deadletter.AnyBehind(ctx, as(db.Collection(deadletter.Collection(o.Coll))), positionKey(at))
}

// errCheckSlow ends a transaction that does not see soon enough whether a collection holds something: without an index it never does.
var errCheckSlow = errors.New("the look whether it holds something takes too long; is an index missing?")

// removeInTransaction looks once more and takes the collection off in one transaction with the fence, which every other writer of exceptions
// takes, too; what the stream brings meanwhile waits in mark.
func (d *dirtyList) removeInTransaction(ctx context.Context, o store.Outbox) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	gone := false
	err := d.t.held.Fenced(ctx, nil, func(tx context.Context) error {
		gone = false
		call, cancel := context.WithTimeoutCause(tx, cleanTimeout, errCheckSlow)
		defer cancel()
		client := mongo.SessionFromContext(tx).Client()
		watchers, own := client.Database(d.t.cfg.MongoDB.State).Collection("watchers"), bson.D{{Key: "_id", Value: d.t.held.Document().ID}}
		var doc lease.Document
		err := watchers.FindOne(call, own).Decode(&doc)
		holds := false
		if err == nil {
			inside := func(c *mongo.Collection) *mongo.Collection { return c }
			holds, err = d.holdsWork(call, client, inside, o, doc.Position())
		}
		if err == nil && !holds {
			_, err = watchers.UpdateOne(call, own, bson.D{{Key: "$pull", Value: bson.D{{Key: "dirty", Value: o.NS()}}}})
			gone = err == nil
		}
		if err != nil && errors.Is(context.Cause(call), errCheckSlow) {
			return errCheckSlow // an attempt more would take as long
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("taking a collection off the list of those with exceptions: %w", err)
	}
	if gone {
		delete(d.listed, o.NS())
		d.t.held.Cleaned(o.NS())
	}
	return nil
}

// previousOwner are the envelopes behind the checkpoint that an earlier owner made exceptions of, with the topics for which they wait, and
// those that it moved to the dead letters, with the topics that have refused them.
// The stream brings them once more. Those topics are the reconciler's; the others may not have got it, for their records may
// have been queued when that owner died, so the stream sends them as any other, and the read-back knows what was sent
// (N15). It is filled before the stream is opened.
type previousOwner struct {
	waitingTopics map[[16]byte][]string
	deadTopics    map[[16]byte][]string // by their place in the stream, too: what is dead has left its collection, and its id may have come again
	buf           []byte
}

func newPreviousOwner() *previousOwner {
	return &previousOwner{waitingTopics: map[[16]byte][]string{}, deadTopics: map[[16]byte][]string{}}
}

func (o *previousOwner) isEmpty() bool { return len(o.waitingTopics)+len(o.deadTopics) == 0 }

func (o *previousOwner) reset() {
	clear(o.waitingTopics)
	clear(o.deadTopics)
}

// hashKey is that of an envelope, or of its event at a position.
func (o *previousOwner) hashKey(ns string, id bson.RawValue, pos ...byte) [16]byte {
	o.buf = append(append(append(o.buf[:0], ns...), 0, byte(id.Type)), id.Value...)
	if len(pos) > 0 {
		o.buf = append(append(o.buf, 0), pos...)
	}
	sum := sha256.Sum256(o.buf)
	return [16]byte(sum[:])
}

func (o *previousOwner) addDeadLetter(ns string, l deadletter.Behind) {
	k := o.hashKey(ns, l.ID, []byte(l.Pos)...)
	o.deadTopics[k] = append(o.deadTopics[k], l.Topic)
}

// removeDeadTopics takes the records away that are dead.
func (o *previousOwner) removeDeadTopics(ns string, id bson.RawValue, pos []byte, records []record.Record) (rest []record.Record, dead bool) {
	if len(o.deadTopics) == 0 {
		return records, false
	}
	topics, dead := o.deadTopics[o.hashKey(ns, id, pos...)]
	return dropTopics(records, topics), dead
}

func (o *previousOwner) addWaiting(ns string, id bson.RawValue, topics []string) {
	o.waitingTopics[o.hashKey(ns, id)] = topics
}

// removeWaitingTopics takes the records away for whose topics the envelope waits; "" stands for all of them.
func (o *previousOwner) removeWaitingTopics(ns string, id bson.RawValue, records []record.Record) (rest []record.Record, known bool) {
	topics, known := o.waitingTopics[o.hashKey(ns, id)]
	if !known {
		return records, false
	}
	return dropTopics(records, topics), true
}

// dropTopics are the records for other topics; "" stands for all.
func dropTopics(records []record.Record, topics []string) []record.Record {
	return slices.DeleteFunc(records, func(r record.Record) bool { return slices.Contains(topics, r.Topic) || slices.Contains(topics, "") })
}
