package reconciler

import (
	"context"
	"maps"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// scanPass is one pass over the store, in the order of outboxes and keys.
type scanPass struct {
	ns   string              // only this outbox; "": all
	keys []string            // only these keys of ns; nil: all
	skip map[string]struct{} // in a pass over all keys, the server leaves out envelopes that wait for these topics only

	view       envelope.View
	sinceFlush int    // envelopes published since the last flush
	held       int    // consecutive envelopes of the current key that could not be published
	leftTopics int    // number of topics that the server leaves out for the current key
	reached    string // the position of the watermark when it was last read
}

// keyTurn is the state of a pass for the current key. The pass reads a key from its lowest position
// up, and an envelope that cannot be published stops all later ones.
type keyTurn struct {
	orderKey
	started    bool
	stoppedAll bool // publish nothing more of this key
	stopped    map[string]struct{}
}

// candidate is the envelope that a pass considers.
type candidate struct {
	*waiting.Document
	atFault bool     // malformed
	topics  []string // pending, the routed topics, or allTopics if these are unknown
}

// key returns the scope of the envelope's order.
func (c *candidate) key() orderKey { return orderKey{c.NS, c.Key} }

// scanStore reads the waiting envelopes that p selects, and publishes those whose turn it is. It
// blocks while too many envelopes are in flight.
func (x *Sender) scanStore(ctx context.Context, p scanPass) error {
	p.skip = map[string]struct{}{}
	scan := waiting.Scan{Store: x.config.Store, NS: p.ns, Keys: p.keys}

	x.mu.Lock()
	// The first key may be the last one of the previous pass, and starts again.
	x.current = keyTurn{}
	x.mu.Unlock()

	docs, bytes, limit := 0, 0, firstReply
	if p.keys != nil {
		limit = keysAtOnce
	}

	for more := true; more; {
		x.beginPage(&p)
		scan.Skip = slices.Sorted(maps.Keys(p.skip))

		var err error
		more, err = scan.Page(ctx, limit, func(raw bson.Raw) error {
			docs++
			bytes += len(raw)
			if err := x.publishInTurn(ctx, &p, raw); err != nil {
				return err
			}
			if p.held < maxHeldInRow {
				return nil
			}

			// Many envelopes in a row could not be published. The server leaves out the others that wait
			// for the same topics.
			p.held = 0
			topics, all := x.stoppedTopics()
			if !all && len(topics) <= p.leftTopics {
				return nil
			}
			if all {
				scan.Leave(nil)
			} else {
				p.leftTopics = len(topics)
				scan.Leave(topics)
			}
			return waiting.ErrLeave
		})
		x.config.Outlet.Flush()
		if err != nil {
			return err
		}

		// The server limits a page by its number of documents. Their mean size so far keeps the page
		// below pageBytes.
		limit = max(firstReply, min(pageDocs, pageBytes*docs/max(bytes, 1)))
	}
	return nil
}

// stoppedTopics returns the topics to which nothing more of the current key may be published. all
// means that this is so for every topic.
func (x *Sender) stoppedTopics() (topics []string, all bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, allStopped := x.current.stopped[allTopics]
	return slices.Sorted(maps.Keys(x.current.stopped)), allStopped || x.current.stoppedAll
}

// beginPage prepares for the next page.
func (x *Sender) beginPage(p *scanPass) {
	x.mu.Lock()
	defer x.mu.Unlock()

	// If an outcome is written from now on, the page may still show the envelope as it was before.
	clear(x.landedIDs)

	// A topic stays in the set for the rest of the pass: envelopes that an earlier page left out
	// precede the envelopes of later pages.
	if p.keys == nil {
		maps.Copy(p.skip, x.parked)
	}
}

// publishInTurn publishes the envelope of the document raw to the topics for which it is its turn. An envelope at
// fault goes to the ledger instead. publishInTurn blocks while too many envelopes are in flight, and
// returns an error if the outlet cannot publish at all.
func (x *Sender) publishInTurn(ctx context.Context, p *scanPass, raw bson.Raw) error {
	if err := x.awaitRoom(ctx, p); err != nil {
		return err
	}

	d := waiting.ReadDocument(raw)
	malformed := x.config.Mapping.Parse(d.Envelope, &p.view)
	it := x.newCandidate(&d, malformed)
	now := x.config.Now().UnixMilli()
	if d.Pos > p.reached {
		p.reached = x.config.Outlet.Reached()
	}

	topics, f := x.admitTopics(p, it, now)
	if len(topics) == 0 {
		p.held++
		return nil
	}
	p.held = 0

	err := x.publish(ctx, it, topics, f, p.view.TS, malformed, p.view.HasExpiresAt && p.view.ExpiresAt <= now)
	if err == nil {
		p.sinceFlush++
		if p.sinceFlush >= flushEvery {
			p.sinceFlush = 0
			x.config.Outlet.Flush()
		}
	}
	return err
}

// publish sends the envelope it to topics and tracks its flight f. The envelope's fate goes to the ledger.
func (x *Sender) publish(
	ctx context.Context, it *candidate, topics []string, f *flight, stamp bson.Timestamp, malformed error, expired bool,
) error {
	d := *it.Document
	d.ID, d.Envelope = mongodb.CloneValue(d.ID), nil
	waits := d.Pending

	var refused *record.Refusal
	switch {
	case malformed != nil:
		refused = asRefusal(malformed)
	case expired:
		refused = &record.Refusal{Class: record.Expired, Reason: "its expiresAt has passed"}
	default:
		db, coll, _ := strings.Cut(d.NS, ".")
		e := outboxes.Envelope{
			DB: []byte(db), Coll: []byte(coll), TS: stamp, Raw: it.Envelope, Delivery: d.Delivery,
			Redelivered: d.Redelivered || d.Origin == waiting.OriginReplay,
		}
		// The outlet routes an envelope whose targets are unknown. If they were named, the fate has to
		// list the remaining topics.
		if d.Pending == nil && topics[0] == allTopics {
			topics = nil
		} else if waits == nil {
			waits = it.topics
		}

		err := x.config.Outlet.Publish(ctx, &e, topics, func(p record.Published) {
			x.noteAnswers(f, p.Answers)
			left := waits
			if left == nil {
				left = topicsOf(p.Answers)
			}
			o := x.config.Ledger.Answered(&d, left, p.Answers)
			x.addOutcome(o, f, stamp, p.Ticket, true)
		})
		if err == nil {
			return nil
		}

		refused, err = splitRefusal(err)
		if err != nil {
			x.undoFlight(d.DocumentID, f)
			return err
		}
	}

	// Until its fate is written, later envelopes of the key would overtake this envelope.
	x.breakKey(f.key)
	x.addOutcome(x.config.Ledger.Refused(&d, waits, refused), f, stamp, 0, false)
	return nil
}

// topicsOf returns the topics of answers.
func topicsOf(answers []record.Answer) []string {
	topics := make([]string, len(answers))
	for i, a := range answers {
		topics[i] = a.Topic
	}
	return topics
}

// addOutcome passes the fate of a flight to the ledger. When it is stored, the offset of the ticket is released first: the fate is
// committed, so the stored offset may pass it.
func (x *Sender) addOutcome(o *ledger.Outcome, f *flight, stamp bson.Timestamp, ticket record.Ticket, hasTicket bool) {
	o.Stamp = stamp
	o.Stored = func(o *ledger.Outcome) {
		if hasTicket {
			x.config.Outlet.Settle([]record.Ticket{ticket})
		}
		x.openGates(o)
		x.endFlight(o.Doc.DocumentID, f, o)
	}

	x.config.Ledger.Add(o)
}

// openGates opens the gates that an envelope of the stream held, if it waits no more.
func (x *Sender) openGates(o *ledger.Outcome) {
	d := o.Doc
	if !d.IsOfStream() {
		return
	}
	for _, topic := range gatesToOpen(o) {
		x.config.Outlet.OpenGate(d.NS, topic, d.Key)
	}
}

// gatesToOpen returns the topics for which the envelope no longer waits.
func gatesToOpen(o *ledger.Outcome) []string {
	pending := o.Doc.Pending
	if !o.End.Waits() {
		return pending
	}

	open := make([]string, 0, len(o.Sent))
	for _, s := range o.Sent {
		open = append(open, s.Topic)
	}
	return open
}

// awaitRoom blocks until fewer than maxInFlight envelopes are in flight, or returns the cause of ctx.
func (x *Sender) awaitRoom(ctx context.Context, p *scanPass) error {
	for {
		x.mu.Lock()
		full := len(x.inFlight) >= x.maxInFlight
		x.mu.Unlock()
		if !full {
			return nil
		}

		// Room comes only from records that the sink has sent.
		p.sinceFlush = 0
		x.config.Outlet.Flush()

		select {
		case <-x.room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// newCandidate returns the candidate of d. malformed is the error of parsing its envelope.
func (x *Sender) newCandidate(d *waiting.Document, malformed error) *candidate {
	it := &candidate{Document: d, atFault: malformed != nil, topics: d.Pending}
	if it.topics != nil {
		return it
	}

	it.topics = []string{allTopics}
	if malformed == nil {
		db, coll, _ := strings.Cut(d.NS, ".")
		list, err := x.config.Outlet.RouteTopics(&outboxes.Envelope{DB: []byte(db), Coll: []byte(coll), Raw: d.Envelope})
		if err == nil && len(list) > 0 {
			it.topics = slices.Clone(list)
		}
	}
	return it
}

// asRefusal returns malformed as a refusal. An error without a class gets the class Malformed.
func asRefusal(malformed error) *record.Refusal {
	refused, other := splitRefusal(malformed)
	if other != nil {
		return &record.Refusal{Class: record.Malformed, Reason: other.Error()}
	}
	return refused
}
