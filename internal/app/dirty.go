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

// dirty is the list of collections that hold exceptions or scheduled envelopes, as the watcher document has it: a
// take-over, and the reconciler, ask those alone (N17).
type dirty struct {
	t  *term
	mu sync.Mutex
	ns map[string]bool
}

func newDirty(t *term, doc *lease.Document) *dirty {
	d := &dirty{t: t, ns: map[string]bool{}}
	for _, ns := range doc.Dirty {
		d.ns[ns] = true
	}
	return d
}

// mark puts a collection on the list, majority-committed when it returns nil; one that is on it costs nothing.
func (d *dirty) mark(ctx context.Context, ns string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ns[ns] {
		return nil
	}
	if err := d.t.held.Save(ctx, lease.Update{Dirty: []string{ns}}); err != nil {
		return err
	}
	d.ns[ns] = true
	return nil
}

// marked notes what a fenced transaction has put on the list.
func (d *dirty) marked(ns string) {
	d.mu.Lock()
	d.ns[ns] = true
	d.mu.Unlock()
}

// collections are those on the list that this watcher reads, with what others put there meanwhile.
func (d *dirty) collections() []store.Outbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, ns := range d.t.held.Dirty() {
		d.ns[ns] = true
	}
	if len(d.ns) == 0 {
		return nil
	}
	return slices.DeleteFunc(d.t.outboxes(), func(o store.Outbox) bool { return !d.ns[o.NS()] })
}

