package reconciler

import (
	"context"
	"maps"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
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
	reached    string // the resolved position before the first page was read
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
	malformed error // a rejection if its envelope can never be sent
	stamp     bson.Timestamp
	topics    []string // pending, the routed topics, or allTopics if these are unknown
	isRouted  bool     // the topics are known
}

// key returns the scope of the envelope's order.
func (c *candidate) key() orderKey { return orderKey{c.NS, c.Key} }

// scanStore reads the waiting envelopes that pass selects, and publishes those whose turn it is. It
// blocks while too many envelopes are in flight.
func (x *Sender) scanStore(ctx context.Context, pass scanPass) error {
	pass.skip = map[string]struct{}{}
	// The pages of this pass show everything that was stored before, and not all that is stored while they are read. An envelope
	// after this position waits for the next pass: an earlier one of its key may be stored at the same time.
	pass.reached = x.config.Outlet.Reached()
	scan := waiting.Scan{NS: pass.ns, Keys: pass.keys}

	x.mu.Lock()
	// The first key may be the last one of the previous pass, and starts again.
	x.current = keyTurn{}
	x.mu.Unlock()

	docs, bytes, limit := 0, 0, firstResponse
	if pass.keys != nil {
		limit = keysAtOnce
	}

	for more := true; more; {
		x.beginPage(&pass)
		scan.Skip = slices.Sorted(maps.Keys(pass.skip))

		var err error
		more, err = x.config.Store.ReadPage(ctx, &scan, limit, func(raw bson.Raw) error {
			docs++
			bytes += len(raw)
			if err := x.publishInTurn(ctx, &pass, raw); err != nil {
				return err
			}
			if pass.held < maxHeldInRow {
				return nil
			}

			// Many envelopes in a row could not be published. The server leaves out the others that wait
			// for the same topics.
			pass.held = 0
			topics, all := x.stoppedTopics()
			if !all && len(topics) <= pass.leftTopics {
				return nil
			}
			if all {
				scan.Leave(nil)
			} else {
				pass.leftTopics = len(topics)
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
		limit = max(firstResponse, min(pageDocs, pageBytes*docs/max(bytes, 1)))
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
func (x *Sender) beginPage(pass *scanPass) {
	x.mu.Lock()
	defer x.mu.Unlock()

	// If an outcome is written from now on, the page may still show the envelope as it was before.
	clear(x.landedIDs)

	// A topic stays in the set for the rest of the pass: envelopes that an earlier page left out
	// precede the envelopes of later pages.
	if pass.keys == nil {
		maps.Copy(pass.skip, x.parked)
	}
}

// publishInTurn publishes the envelope of the document raw to the topics for which it is its turn. An envelope at
// fault goes to the ledger instead. publishInTurn blocks while too many envelopes are in flight, and
// returns an error if the outlet cannot publish at all.
func (x *Sender) publishInTurn(ctx context.Context, pass *scanPass, raw bson.Raw) error {
	if err := x.awaitRoom(ctx, pass); err != nil {
		return err
	}

	document := waiting.ReadDocument(raw)
	candidate := x.newCandidate(&document, &pass.view)
	topics, flight := x.admitTopics(pass, candidate, x.config.Now().UnixMilli())
	if len(topics) == 0 {
		pass.held++
		return nil
	}
	pass.held = 0

	err := x.publish(ctx, candidate, topics, flight)
	if err == nil {
		pass.sinceFlush++
		if pass.sinceFlush >= flushEvery {
			pass.sinceFlush = 0
			x.config.Outlet.Flush()
		}
	}
	return err
}

// publish sends the envelope of candidate to topics as flight. Its outcome goes to the ledger.
func (x *Sender) publish(ctx context.Context, candidate *candidate, topics []string, flight *flight) error {
	document := *candidate.Document
	document.ID, document.Envelope = mongodb.CloneValue(document.ID), nil
	pending, stamp := candidate.topics, candidate.stamp
	// The outlet routes an envelope whose topics are unknown.
	if !candidate.isRouted {
		pending, topics = nil, nil
	}

	err := candidate.malformed
	if err == nil {
		envelope := envelopeOf(candidate.Document)
		envelope.TS, envelope.Redelivered = stamp, document.Redelivered || document.Origin == waiting.OriginReplay
		err = x.config.Outlet.Publish(ctx, envelope, topics, func(published record.Published) {
			x.noteResults(flight, published.Results)
			left := pending
			if left == nil {
				left = topicsOf(published.Results)
			}
			x.addOutcome(x.config.Ledger.Decide(&document, left, published.Results), flight, stamp, published.Ticket)
		})
	}
	if err == nil {
		return nil
	}

	rejected, err := splitRejection(err)
	if err != nil {
		x.undoFlight(document.DocumentID, flight)
		return err
	}
	// Until its outcome is stored, later envelopes of the key would overtake this envelope.
	x.breakKey(flight.key)
	x.addOutcome(x.config.Ledger.Rejected(&document, pending, rejected), flight, stamp)
	return nil
}

// topicsOf returns the topics of results.
func topicsOf(results []record.Result) []string {
	topics := make([]string, len(results))
	for i, a := range results {
		topics[i] = a.Topic
	}
	return topics
}

// addOutcome passes the outcome of a flight to the ledger. When it is stored, the offsets of the tickets are released first: the outcome is
// committed, so the stored offset may pass them.
func (x *Sender) addOutcome(outcome *ledger.Outcome, flight *flight, stamp bson.Timestamp, tickets ...record.Ticket) {
	outcome.Stamp = stamp
	outcome.Stored = func(outcome *ledger.Outcome) {
		if len(tickets) > 0 {
			x.config.Outlet.Settle(tickets)
		}
		x.openGates(outcome)
		x.endFlight(outcome.Doc.DocumentID, flight, outcome)
	}

	x.config.Ledger.Add(outcome)
}

// openGates opens the gates that an envelope of the stream held, if it waits no more.
func (x *Sender) openGates(outcome *ledger.Outcome) {
	document := outcome.Doc
	if !document.IsOfStream() {
		return
	}
	for _, topic := range gatesToOpen(outcome) {
		x.config.Outlet.OpenGate(document.NS, topic, document.Key)
	}
}

// gatesToOpen returns the topics for which the envelope no longer waits.
func gatesToOpen(outcome *ledger.Outcome) []string {
	pending := outcome.Doc.Pending
	if !outcome.End.Waits() {
		return pending
	}

	open := make([]string, 0, len(outcome.Sent))
	for _, s := range outcome.Sent {
		open = append(open, s.Topic)
	}
	return open
}

// awaitRoom blocks until fewer than maxInFlight envelopes are in flight, or returns the cause of ctx.
func (x *Sender) awaitRoom(ctx context.Context, pass *scanPass) error {
	for {
		x.mu.Lock()
		full := len(x.inFlight) >= x.maxInFlight
		x.mu.Unlock()
		if !full {
			return nil
		}

		// Room comes only from records that the sink has sent.
		pass.sinceFlush = 0
		x.config.Outlet.Flush()

		select {
		case <-x.room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// newCandidate returns the candidate of document. It parses the envelope into view.
func (x *Sender) newCandidate(document *waiting.Document, view *envelope.View) *candidate {
	candidate := &candidate{Document: document, topics: document.Pending, isRouted: document.Pending != nil}
	if err := x.config.Mapping.Parse(document.Envelope, view); err != nil {
		candidate.malformed = record.RejectionOf(err)
	}
	candidate.stamp = view.TS
	if candidate.isRouted {
		return candidate
	}

	candidate.topics = []string{allTopics}
	if candidate.malformed == nil {
		list, err := x.config.Outlet.RouteTopics(envelopeOf(document))
		if err == nil && len(list) > 0 {
			candidate.topics, candidate.isRouted = slices.Clone(list), true
		}
	}
	return candidate
}
