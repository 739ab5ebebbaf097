package model

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

const (
	watcher     = "orders"
	maxAttempts = 3
)

// stored is a document of the store of waiting envelopes.
type stored struct{ waiting.Document }

// letter is a dead letter.
type letter struct {
	number int
	mark   letters.Mark
}

// marshal returns the document as MongoDB stores it.
func (d *stored) marshal(w *world) bson.Raw {
	topics := slices.Sorted(slices.Values(d.Pending))
	doc := bson.D{
		{Key: "_id", Value: bson.Binary{Data: d.DocumentID[:]}},
		{Key: "ns", Value: d.NS},
		{Key: "id", Value: d.ID},
		{Key: "delivery", Value: d.Delivery},
		{Key: "key", Value: d.Key},
		{Key: "pos", Value: d.Pos},
		{Key: "topics", Value: strings.Join(topics, ",")},
		{Key: "reason", Value: d.Reason},
		{Key: "origin", Value: d.Origin},
		{Key: "attempts", Value: d.Attempts},
		{Key: "uncounted", Value: d.Uncounted},
		{Key: "redelivered", Value: d.Redelivered},
	}
	if d.NextAt != 0 {
		doc = append(doc, bson.E{Key: "nextAt", Value: bson.DateTime(d.NextAt)})
	}
	return mustMarshal(append(doc, bson.E{Key: "envelope", Value: d.Envelope}))
}

// listStored returns the stored documents in the order of the index (N15).
func (w *world) listStored() []*stored {
	key := func(d *stored) string { return d.Key }
	if w.undo == foldedKeys {
		key = func(d *stored) string { return strings.ToLower(d.Key) }
	}
	return slices.SortedFunc(maps.Values(w.store), func(a, b *stored) int {
		return cmp.Or(cmp.Compare(a.NS, b.NS), cmp.Compare(key(a), key(b)), cmp.Compare(a.Pos, b.Pos), slices.Compare(a.DocumentID[:], b.DocumentID[:]))
	})
}

// storeReader implements reconciler.Store for a term.
type storeReader struct{ w *world }

func (r *storeReader) Collection() *mongo.Collection { return nil }

func (r *storeReader) Each(_ context.Context, take func(*waiting.Document) error) error {
	for _, d := range r.w.listStored() {
		if err := take(&d.Document); err != nil {
			return err
		}
	}
	return nil
}

func (r *storeReader) EachWithoutPayload(ctx context.Context, _ []string, take func(*waiting.Document) error) error {
	return r.Each(ctx, take)
}

func (r *storeReader) DueKeys(_ context.Context, near time.Time, _ []string, _ int) (list []waiting.DueKey, _ error) {
	for _, d := range r.w.listStored() {
		if d.NextAt != 0 && d.NextAt <= near.UnixMilli() {
			list = append(list, waiting.DueKey{ID: bson.Binary{Data: d.DocumentID[:]}, NS: d.NS, Key: d.Key})
		}
	}
	return list, nil
}

func (r *storeReader) OfOutbox(context.Context, string, string, string, int) ([]waiting.Document, error) {
	return nil, nil
}

// ReadPage reads the whole scan as of now. Other things happen while the sender takes the documents.
func (r *storeReader) ReadPage(_ context.Context, scan *waiting.Scan, _ int, take func(bson.Raw) error) (bool, error) {
	var page []bson.Raw
	for _, d := range r.w.listStored() {
		isSkipped := len(d.Pending) == 1 && slices.Contains(scan.Skip, d.Pending[0])
		if isSkipped || scan.NS != "" && scan.NS != d.NS || scan.Keys != nil && !slices.Contains(scan.Keys, d.Key) {
			continue
		}
		page = append(page, d.marshal(r.w))
	}
	for _, raw := range page {
		if err := take(raw); errors.Is(err, waiting.ErrLeave) {
			break
		} else if err != nil {
			return false, err
		}
		r.w.drift(1)
	}
	return false, nil
}

// book is the ledger of a term: the decisions are those of the real one, and it writes to the world.
type book struct {
	*ledger.Ledger
	w     *world
	term  *term
	queue []*ledger.Outcome
}

// Add implements pipeline.Ledger and reconciler.Ledger.
func (b *book) Add(list ...*ledger.Outcome) {
	b.queue = append(b.queue, list...)
	if b.w.undo == passBeforeStored {
		for _, outcome := range list {
			b.restore(outcome)
			b.prepare(outcome)
			outcome.Stored(outcome)
			outcome.Stored = nil
		}
	}
}

