package app

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
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
	if err := d.t.untilDone(ctx, "mongodb", func(ctx context.Context) (err error) {
		still, err = store.StillDirty(ctx, store.Majority(d.t.mongo.state.Database(o.DB).Collection(o.Coll)), o.Part)
		return err
	}); err != nil {
		return err
	}
	d.t.progress.ticks.Add(1)
	if !still {
		return nil
	}
	return d.mark(ctx, o.NS())
}

// cleanEvery is how often the list is looked through for collections that hold nothing any more.
const cleanEvery = 10 * time.Second

// run takes collections off the list until ctx ends.
func (d *dirty) run(ctx context.Context) error {
	tick := time.NewTicker(cleanEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		for _, o := range d.collections() {
			if err := d.clean(ctx, o); err != nil && ctx.Err() == nil {
				d.t.log.Debug("a collection stays on the list of those with exceptions", "collection", o.NS(), "reason", err)
			}
		}
	}
}

// clean takes one off if it holds neither an exception nor a scheduled envelope, and no dead letter of what the stream would bring to a
// successor once more. The statements that look and the one that takes it off are one transaction with the fence, which every other writer of exceptions takes, too; and what the stream
// brings meanwhile waits in mark.
func (d *dirty) clean(ctx context.Context, o store.Outbox) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	gone := false
	err := d.t.held.Fenced(ctx, nil, func(tx context.Context) error {
		gone = false
		client := mongo.SessionFromContext(tx).Client()
		still, err := store.StillDirty(tx, client.Database(o.DB).Collection(o.Coll), o.Part)
		if err != nil || still {
			return err
		}
		watchers, own := client.Database(d.t.cfg.MongoDB.State).Collection("watchers"), bson.D{{Key: "_id", Value: d.t.held.Document().ID}}
		var doc lease.Document
		if err := watchers.FindOne(tx, own).Decode(&doc); err != nil {
			return err
		}
		letters := client.Database(o.DB).Collection(deadletter.Collection(o.Coll))
		if still, err = deadletter.AnyBehind(tx, letters, position(doc.Position())); err != nil || still {
			return err
		}
		_, err = watchers.UpdateOne(tx, own, bson.D{{Key: "$pull", Value: bson.D{{Key: "dirty", Value: o.NS()}}}})
		gone = err == nil
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
