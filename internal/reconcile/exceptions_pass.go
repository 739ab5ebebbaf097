package reconcile

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// reading is one pass over a collection in the order of its keys.
type reading struct {
	keys    []bson.RawValue // only these
	only    []string        // only for these topics
	sparing bool            // leave what waits for parked topics to the server
	skip    map[string]struct{}
	view    event.View
	since   int    // envelopes since the last flush
	held    int    // envelopes of the present key, one behind the other, that could not go
	left    int    // topics of the present key that the server leaves out
	reached string // the watermark's position as it was last asked for
	db, co  []byte
}

// turn is the key that a pass is at. It goes from its lowest position up, and what holds an envelope up holds up all that
// is behind it.
type turn struct {
	orderKey
	at      bool
	all     bool // nothing more of this key
	stopped map[string]struct{}
}

// item is an envelope that the pass is at.
type item struct {
	id      bson.RawValue
	flyID   string
	ref     keyRef
	state   string
	pos     string
	origin  string
	pending []string // nil: it does not say
	refused bool     // it is malformed, or fails Check
	topics  []string // pending, or those that it routes to, or "" for all of them
}

func (x *Exceptions) pass(ctx context.Context, c store.Outbox, p reading) error {
	ns := c.NS()
	p.db, p.co, p.skip = []byte(c.DB), []byte(c.Coll), map[string]struct{}{}
	scan := store.ExceptionScan{Coll: x.Client.Database(c.DB).Collection(c.Coll), Keys: p.keys, Only: p.only, Part: c.Part}
	x.mu.Lock()
	x.cur = turn{}
	x.mu.Unlock()
	docs, bytes, limit := 0, 0, firstReply
	if p.keys != nil {
		limit = keysAtOnce
	}
	for more := true; more; {
		if x.page(&p) {
			break
		}
		if p.sparing {
			scan.Skip = sorted(p.skip)
		}
		var err error
		more, err = scan.Page(ctx, limit, func(raw bson.Raw) error {
			docs++
			bytes += len(raw)
			if err := x.consider(ctx, &p, ns, raw); err != nil || p.held < heldAtOnce {
				return err
			}
			p.held = 0
			if topics, all := x.stoppedTopics(); all {
				scan.Leave(nil)
			} else if len(topics) > p.left {
				p.left = len(topics)
				scan.Leave(topics)
			} else {
				return nil
			}
			return store.ErrLeave
		})
		x.Outlet.Flush()
		if err != nil {
			return err
		}
		limit = max(firstReply, min(pageDocs, pageBytes*docs/max(bytes, 1)))
	}
	return nil
}

// stoppedTopics are those for which nothing more of the present key may go, or it is all of them.
func (x *Exceptions) stoppedTopics() (topics []string, all bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, every := x.cur.stopped[everything]
	return sorted(x.cur.stopped), every || x.cur.all
}

// page begins a page: what lands from here on may still be shown as it was before. It reports whether the pass is over because each
// topic that it is for takes nothing.
func (x *Exceptions) page(p *reading) (over bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	clear(x.landed)
	if p.sparing { // never fewer than before: what was left out of an earlier page comes first
		for t := range x.parked {
			p.skip[t] = struct{}{}
		}
	}
	for _, t := range p.only {
		if _, skip := p.skip[t]; !skip {
			return false
		}
	}
	return p.only != nil
}

func sorted(set map[string]struct{}) []string {
	list := make([]string, 0, len(set))
	for t := range set {
		list = append(list, t)
	}
	slices.Sort(list)
	return list
}

