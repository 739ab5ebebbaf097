package ledger

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// prepare decides how each outcome of a part is stored.
func (l *Ledger) prepare(ctx context.Context, part []*Outcome) error {
	for _, o := range part {
		if o.entry != nil || o.letter != nil || o.change != nil {
			continue
		}
		if o.Doc != nil {
			l.prepareStored(o)
			continue
		}
		if err := l.prepareNew(o); err != nil {
			return err
		}
	}
	return l.numberUnstamped(ctx, part)
}

// prepareNew decides about an envelope that is not in the store.
func (l *Ledger) prepareNew(o *Outcome) (err error) {
	// If only one attempt is allowed, an envelope that failed once is dead.
	onlyAttempt := o.End == Retrying && l.config.MaxAttempts <= 1
	switch {
	case o.End == Sent || o.End == Dropped || o.Claim != nil && o.Claim.Ends:
		return nil

	case o.Raw == nil:
		// Without the letter, the watermark would wait for an envelope that cannot be found.
		o.End = Dead
		if o.Refusal.Class == "" {
			o.Refusal = record.Refusal{Class: record.Malformed, Reason: "its target could not be written"}
		}
		o.Refusal.Reason += "; the envelope is gone, only its id is left"
		if o.Raw, err = bson.Marshal(bson.D{{Key: "_id", Value: o.HeaderID()}}); err != nil {
			return fmt.Errorf("writing the id of a dead letter: %w", err)
		}

	case o.End.Waits() && !onlyAttempt:
		o.entry = l.newEntry(o)
		return nil
	}

	var attempts []record.Attempt
	if onlyAttempt {
		attempts = []record.Attempt{l.attemptOf(o)}
		o.End = Dead
		o.Refusal = record.Refusal{Class: record.AttemptsExhausted, Reason: onlyAttemptText + o.Refusal.Reason}
	}
	o.letter, err = letters.Prepare(l.newLetter(o, attempts))
	return err
}

// onlyAttemptText is the start of the reason of a dead letter if only one attempt is allowed.
const onlyAttemptText = "the only attempt failed with: "

// newEntry returns the waiting envelope of o.
func (l *Ledger) newEntry(o *Outcome) *waiting.Entry {
	e := &waiting.Entry{
		Watcher: l.config.Store.Watcher(),
		NS:      o.NS,
		Raw:     o.Raw,
		Key:     o.Key,
		Slot:    waiting.SlotOf(o.Raw),
		Pos:     o.Pos,
		Pending: o.Topics,
		Reason:  o.Reason,
		Origin:  waiting.OriginStream,
	}

	// Every other envelope that is stored during a sweep comes from the sweep: all earlier events are resolved before it, and it is
	// resolved itself before the stream continues.
	if o.Claim != nil {
		e.Origin = waiting.OriginScheduled
	} else if l.config.Sweeping() {
		e.Origin, e.Redelivered = waiting.OriginSweep, true
	}

	if o.End == Retrying {
		e.Attempts = 1
		e.NextAt = l.config.Now().Add(l.config.Backoff.Delay(0))
		failure := l.attemptOf(o)
		e.Error = &failure
	}
	return e
}

// attemptOf returns the failed attempt of o, now.
func (l *Ledger) attemptOf(o *Outcome) record.Attempt {
	return record.Attempt{Class: o.Refusal.Class, Reason: o.Refusal.Reason, Topic: o.Topic, At: l.config.Now(), Node: l.config.Source.Node}
}

// newLetter returns the dead letter of o, an envelope that is not in the store.
func (l *Ledger) newLetter(o *Outcome, attempts []record.Attempt) letters.Letter {
	letter := letters.Letter{
		Watcher:   l.config.Store.Watcher(),
		NS:        o.namespace(),
		Mapping:   l.config.Mapping,
		Raw:       o.Raw,
		Key:       o.Key,
		Class:     o.Refusal.Class,
		Reason:    o.Refusal.Reason,
		Topic:     o.Topic,
		Partition: o.Partition,
		Pos:       o.Pos,
		Origin:    waiting.OriginStream,
		Source:    l.config.Source,
		Attempts:  attempts,
		Expire:    l.config.LetterExpiry,
	}
	if o.Raw != nil {
		letter.Slot = waiting.SlotOf(o.Raw)
	}
	if o.Claim != nil {
		letter.Origin = waiting.OriginScheduled
	} else if l.config.Sweeping() {
		letter.Origin = waiting.OriginSweep
	}

	if d := o.Doc; d != nil {
		letter.Key, letter.Pos, letter.Delivery, letter.Origin, letter.ReplayOf = d.Key, d.Pos, d.Delivery, d.Origin, d.ReplayOf
		if letter.Raw == nil {
			letter.Raw, _ = bson.Marshal(bson.D{{Key: "_id", Value: d.ID}})
		}
	}
	return letter
}