// Store implements reconciler.Ledger.
func (b *book) Store(_ context.Context, list []*ledger.Outcome) error {
	if !b.writePart(list) {
		return errEnded
	}
	return nil
}

// write stores up to n outcomes of the queue.
func (b *book) write(n int) {
	n = min(n, len(b.queue))
	if n == 0 || b.term.dead {
		return
	}
	part := slices.Clone(b.queue[:n])
	// MongoDB rejects one document. The ledger makes it a dead letter, or repeats the write without end.
	if b.w.undo == repeatRejected && slices.ContainsFunc(part, func(outcome *ledger.Outcome) bool { return b.isRejected(outcome) }) {
		b.w.logf("MongoDB rejects a write of %s, which is repeated", b.term)
		return
	}
	b.queue = b.queue[n:]
	b.writePart(part)
}

// isRejected reports whether MongoDB rejects the envelope as a waiting one.
func (b *book) isRejected(outcome *ledger.Outcome) bool {
	b.restore(outcome)
	return outcome.Doc == nil && outcome.End.Waits() && outcome.Raw != nil && b.w.specOf(outcome.Raw).unstorable
}

// writePart stores outcomes in one fenced transaction (N3), and then releases them. The owner may die in between.
func (b *book) writePart(part []*ledger.Outcome) bool {
	for _, outcome := range part {
		b.restore(outcome)
	}
	if !b.w.isFenced(b.term) {
		b.term.die("has lost its lease")
		return false
	}
	var entered []*waiting.Entry
	for _, outcome := range part {
		b.prepare(outcome)
		if entry := b.apply(outcome); entry != nil {
			entered = append(entered, entry)
		}
	}
	if b.w.rand.IntN(40) == 0 && b.term.began {
		b.term.die("dies after its write")
		return false
	}

	for _, outcome := range part {
		if outcome.Stored != nil {
			outcome.Stored(outcome)
		}
	}
	b.term.entered.Put(entered...)
	return true
}

// restore sets the image of an envelope whose record was given back, from the stream after the position (N16).
func (b *book) restore(outcome *ledger.Outcome) {
	if outcome.Doc != nil || outcome.Claim != nil || outcome.Raw != nil || outcome.End == ledger.Sent {
		return
	}
	for _, s := range b.w.stream {
		for _, pos := range []string{s.pos, outboxes.PosAt(s.clusterTime)} {
			if pipeline.EventNumber([]byte(pos)) == outcome.Event {
				outcome.NS, outcome.Pos, outcome.Raw = s.ns, pos, s.raw
			}
		}
	}
}

// prepare makes a dead letter of an envelope that MongoDB cannot store as waiting, or that has no further attempt.
func (b *book) prepare(outcome *ledger.Outcome) {
	if b.isRejected(outcome) {
		outcome.End = ledger.Dead
		outcome.Rejection = record.Rejection{Class: record.Malformed, Reason: "MongoDB cannot store it"}
	}
}

// apply stores one outcome.
func (b *book) apply(outcome *ledger.Outcome) *waiting.Entry {
	w := b.w
	if at := outcome.Claim; at != nil {
		if at.Ends {
			w.claims = slices.DeleteFunc(w.claims, func(c *claim) bool { return c.ID == at.ID })
			return nil
		}
		for _, c := range w.claims {
			if c.ID == at.ID && (at.Leaves || outcome.End != ledger.Sent) {
				c.Done = append(c.Done, at.Index)
			}
		}
	}

	w.recordEnd(outcome)
	if outcome.Doc == nil {
		switch {
		case outcome.End.Waits():
			return w.enter(outcome)
		case outcome.End == ledger.Dead:
			w.checkExpired(outcome, w.specOf(outcome.Raw), nil)
			w.bury(outcome, outcome.NS, outcome.Raw, outcome.Pos)
		}
		return nil
	}

	document := w.store[outcome.Doc.DocumentID]
	if document == nil {
		outcome.End = ledger.Gone
		return nil
	}
	switch {
	case outcome.End.Waits():
		document.Pending, document.Reason = slices.Clone(outcome.Topics), outcome.Reason
		if outcome.End == ledger.Retrying {
			document.Attempts++
			if len(outcome.Topics) != len(outcome.Rejected) {
				document.Uncounted++
			}
			document.NextAt = w.clockMS() + 1000
		}
	case outcome.End == ledger.Dead:
		w.checkExpired(outcome, w.specOf(document.Envelope), document.Pending)
		w.bury(outcome, document.NS, document.Envelope, document.Pos)
		delete(w.store, document.DocumentID)
	default:
		if document.IsOfStream() && document.Pos > w.doc.beside {
			w.doc.beside = document.Pos
		}
		delete(w.store, document.DocumentID)
	}
	w.logf("%s stores that %s is %s for %v", b.term, w.specOf(document.Envelope), outcome.End, document.Pending)
	return nil
}