// find puts those collections on the list that hold something although nobody told of it: what was appended before a watcher's
// first position, or in a stretch of the stream that was lost.
func (d *dirty) find(ctx context.Context) error {
	for _, o := range d.t.outboxes() {
		if err := d.look(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// look is find for one collection.
func (d *dirty) look(ctx context.Context, o store.Outbox) error {
	still := false
	if err := d.t.untilRead(ctx, func(ctx context.Context) (err error) {
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
	// cleanCall bounds the transaction, in which nothing else can be put on the list.
	cleanCall = time.Second
)

// run takes collections off the list until ctx ends.
func (d *dirty) run(ctx context.Context) error {
	for wait := d.t.pace.clean; retry.Sleep(ctx, wait) == nil; {
		began := time.Now()
		for _, o := range d.collections() {
			if err := d.clean(ctx, o); err != nil && ctx.Err() == nil {
				d.t.log.Debug("a collection stays on the list of those with exceptions", "collection", o.NS(), "reason", err)
			}
		}
		wait = max(d.t.pace.clean, cleanShare*time.Since(began))
	}
	return nil
}

// clean takes one off if it holds nothing any more. Most do hold something, and a plain read says so, beside everything else.
func (d *dirty) clean(ctx context.Context, o store.Outbox) error {
	reached, _ := d.t.disp.Reached()
	if holds, err := d.holds(ctx, d.t.mongo.state, store.Majority, o, reached); err != nil || holds {
		return err
	}
	return d.takeOff(ctx, o)
}

// holds reports whether a collection holds an exception or a scheduled envelope, or a dead letter of what the stream would bring to a
// successor once more.
func (d *dirty) holds(ctx context.Context, client *mongo.Client, as func(*mongo.Collection) *mongo.Collection, o store.Outbox, at resume.Position) (bool, error) {
	db := client.Database(o.DB)
	if still, err := store.StillDirty(ctx, as(db.Collection(o.Coll)), o.Part); err != nil || still {
		return still, err
	}
	return deadletter.AnyBehind(ctx, as(db.Collection(deadletter.Collection(o.Coll))), position(at))
}

// errLookSlow ends a transaction that does not see soon enough whether a collection holds something: without an index it never does.
var errLookSlow = errors.New("the look whether it holds something takes too long; is an index missing?")

// takeOff looks once more and takes the collection off in one transaction with the fence, which every other writer of exceptions
// takes, too; what the stream brings meanwhile waits in mark.
func (d *dirty) takeOff(ctx context.Context, o store.Outbox) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	gone := false
	err := d.t.held.Fenced(ctx, nil, func(tx context.Context) error {
		gone = false
		call, cancel := context.WithTimeoutCause(tx, cleanCall, errLookSlow)
		defer cancel()
		client := mongo.SessionFromContext(tx).Client()
		watchers, own := client.Database(d.t.cfg.MongoDB.State).Collection("watchers"), bson.D{{Key: "_id", Value: d.t.held.Document().ID}}
		var doc lease.Document
		err := watchers.FindOne(call, own).Decode(&doc)
		holds := false
		if err == nil {
			inside := func(c *mongo.Collection) *mongo.Collection { return c }
			holds, err = d.holds(call, client, inside, o, doc.Position())
		}
		if err == nil && !holds {
			_, err = watchers.UpdateOne(call, own, bson.D{{Key: "$pull", Value: bson.D{{Key: "dirty", Value: o.NS()}}}})
			gone = err == nil
		}
		if err != nil && errors.Is(context.Cause(call), errLookSlow) {
			return errLookSlow // an attempt more would take as long
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("taking a collection off the list of those with exceptions: %w", err)
	}
	if gone {
		delete(d.ns, o.NS())
		d.t.held.Cleaned(o.NS())
	}
	return nil
}

// owned are the envelopes behind the checkpoint that an earlier owner made exceptions of, with the topics for which they wait, and
// those that it moved to the dead letters, with the topics that have refused them.
// The stream brings them once more. Those topics are the reconciler's; the others may not have got it, for their records may
// have been queued when that owner died, so the stream sends them as any other, and the read-back knows what was sent
// (N15). It is filled before the stream is opened.
type owned struct {
	ids  map[[16]byte][]string
	dead map[[16]byte][]string // by their place in the stream, too: what is dead has left its collection, and its id may have come again
	buf  []byte
}

func newOwned() *owned { return &owned{ids: map[[16]byte][]string{}, dead: map[[16]byte][]string{}} }

func (o *owned) none() bool { return len(o.ids)+len(o.dead) == 0 }

func (o *owned) clear() {
	clear(o.ids)
	clear(o.dead)
}

// key is that of an envelope, or of its event at a position.
func (o *owned) key(ns string, id bson.RawValue, pos ...byte) [16]byte {
	o.buf = append(append(append(o.buf[:0], ns...), 0, byte(id.Type)), id.Value...)
	if len(pos) > 0 {
		o.buf = append(append(o.buf, 0), pos...)
	}
	sum := sha256.Sum256(o.buf)
	return [16]byte(sum[:])
}

func (o *owned) bury(ns string, l deadletter.Behind) {
	k := o.key(ns, l.ID, []byte(l.Pos)...)
	o.dead[k] = append(o.dead[k], l.Topic)
}

// alive takes the records away that are dead.
func (o *owned) alive(ns string, id bson.RawValue, pos []byte, records []record.Record) (rest []record.Record, dead bool) {
	if len(o.dead) == 0 {
		return records, false
	}
	topics, dead := o.dead[o.key(ns, id, pos...)]
	return without(records, topics), dead
}

func (o *owned) add(ns string, id bson.RawValue, topics []string) { o.ids[o.key(ns, id)] = topics }

// leave takes the records away for whose topics the envelope waits; "" stands for all of them.
func (o *owned) leave(ns string, id bson.RawValue, records []record.Record) (rest []record.Record, known bool) {
	topics, known := o.ids[o.key(ns, id)]
	if !known {
		return records, false
	}
	return without(records, topics), true
}

// without are the records for other topics; "" stands for all.
func without(records []record.Record, topics []string) []record.Record {
	return slices.DeleteFunc(records, func(r record.Record) bool { return slices.Contains(topics, r.Topic) || slices.Contains(topics, "") })
}