// numberUnstamped gives positions to swept envelopes without a stamp of the server, in the order of their decisions, which is
// the order of their keys (N15). A later term uses a later time.
// The time lets a later owner recognize the envelopes that its stream may repeat.
func (l *Ledger) numberUnstamped(ctx context.Context, part []*Outcome) error {
	var at bson.Timestamp
	for _, o := range part {
		e := o.entry
		if e == nil || e.Number != "" || !outboxes.PosUnstamped(e.Pos) {
			continue
		}

		if at.IsZero() {
			err := l.repeatUntilDone(ctx, func(ctx context.Context) (err error) {
				at, err = mongodb.ClusterTime(ctx, l.config.Store.Collection().Database().Client())
				return err
			})
			if err != nil {
				return err
			}
		}
		l.unstampedCount++
		e.Number = outboxes.PosNumber(at, l.unstampedCount)
	}
	return nil
}

// prepareStored decides about an envelope that is in the store.
func (l *Ledger) prepareStored(o *Outcome) {
	if !o.End.Waits() {
		return
	}

	d := o.Doc
	c := &waiting.Change{DocumentID: d.DocumentID, Reason: o.Reason, Pending: o.Topics, Attempts: d.Attempts}
	if o.Recorded && l.config.Recording == RecordMark {
		c.Sent = o.Sent
	}
	if o.End == Retrying {
		c.Reason = waiting.Retry
		failure := l.attemptOf(o)
		c.Failure = &failure
		c.NextAt = l.config.Now().Add(l.config.Backoff.Delay(int(d.Attempts)))
	}

	// The document is correct already: nothing has changed since it was read.
	if o.End == Waiting && c.Reason == d.Reason && d.NextAt == 0 && len(o.Topics) == len(d.Pending) {
		return
	}
	o.change = c
}

// writeState writes a part in one fenced transaction of the state database (N3). It is idempotent.
func (l *Ledger) writeState(ctx context.Context, part []*Outcome) error {
	var prepared []*letters.Prepared
	for _, o := range part {
		if o.letter != nil {
			prepared = append(prepared, o.letter)
		}
	}
	// A process may die in between. Chunks without a letter do no harm, but a letter without its chunks cannot be read.
	if err := letters.WriteChunks(ctx, l.config.Fencer, l.config.Letters, prepared); err != nil {
		return err
	}

	w := newWriteSet(part)
	if w.isEmpty() {
		return nil
	}
	err := l.config.Fencer.Fenced(ctx, w.buildWatcherUpdate(), mongodb.LimitRuns(len(part), func(tx context.Context) error {
		return l.writeSet(tx, w)
	}))
	if err != nil {
		return fmt.Errorf("storing the outcomes of sends: %w", err)
	}
	if err := l.applyDead(ctx, w); err != nil {
		return err
	}

	// A repetition after a lost reply finds nothing either, so the documents have to be read.
	if w.matched < w.countExpected() {
		return l.markGone(ctx, w)
	}
	return nil
}

// writeSet has the statements of one transaction.
type writeSet struct {
	entries []waiting.Entry
	changed []*Outcome
	removed []*Outcome // sent or dropped
	dying   []*Outcome // their envelopes are read in the transaction
	letters []*letters.Prepared
	claims  waiting.ClaimChange

	matched int64
	dead    map[*Outcome]*letters.Prepared // of dying, as of the latest run
	tried   map[*Outcome]*letters.Prepared // of dying, as of any run
	spared  map[*Outcome]bool              // dying, but an operator has given it further attempts
}

func newWriteSet(part []*Outcome) *writeSet {
	w := &writeSet{tried: map[*Outcome]*letters.Prepared{}}
	for _, o := range part {
		if at := o.Claim; at != nil && at.Ends {
			w.claims.End(at.ID)
		} else if at != nil && (at.Leaves || o.End != Sent) {
			w.claims.Finish(at.ID, at.Index)
		}

		switch {
		case o.entry != nil:
			w.entries = append(w.entries, *o.entry)
		case o.change != nil:
			w.changed = append(w.changed, o)
		case o.Doc != nil && o.letter != nil:
			// The letter of a document whose envelope cannot be stored as one.
			w.letters = append(w.letters, o.letter)
			w.removed = append(w.removed, o)
		case o.letter != nil:
			w.letters = append(w.letters, o.letter)
		case o.Doc != nil && o.End == Dead:
			w.dying = append(w.dying, o)
		case o.Doc != nil && !o.End.Waits() && o.End != Gone:
			w.removed = append(w.removed, o)
		}
	}
	return w
}

func (w *writeSet) isEmpty() bool {
	return len(w.entries)+len(w.changed)+len(w.removed)+len(w.dying)+len(w.letters) == 0 && w.claims.IsEmpty()
}

// countExpected returns the number of documents that the statements find if none is gone.
func (w *writeSet) countExpected() int64 {
	return int64(len(w.changed) + len(w.removed) + len(w.dead))
}

// buildWatcherUpdate returns the update of the watcher document: the highest position of an envelope of the stream that is
// sent outside of its order. The next owner needs it while the stream repeats the event (N8).
func (w *writeSet) buildWatcherUpdate() bson.D {
	highest := ""
	for _, o := range w.removed {
		if o.Doc.IsOfStream() && o.Doc.Pos > highest {
			highest = o.Doc.Pos
		}
	}
	if highest == "" {
		return nil
	}
	return bson.D{{Key: "$max", Value: bson.D{{Key: "beside", Value: highest}}}}
}