// consider publishes the envelope for those topics for which it is its turn.
func (x *Exceptions) consider(ctx context.Context, p *reading, ns string, raw bson.Raw) error {
	if err := x.await(ctx, p); err != nil {
		return err
	}
	malformed := event.Parse(raw, &p.view)
	if malformed == nil && x.Check != nil {
		malformed = x.Check(&p.view)
	}
	it := x.item(p, ns, raw, malformed)
	now := x.Now().UnixMilli()
	if it.pos > p.reached {
		p.reached = x.Outlet.Reached()
	}
	topics, fl := x.admit(p, it, now)
	if p.held++; len(topics) == 0 {
		return nil
	}
	p.held = 0
	d := x.delivery(p, it, fl)
	var why *record.Refusal
	switch {
	case malformed != nil:
		why = refusal(malformed)
	case p.view.HasExpiresAt && p.view.ExpiresAt <= now:
		why = &record.Refusal{Class: record.Expired, Reason: "its expiresAt has passed"}
	default:
		again, _ := raw.Lookup("redelivered").BooleanOK()
		e := Envelope{DB: p.db, Coll: p.co, TS: p.view.TS, Raw: raw, Redelivered: again || it.origin == store.OriginReplay}
		if it.pending == nil && topics[0] == everything {
			topics = nil
		} else if d.Pending == nil {
			d.Pending = it.topics
		}
		err := x.Outlet.Publish(ctx, &e, topics, func(a record.Published) {
			x.answered(fl, a.Answers)
			x.Finisher.Answered(d, a)
		})
		if err == nil {
			if p.since++; p.since >= flushEvery {
				p.since = 0
				x.Outlet.Flush()
			}
			return nil
		}
		if why, err = unusable(err); err != nil {
			x.forget(it.flyID, fl)
			return err
		}
	}
	x.breakKey(fl.ref.orderKey)
	x.Finisher.Refused(d, why)
	return nil
}

// delivery is what the Finisher gets of an envelope that the pass is at.
func (x *Exceptions) delivery(p *reading, it *item, fl *flight) *Delivery {
	return &Delivery{
		NS: it.ref.ns, ID: keep(it.id), Number: p.view.Delivery, Key: it.ref.key, State: it.state, Pos: it.pos, Origin: it.origin,
		Pending: it.pending, Attempts: p.view.Attempts, Latched: true,
		Done: func(f Fate) { x.land(it.flyID, fl, f) },
	}
}

// await waits for room among what is in flight.
func (x *Exceptions) await(ctx context.Context, p *reading) error {
	for {
		x.mu.Lock()
		full := len(x.flying) >= x.MaxFlying
		x.mu.Unlock()
		if !full {
			return nil
		}
		p.since = 0
		x.Outlet.Flush()
		select {
		case <-x.room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// item reads what its turn depends on.
func (x *Exceptions) item(p *reading, ns string, raw bson.Raw, malformed error) *item {
	it := &item{id: raw.Lookup("_id"), state: string(p.view.State), refused: malformed != nil}
	it.flyID = ns + "\x00" + idKey(it.id)
	key := raw.Lookup("key")
	it.ref = keyRef{orderKey{ns, keyText(key, raw.Lookup("aggregateid"))}, key}
	if malformed == nil {
		it.ref.key = string(p.view.OrderingKey())
	}
	it.pos, _ = raw.Lookup("pos").StringValueOK()
	it.origin, _ = raw.Lookup("origin").StringValueOK()
	if it.pending = texts(raw.Lookup("pending")); len(it.pending) == 0 {
		it.pending = nil // a list that lists nothing says nothing
	}
	it.topics = it.pending
	if it.pending == nil {
		it.topics = []string{everything}
		if x.Route != nil && malformed == nil {
			if list, err := x.Route(&Envelope{DB: p.db, Coll: p.co, TS: p.view.TS, Raw: raw}); err == nil && len(list) > 0 {
				it.topics = slices.Clone(list)
			}
		}
	}
	return it
}

// keyText is the canonical text of the ordering key.
func keyText(key, aggregateID bson.RawValue) string {
	for _, v := range []bson.RawValue{key, aggregateID} {
		switch s, isText := v.StringValueOK(); {
		case isText && s != "":
			return s
		case !isText && v.Type != 0 && v.Type != bson.TypeNull:
			return textOf(v)
		}
	}
	return ""
}

// textOf is the text of a key that is not a string, as the codec has it.
func textOf(v bson.RawValue) string {
	raw, err := bson.Marshal(bson.D{
		{Key: "_id", Value: "x"},
		{Key: "aggregatetype", Value: "x"},
		{Key: "aggregateid", Value: v},
		{Key: "type", Value: "x"},
		{Key: "payload", Value: nil},
	})
	var view event.View
	if err != nil || event.Parse(raw, &view) != nil {
		return string(v.Value)
	}
	return string(view.OrderingKey())
}

// refusal is the error of an envelope that cannot be read at all.
func refusal(malformed error) *record.Refusal {
	why, other := unusable(malformed)
	if other != nil {
		why = &record.Refusal{Class: record.Malformed, Reason: other.Error()}
	}
	return why
}
