package ledger

import (
	"context"
	"fmt"
	"slices"

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
		if o.entry != nil || o.letters != nil || o.change != nil {
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
func (l *Ledger) prepareNew(outcome *Outcome) (err error) {
	// If only one attempt is allowed, an envelope that failed once is dead, unless it waits for other topics.
	onlyAttempt := outcome.End == Retrying && l.config.MaxAttempts <= 1 && len(outcome.Held) == 0
	switch {
	case outcome.End == Sent || outcome.End == Dropped || outcome.Claim != nil && outcome.Claim.Ends:
		return nil

	case outcome.Raw == nil:
		// Without the letter, the resolved position would wait for an envelope that cannot be found.
		outcome.End = Dead
		if outcome.Rejection.Class == "" {
			outcome.Rejection = record.Rejection{Class: record.Malformed, Reason: "its target could not be written"}
		}
		outcome.Rejection.Reason += "; the envelope is gone, only its id is left"
		if outcome.Raw, err = bson.Marshal(bson.D{{Key: "_id", Value: outcome.HeaderID()}}); err != nil {
			return fmt.Errorf("writing the id of a dead letter: %w", err)
		}

	case outcome.End.Waits() && !onlyAttempt:
		outcome.entry = l.newEntry(outcome)
		return nil
	}

	var attempts []record.Attempt
	if onlyAttempt {
		attempts = []record.Attempt{l.attemptOf(outcome)}
		outcome.End = Dead
		outcome.Rejection = record.Rejection{Class: record.AttemptsExhausted, Reason: onlyAttemptText + outcome.Rejection.Reason}
	}
	outcome.letters, err = outcome.prepareLetters(l.newLetter(outcome, attempts))
	return err
}

// onlyAttemptText is the start of the reason of a dead letter if only one attempt is allowed.
const onlyAttemptText = "the only attempt failed with: "

// newEntry returns the waiting envelope of outcome.
func (l *Ledger) newEntry(outcome *Outcome) *waiting.Entry {
	entry := &waiting.Entry{
		Watcher: l.config.Store.Watcher(),
		NS:      outcome.NS,
		Raw:     outcome.Raw,
		Key:     outcome.Key,
		Slot:    waiting.SlotOf(outcome.Raw),
		Pos:     outcome.Pos,
		Pending: outcome.Topics,
		Reason:  outcome.Reason,
		Origin:  waiting.OriginStream,
	}
	if outcome.MayBeSent {
		entry.StreamMS = outcome.StreamMS
	}

	if outcome.Claim != nil {
		entry.Origin, entry.Sent = waiting.OriginScheduled, l.placesToStore(outcome)
	} else if outboxes.IsSwept(outcome.Pos) {
		entry.Origin, entry.Redelivered = waiting.OriginSweep, true
	}

	if outcome.End == Retrying {
		entry.Attempts = 1
		if outcome.uncounted {
			entry.Uncounted = 1
		}
		entry.NextAt = l.config.Now().Add(l.config.Backoff.Delay(0))
		failure := l.attemptOf(outcome)
		entry.Error = &failure
	}
	return entry
}

// attemptOf returns the failed attempt of outcome, now.
func (l *Ledger) attemptOf(outcome *Outcome) record.Attempt {
	return record.Attempt{Class: outcome.Rejection.Class, Reason: outcome.Rejection.Reason, Topic: outcome.Topic, At: l.config.Now(), Node: l.config.Source.Node}
}

// newLetter returns the dead letter of outcome, an envelope that is not in the store.
func (l *Ledger) newLetter(outcome *Outcome, attempts []record.Attempt) letters.Letter {
	letter := letters.Letter{
		Watcher:   l.config.Store.Watcher(),
		NS:        outcome.namespace(),
		Mapping:   l.config.Mapping,
		Raw:       outcome.Raw,
		Key:       outcome.Key,
		Class:     outcome.Rejection.Class,
		Reason:    outcome.Rejection.Reason,
		Topic:     outcome.Topic,
		Partition: outcome.Partition,
		Pos:       outcome.Pos,
		Origin:    waiting.OriginStream,
		Source:    l.config.Source,
		Attempts:  attempts,
		Expire:    l.config.LetterExpiry,
	}
	if outcome.Raw != nil {
		letter.Slot = waiting.SlotOf(outcome.Raw)
	}
	if outcome.Claim != nil {
		letter.Origin = waiting.OriginScheduled
	} else if outboxes.IsSwept(outcome.Pos) {
		letter.Origin = waiting.OriginSweep
	}

	if document := outcome.Doc; document != nil {
		letter.Key, letter.Pos, letter.Delivery, letter.Origin, letter.ReplayOf = document.Key, document.Pos, document.Delivery, document.Origin, document.ReplayOf
		if letter.Raw == nil {
			letter.Raw, _ = bson.Marshal(bson.D{{Key: "_id", Value: document.ID}})
		}
	}
	return letter
}

// splitLetter returns a letter for each topic for which the envelope is dead. A letter without a topic stands for all topics: the next owner,
// a replay and a requeue would take the event as dead for topics that have it, or are still to get it.
func (o *Outcome) splitLetter(letter letters.Letter) (list []letters.Letter) {
	topics := o.Topics
	if len(topics) == 0 {
		topics = []string{o.Topic}
	}

	for _, topic := range topics {
		ofTopic := letter
		if topic != letter.Topic {
			ofTopic.Topic, ofTopic.Partition = topic, record.AnyPartition
		}
		// Each topic has its own reason.
		isOwn := func(result record.Result) bool { return result.Topic == topic && result.Rejection != nil }
		if i := slices.IndexFunc(o.Rejected, isOwn); i >= 0 {
			result := &o.Rejected[i]
			why := o.lastRejection(result.Rejection)
			ofTopic.Class, ofTopic.Reason, ofTopic.Partition = why.Class, why.Reason, result.Partition
			if last := len(letter.Attempts) - 1; last >= 0 {
				attempt := letter.Attempts[last]
				attempt.Class, attempt.Reason, attempt.Topic = result.Rejection.Class, result.Rejection.Reason, topic
				ofTopic.Attempts = append(slices.Clone(letter.Attempts[:last]), attempt)
			}
		}
		list = append(list, ofTopic)
	}
	return list
}

// prepareLetters returns the letters that splitLetter makes of letter, ready to be stored.
func (o *Outcome) prepareLetters(letter letters.Letter) (list []*letters.Prepared, err error) {
	for _, ofTopic := range o.splitLetter(letter) {
		prepared, err := letters.Prepare(ofTopic)
		if err != nil {
			return nil, err
		}
		list = append(list, prepared)
	}
	return list, nil
}

// numberUnstamped gives positions to swept envelopes without a stamp of the server, in the order of their decisions, which is
// the order of their keys (N15). A later term uses a later time.
// The time lets a later owner recognize the envelopes that its stream may repeat.
func (l *Ledger) numberUnstamped(ctx context.Context, part []*Outcome) error {
	var at bson.Timestamp
	for _, o := range part {
		entry := o.entry
		if entry == nil || entry.Number != "" || !outboxes.PosUnstamped(entry.Pos) {
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
		entry.Number = outboxes.PosNumber(at, l.unstampedCount)
	}
	return nil
}

// prepareStored decides about an envelope that is in the store.
func (l *Ledger) prepareStored(outcome *Outcome) {
	if !outcome.End.Waits() {
		return
	}

	document := outcome.Doc
	change := &waiting.Change{
		DocumentID: document.DocumentID, Reason: outcome.Reason, Pending: outcome.Topics, Sent: l.placesToStore(outcome), Attempts: document.Attempts,
	}
	if outcome.End == Retrying {
		change.Reason = waiting.Retry
		failure := l.attemptOf(outcome)
		change.Failure = &failure
		change.NextAt = l.config.Now().Add(l.config.Backoff.Delay(int(document.Attempts)))
		change.Uncounted = document.Uncounted
		if outcome.uncounted {
			change.Uncounted++
		}
	}

	// The document is correct already: nothing has changed since it was read.
	if outcome.End == Waiting && change.Reason == document.Reason && document.NextAt == 0 && len(outcome.Topics) == len(document.Pending) {
		return
	}
	outcome.change = change
}

// placesToStore returns the places of the records of outcome, if they are to be recorded with the delivery to its last topic.
func (l *Ledger) placesToStore(outcome *Outcome) []outboxes.Place {
	if outcome.Recorded && l.config.Recording == RecordMark {
		return outcome.Sent
	}
	return nil
}

// writeState writes a part in one fenced transaction of the state database (N3). It is idempotent.
func (l *Ledger) writeState(ctx context.Context, part []*Outcome) error {
	var prepared []*letters.Prepared
	for _, o := range part {
		prepared = append(prepared, o.letters...)
	}
	// A process may die in between. Chunks without a letter do no harm, but a letter without its chunks cannot be read.
	if err := letters.WriteChunks(ctx, l.config.Fencer, l.config.Letters, prepared); err != nil {
		return err
	}

	set := newWriteSet(part)
	if set.isEmpty() {
		return nil
	}
	err := l.config.Fencer.Fenced(ctx, set.buildWatcherUpdate(), mongodb.LimitStateRuns(len(part), func(tx context.Context) error {
		return l.writeSet(tx, set)
	}))
	if err != nil {
		return fmt.Errorf("storing the outcomes of sends: %w", err)
	}
	if err := l.applyDead(ctx, set); err != nil {
		return err
	}

	// A repetition after a lost response finds nothing either, so the documents have to be read.
	if !set.complete {
		return l.markGone(ctx, set)
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

	complete bool                             // each document was found
	dead     map[*Outcome][]*letters.Prepared // of dying, as of the latest run
	tried    map[*Outcome][]*letters.Prepared // of dying, as of any run
	spared   map[*Outcome]bool                // dying, but an operator has given it further attempts
}

func newWriteSet(part []*Outcome) *writeSet {
	set := &writeSet{tried: map[*Outcome][]*letters.Prepared{}}
	for _, o := range part {
		if at := o.Claim; at != nil && at.Ends {
			set.claims.End(at.ID)
		} else if at != nil && (at.Leaves || o.End != Sent) {
			set.claims.Finish(at.ID, at.Index)
		}

		switch {
		case o.entry != nil:
			set.entries = append(set.entries, *o.entry)
		case o.change != nil:
			set.changed = append(set.changed, o)
		case o.Doc != nil && o.letters != nil:
			// The letters of a document whose envelope cannot be stored as one.
			set.letters = append(set.letters, o.letters...)
			set.removed = append(set.removed, o)
		case o.letters != nil:
			set.letters = append(set.letters, o.letters...)
		case o.Doc != nil && o.End == Dead:
			set.dying = append(set.dying, o)
		case o.Doc != nil && !o.End.Waits() && o.End != Gone:
			set.removed = append(set.removed, o)
		}
	}
	return set
}

func (w *writeSet) isEmpty() bool {
	return len(w.entries)+len(w.changed)+len(w.removed)+len(w.dying)+len(w.letters) == 0 && w.claims.IsEmpty()
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

// writeSet runs the statements of set in the transaction of tx.
func (l *Ledger) writeSet(tx context.Context, set *writeSet) error {
	client := mongo.SessionFromContext(tx).Client()
	store := mongodb.InClient(client, l.config.Store.Collection())
	if err := waiting.Enter(tx, store, set.entries); err != nil {
		return err
	}
	if !set.claims.IsEmpty() {
		if err := set.claims.Write(tx, mongodb.InClient(client, l.config.Claims)); err != nil {
			return err
		}
	}

	var removed [][waiting.IDSize]byte
	for _, o := range set.removed {
		removed = append(removed, o.Doc.DocumentID)
	}
	if err := l.readDying(tx, store, set); err != nil {
		return err
	}
	for o := range set.dead {
		removed = append(removed, o.Doc.DocumentID)
	}
	changes := make([]*waiting.Change, 0, len(set.changed)+len(set.spared))
	for _, o := range set.changed {
		changes = append(changes, o.change)
	}
	for o := range set.spared {
		// Topics that have the record must not get it again.
		if len(o.Sent) > 0 {
			changes = append(changes, &waiting.Change{DocumentID: o.Doc.DocumentID, Pending: o.Topics, Sent: l.placesToStore(o)})
		}
	}
	var err error
	if set.complete, err = waiting.WriteChanges(tx, store, changes, removed); err != nil {
		return err
	}

	var dead []*letters.Prepared
	for _, list := range set.dead {
		dead = append(dead, list...)
	}
	coll := mongodb.InClient(client, l.config.Letters)
	// The chunks of the other letters exist already.
	if err := letters.WriteChunksIn(tx, coll, dead); err != nil {
		return err
	}
	return letters.Write(tx, coll, l.config.Now(), append(dead, set.letters...))
}

// readDying makes the letters of the dying envelopes, which are not kept in memory while they are in flight.
func (l *Ledger) readDying(tx context.Context, store *mongo.Collection, set *writeSet) error {
	set.dead, set.spared = map[*Outcome][]*letters.Prepared{}, map[*Outcome]bool{}
	byID := map[[waiting.IDSize]byte]*Outcome{}
	var ids [][waiting.IDSize]byte
	for _, o := range set.dying {
		byID[o.Doc.DocumentID] = o
		ids = append(ids, o.Doc.DocumentID)
	}

	return waiting.ReadWhole(tx, store, ids, func(raw bson.Raw) error {
		document := waiting.ReadDocument(raw)
		outcome := byID[document.DocumentID]
		// An operator has given it further attempts.
		if outcome.Rejection.Class == record.AttemptsExhausted && document.Attempts != outcome.Doc.Attempts {
			set.spared[outcome] = true
			return nil
		}

		var err error
		set.dead[outcome], err = outcome.prepareLetters(l.letterOfStored(outcome, &document))
		set.tried[outcome] = set.dead[outcome]
		return err
	})
}

// letterOfStored returns the dead letter of a waiting envelope, with all its attempts.
func (l *Ledger) letterOfStored(outcome *Outcome, document *waiting.Document) letters.Letter {
	letter := l.newLetter(outcome, nil)
	letter.Raw = append(bson.Raw(nil), document.Envelope...)
	letter.Slot = waiting.SlotOf(letter.Raw)
	if len(document.History) > 0 || outcome.Rejection.Class == record.AttemptsExhausted {
		last := l.attemptOf(outcome)
		letter.Attempts = append(document.History, last)
	}
	return letter
}

// applyDead sets the ends of outcomes whose documents were read in the transaction. If the transaction was repeated although it had
// committed, its last run has found no documents, but the letters exist.
func (l *Ledger) applyDead(ctx context.Context, set *writeSet) error {
	var doubtful bson.A
	for _, o := range set.dying {
		if set.dead[o] == nil && !set.spared[o] && set.tried[o] != nil {
			doubtful = append(doubtful, set.tried[o][0].ID())
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

	for _, o := range set.dying {
		switch prepared := set.dead[o]; {
		case prepared != nil:
			o.letters = prepared
		case set.spared[o]:
			o.End = Waiting
		case set.tried[o] != nil && written[set.tried[o][0].ID()]:
			o.letters = set.tried[o]
		default:
			o.End = Gone
		}
	}
	return nil
}

// markGone sets the end of changed envelopes that are gone, and wait no more.
func (l *Ledger) markGone(ctx context.Context, set *writeSet) error {
	ids := make([][waiting.IDSize]byte, len(set.changed))
	for i, o := range set.changed {
		ids[i] = o.Doc.DocumentID
	}
	if len(ids) == 0 {
		return nil
	}

	found, err := waiting.FindExisting(ctx, l.config.Store.Collection(), ids)
	if err != nil {
		return err
	}
	for _, o := range set.changed {
		if !found[o.Doc.DocumentID] {
			o.End = Gone
		}
	}
	return nil
}