// writeSet runs the statements of w in the transaction of tx.
func (l *Ledger) writeSet(tx context.Context, w *writeSet) error {
	client := mongo.SessionFromContext(tx).Client()
	store := mongodb.InClient(client, l.config.Store.Collection())
	if err := waiting.Enter(tx, store, w.entries); err != nil {
		return err
	}
	if !w.claims.IsEmpty() {
		if err := w.claims.Write(tx, mongodb.InClient(client, l.config.Claims)); err != nil {
			return err
		}
	}

	var removed [][waiting.IDSize]byte
	for _, o := range w.removed {
		removed = append(removed, o.Doc.DocumentID)
	}
	if err := l.readDying(tx, store, w); err != nil {
		return err
	}
	for o := range w.dead {
		removed = append(removed, o.Doc.DocumentID)
	}
	changes := make([]*waiting.Change, len(w.changed))
	for i, o := range w.changed {
		changes[i] = o.change
	}
	var err error
	if w.matched, err = waiting.WriteChanges(tx, store, changes, removed); err != nil {
		return err
	}

	var dead []*letters.Prepared
	for _, p := range w.dead {
		dead = append(dead, p)
	}
	coll := mongodb.InClient(client, l.config.Letters)
	// The chunks of the other letters exist already.
	if err := letters.WriteChunksIn(tx, coll, dead); err != nil {
		return err
	}
	return letters.Write(tx, coll, l.config.Now(), append(dead, w.letters...))
}

// readDying makes the letters of the dying envelopes, which are not kept in memory while they are in flight.
func (l *Ledger) readDying(tx context.Context, store *mongo.Collection, w *writeSet) error {
	w.dead, w.spared = map[*Outcome]*letters.Prepared{}, map[*Outcome]bool{}
	byID := map[[waiting.IDSize]byte]*Outcome{}
	var ids [][waiting.IDSize]byte
	for _, o := range w.dying {
		byID[o.Doc.DocumentID] = o
		ids = append(ids, o.Doc.DocumentID)
	}

	return waiting.ReadWhole(tx, store, ids, func(raw bson.Raw) error {
		d := waiting.ReadDocument(raw)
		o := byID[d.DocumentID]
		// An operator has given it further attempts.
		if o.Refusal.Class == record.AttemptsExhausted && d.Attempts != o.Doc.Attempts {
			w.spared[o] = true
			return nil
		}

		var err error
		w.dead[o], err = letters.Prepare(l.letterOfStored(o, &d))
		w.tried[o] = w.dead[o]
		return err
	})
}

// letterOfStored returns the dead letter of a waiting envelope, with all its attempts.
func (l *Ledger) letterOfStored(o *Outcome, d *waiting.Document) letters.Letter {
	letter := l.newLetter(o, nil)
	letter.Raw = append(bson.Raw(nil), d.Envelope...)
	letter.Slot = waiting.SlotOf(letter.Raw)
	if len(d.History) > 0 || o.Refusal.Class == record.AttemptsExhausted {
		last := l.attemptOf(o)
		last.Class, last.Reason = o.failure.Class, o.failure.Reason
		letter.Attempts = append(d.History, last)
	}
	return letter
}

// applyDead sets the ends of outcomes whose documents were read in the transaction. If the transaction was repeated although it had
// committed, its last run has found no documents, but the letters exist.
func (l *Ledger) applyDead(ctx context.Context, w *writeSet) error {
	var doubtful bson.A
	for _, o := range w.dying {
		if w.dead[o] == nil && !w.spared[o] && w.tried[o] != nil {
			doubtful = append(doubtful, w.tried[o].ID())
		}
	}
	written := map[string]bool{}
	if len(doubtful) > 0 {
		filter := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: doubtful}}}}
		err := mongodb.FindEach(ctx, mongodb.Majority(l.config.Letters), "looking for dead letters", filter, func(raw bson.Raw) error {
			written[raw.Lookup("_id").StringValue()] = true
			return nil
		}, options.Find().SetProjection(mongodb.Fields("_id")))
		if err != nil {
			return err
		}
	}

	for _, o := range w.dying {
		switch p := w.dead[o]; {
		case p != nil:
			o.letter = p
		case w.spared[o]:
			o.End = Waiting
		case w.tried[o] != nil && written[w.tried[o].ID()]:
			o.letter = w.tried[o]
		default:
			o.End = Gone
		}
	}
	return nil
}

// markGone sets the end of changed envelopes that are gone, and wait no more.
func (l *Ledger) markGone(ctx context.Context, w *writeSet) error {
	ids := make([][waiting.IDSize]byte, len(w.changed))
	for i, o := range w.changed {
		ids[i] = o.Doc.DocumentID
	}
	if len(ids) == 0 {
		return nil
	}

	found, err := waiting.FindExisting(ctx, l.config.Store.Collection(), ids)
	if err != nil {
		return err
	}
	for _, o := range w.changed {
		if !found[o.Doc.DocumentID] {
			o.End = Gone
		}
	}
	return nil
}
