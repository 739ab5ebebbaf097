package waiting

import (
	"context"
	"maps"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// scanPass is one pass over the exceptions of a collection, in the order of their keys.
type scanPass struct {
	keys []bson.RawValue     // only these keys; nil: all
	skip map[string]struct{} // in a pass over all keys, the server leaves out envelopes that wait for these topics only

	view       envelope.View
	sinceFlush int    // envelopes published since the last flush
	held       int    // consecutive envelopes of the current key that could not be published
	leftTopics int    // number of topics that the server leaves out for the current key
	reached    string // the position of the watermark when it was last read
	db, coll   []byte
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
	stored
	id       bson.RawValue
	flightID string
	ref      keyRef
	atFault  bool     // malformed, or refused by Check
	topics   []string // pending, the routed topics, or allTopics if these are unknown
}

// scanCollection reads the exceptions of c that p selects, and publishes those whose turn it is. It
// blocks while too many envelopes are in flight.
func (x *Exceptions) scanCollection(ctx context.Context, c outboxes.Outbox, p scanPass) error {
	ns := c.NS()
	p.db, p.coll, p.skip = []byte(c.DB), []byte(c.Coll), map[string]struct{}{}
	coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
	scan := ExceptionScan{Coll: coll, Keys: p.keys, Slot: c.Slot}

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
			if err := x.publishInTurn(ctx, &p, ns, raw); err != nil {
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
			return errLeave
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
func (x *Exceptions) stoppedTopics() (topics []string, all bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, allStopped := x.current.stopped[allTopics]
	return slices.Sorted(maps.Keys(x.current.stopped)), allStopped || x.current.stoppedAll
}

// beginPage prepares for the next page.
func (x *Exceptions) beginPage(p *scanPass) {
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

// publishInTurn publishes the envelope raw to the topics for which it is its turn. An envelope at
// fault goes to the Finisher instead. publishInTurn blocks while too many envelopes are in flight, and
// returns an error if the outlet cannot publish at all.
func (x *Exceptions) publishInTurn(ctx context.Context, p *scanPass, ns string, raw bson.Raw) error {
	if err := x.awaitRoom(ctx, p); err != nil {
		return err
	}

	malformed, forged := x.config.Mapping.Parse(raw, &p.view), false
	if malformed == nil {
		malformed = x.config.Check(&p.view)
		forged = malformed != nil
	}

	it := x.newCandidate(p, ns, raw, malformed)
	if forged {
		// No gate counts it (N15), even if it claims another origin.
		it.origin = ""
	}
	now := x.config.Now().UnixMilli()
	if it.pos > p.reached {
		p.reached = x.config.Outlet.Reached()
	}

	topics, f := x.admitTopics(p, it, now)
	if len(topics) == 0 {
		p.held++
		return nil
	}
	p.held = 0

	d := x.newDelivery(p, it, f)
	var refused *record.Refusal
	switch {
	case malformed != nil:
		refused = asRefusal(malformed)
	case p.view.HasExpiresAt && p.view.ExpiresAt <= now:
		refused = &record.Refusal{Class: record.Expired, Reason: "its expiresAt has passed"}
	default:
		redelivered, _ := raw.Lookup("redelivered").BooleanOK()
		e := outboxes.Envelope{
			DB: p.db, Coll: p.coll, TS: p.view.TS, Raw: raw,
			Redelivered: redelivered || it.origin == outboxes.OriginReplay,
		}
		// The outlet routes an envelope whose targets are unknown. If Route named them, the fate has to
		// list the remaining topics.
		if it.pending == nil && topics[0] == allTopics {
			topics = nil
		} else if d.Pending == nil {
			d.Pending = it.topics
		}

		err := x.config.Outlet.Publish(ctx, &e, topics, func(a record.Published) {
			x.noteAnswers(f, a.Answers)
			x.config.Finisher.Answered(d, a)
		})
		if err == nil {
			p.sinceFlush++
			if p.sinceFlush >= flushEvery {
				p.sinceFlush = 0
				x.config.Outlet.Flush()
			}
			return nil
		}

		refused, err = splitRefusal(err)
		if err != nil {
			x.undoFlight(it.flightID, f)
			return err
		}
	}

	// Until its fate is written, later envelopes of the key would overtake this envelope.
	x.breakKey(f.ref.orderKey)
	x.config.Finisher.Refused(d, refused)
	return nil
}

// newDelivery returns the Delivery of it for the Finisher. Its Done ends f.
func (x *Exceptions) newDelivery(p *scanPass, it *candidate, f *flight) *Delivery {
	return &Delivery{
		NS:            it.ref.ns,
		ID:            mongodb.CloneValue(it.id),
		Number:        p.view.Delivery,
		Key:           it.ref.key,
		Pos:           it.pos,
		Origin:        it.origin,
		Pending:       it.pending,
		Attempts:      p.view.Attempts,
		CallerResumes: true,
		Done:          func(fate Fate) { x.endFlight(it.flightID, f, fate) },
	}
}

// awaitRoom blocks until fewer than maxInFlight envelopes are in flight, or returns the cause of ctx.
func (x *Exceptions) awaitRoom(ctx context.Context, p *scanPass) error {
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

// newCandidate reads the fields of raw that decide its turn. p.view holds the parsed envelope, and
// malformed the error of parsing it.
func (x *Exceptions) newCandidate(p *scanPass, ns string, raw bson.Raw, malformed error) *candidate {
	it := &candidate{stored: readStored(raw), id: raw.Lookup("_id"), atFault: malformed != nil}
	it.flightID = ns + "\x00" + mongodb.ValueKey(it.id)

	key := raw.Lookup("key")
	it.ref = keyRef{orderKey{ns, keyText(key, raw.Lookup("aggregateid"))}, key}
	if malformed == nil {
		it.ref.key = string(p.view.OrderingKey())
	}

	if it.pending != nil {
		it.topics = it.pending
		return it
	}

	it.topics = []string{allTopics}
	if malformed == nil {
		list, err := x.config.Route(&outboxes.Envelope{DB: p.db, Coll: p.coll, TS: p.view.TS, Raw: raw})
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