// enter stores an envelope as waiting. A document that exists stays as it is.
func (w *world) enter(outcome *ledger.Outcome) *waiting.Entry {
	entry := &waiting.Entry{
		Watcher: watcher, NS: outcome.NS, Raw: outcome.Raw, Key: outcome.Key, Pos: outcome.Pos, Pending: outcome.Topics, Reason: outcome.Reason, Origin: waiting.OriginStream,
	}
	if outcome.MayBeSent {
		entry.StreamMS = outcome.StreamMS
	}
	if outcome.Claim != nil {
		entry.Origin = waiting.OriginScheduled
	} else if outboxes.IsSwept(outcome.Pos) {
		entry.Origin, entry.Redelivered = waiting.OriginSweep, true
	}
	if outcome.End == ledger.Retrying {
		entry.Attempts, entry.NextAt = 1, w.clock().Add(time.Second)
		if outcome.Claim != nil && len(outcome.Topics) != len(outcome.Rejected) {
			entry.Uncounted = 1
		}
	}

	document := &stored{entry.Document()}
	if w.store[document.DocumentID] == nil {
		w.store[document.DocumentID] = document
	}
	w.logf("%s is stored as waiting (%s) for %v", w.specOf(entry.Raw), entry.Reason, entry.Pending)
	return entry
}

// bury stores the dead letters of an envelope, one for each topic. One that exists stays as it is.
func (w *world) bury(outcome *ledger.Outcome, ns string, raw bson.Raw, pos string) {
	topics := outcome.Topics
	switch {
	case len(topics) == 0:
		topics = []string{outcome.Topic}
	case w.undo == letterOfOneTopic:
		topics = topics[:1]
	}
	for _, topic := range topics {
		w.buryFor(topic, outcome, ns, raw, pos)
	}
}

func (w *world) buryFor(topic string, outcome *ledger.Outcome, ns string, raw bson.Raw, pos string) {
	s := w.specOf(raw)
	prepared, err := letters.Prepare(letters.Letter{
		Watcher: watcher, NS: ns, Raw: raw, Key: outcome.Key, Class: outcome.Rejection.Class, Reason: outcome.Rejection.Reason, Topic: topic, Pos: pos,
		Origin: waiting.OriginStream,
	})
	if err != nil {
		panic(err)
	}
	id := prepared.ID()
	if w.undo == lettersByID {
		id = ns + s.id
	}
	if _, exists := w.letters[id]; !exists {
		w.letters[id] = letter{s.number, letters.Mark{
			NS: ns, ID: raw.Lookup("_id"), Pos: pos, Stamp: outboxes.Stamp(raw), Topic: topic, MovedAt: w.clock(),
		}}
	}
	w.logf("%s is dead for %q: %s", s, topic, outcome.Rejection.Class)
}

// specOf returns the event of an envelope.
func (w *world) specOf(raw bson.Raw) *spec {
	_, data := raw.Lookup("payload").Binary()
	n := 0
	for _, digit := range data {
		n = 10*n + int(digit-'0')
	}
	return w.specs[n]
}

// isFenced reports whether the fence lets a write of the term pass (N1, N3).
func (w *world) isFenced(t *term) bool {
	return t.epoch == w.doc.epoch || w.undo == unfencedWrites
}

// saveOffsets stores offsets in a fenced write. It reports whether the term still has its lease.
func (w *world) saveOffsets(t *term, offsets map[string][]int64) bool {
	if !w.isFenced(t) {
		t.die("has lost its lease")
		return false
	}
	for topic, list := range offsets {
		kept := slices.Clone(w.doc.offsets[topic])
		for p, offset := range list {
			for len(kept) <= p {
				kept = append(kept, -1)
			}
			if offset >= 0 {
				kept[p] = offset
			}
		}
		w.doc.offsets[topic] = kept
	}
	return true
}
