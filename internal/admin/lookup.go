package admin

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// LookupQuery asks for everything that is known of an event, or of the events of an ordering key.
type LookupQuery struct {
	ID         string    // canonical text; either this
	Key        string    // or this
	Collection string    // an outbox as database.collection; "" is all of the watcher's
	From, To   time.Time // for a key: written at From or later, before To; From is an hour ago if it is zero
	Limit      int       // for a key: of envelopes and of letters
}

// Found is the answer to a [LookupQuery].
type Found struct {
	Envelopes []FoundEnvelope `json:"envelopes"` // that are in an outbox, the newest first
	Letters   []DeadLetter    `json:"letters"`   // the latest first, without their envelopes
	Since     *time.Time      `json:"since,omitempty"`
	More      bool            `json:"more"` // there is more than the limit
}

// FoundEnvelope is an envelope without its payload, and what became of it.
type FoundEnvelope struct {
	Collection    string           `json:"collection"`
	ID            string           `json:"id"`
	Type          string           `json:"type"`
	AggregateType string           `json:"aggregate_type"`
	AggregateID   string           `json:"aggregate_id"`
	Key           string           `json:"key"`
	Topic         string           `json:"topic,omitempty"` // that the envelope names itself
	State         string           `json:"state"`           // sent, scheduled, claimed, retry, blocked, parked, delivered, or recent: too young to tell it from delivered
	Delivery      int32            `json:"delivery"`
	Origin        string           `json:"origin,omitempty"` // of one that waits
	ReplayOf      string           `json:"replay_of,omitempty"`
	Waits         []string         `json:"waits"` // topics that have not got it
	Attempts      int32            `json:"attempts"`
	Written       *time.Time       `json:"written,omitempty"` // by its stamp, to the second
	DueAt         *time.Time       `json:"due_at,omitempty"`
	NextAt        *time.Time       `json:"next_at,omitempty"`
	SentAt        *time.Time       `json:"sent_at,omitempty"` // where recording marks envelopes
	Sent          []store.Position `json:"sent"`              // where its records stand in Kafka
	Timeline      []Moment         `json:"timeline"`
}

// Moment is something that happened to an envelope.
type Moment struct {
	At   time.Time `json:"at"`
	What string    `json:"what"` // written, due, failed, died, requeued, sent
	Text string    `json:"text,omitempty"`
	Node string    `json:"node,omitempty"`
}

const lookupWindow = time.Hour

// Lookup finds an event by its id with an index in each collection, and the events of a key by the indexes of what waits
// and what died; what else was written for the key it looks for within the window alone, along the index by time.
func (k Desk) Lookup(ctx context.Context, q LookupQuery) (Found, error) {
	out := Found{Envelopes: []FoundEnvelope{}, Letters: []DeadLetter{}}
	if (q.ID == "") == (q.Key == "") {
		return out, invalid("either an id or a key is looked up")
	}
	names, err := k.sorted(ctx, q.Collection)
	if err != nil {
		return out, err
	}
	limit := pageSize(q.Limit)
	dead, err := k.DeadList(ctx, DeadFilter{Collection: q.Collection, IDs: idsIf(q.ID), Key: q.Key}, limit, "")
	if len(names) > 0 && err != nil {
		return out, err
	}
	out.Letters = append(out.Letters, dead.Letters...)
	filters, since, err := q.filters()
	if err != nil {
		return out, err
	}
	out.Since = since
	passed, _ := Replayer{Operator: k.Operator}.position(ctx) // none yet: then everything is recent
	at := settled{position: passed, margin: store.Margin(ctx, k.State.Client())}
	seen := map[string]bool{}
	for _, ns := range names {
		for _, f := range filters {
			docs, err := k.envelopes(ctx, ns, f, limit+1)
			if err != nil {
				return out, err
			}
			for _, raw := range docs {
				e := at.envelope(ns, raw)
				if name := ns + "\x00" + raw.Lookup("_id").String(); !seen[name] {
					seen[name] = true
					out.Envelopes = append(out.Envelopes, e)
				}
			}
		}
	}
	slices.SortStableFunc(out.Envelopes, func(a, b FoundEnvelope) int { return later(b.Written, a.Written) })
	out.More = len(out.Envelopes) > limit || dead.Next != ""
	out.Envelopes = out.Envelopes[:min(len(out.Envelopes), limit)]
	for i := range out.Envelopes {
		out.Envelopes[i].addLetters(out.Letters)
	}
	return out, nil
}

func later(a, b *time.Time) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	}
	return a.Compare(*b)
}

func idsIf(id string) []string {
	if id == "" {
		return nil
	}
	return []string{id}
}

// filters are the queries that together find everything, each by an index.
func (q LookupQuery) filters() ([]bson.D, *time.Time, error) {
	if q.ID != "" {
		ids, err := idValues(q.ID)
		return []bson.D{{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}}, nil, err
	}
	since := q.From
	if since.IsZero() {
		since = time.Now().Add(-lookupWindow)
	}
	if !q.To.IsZero() && !since.Before(q.To) {
		return nil, nil, invalid("the window from %s to %s is empty", since.Format(time.RFC3339), q.To.Format(time.RFC3339))
	}
	values := bson.D{{Key: "$in", Value: keyValues(q.Key)}}
	window := bson.D{{Key: "$gte", Value: firstStampAt(since)}}
	if !q.To.IsZero() {
		window = append(window, bson.E{Key: "$lte", Value: lastStampBefore(q.To)})
	}
	return []bson.D{
		WaitingFilter{Key: q.Key}.query(),
		{{Key: "ts", Value: window}, {Key: "$or", Value: bson.A{
			bson.D{{Key: "key", Value: values}}, bson.D{{Key: "key", Value: nil}, {Key: "aggregateid", Value: values}},
		}}},
	}, &since, nil
}

func (k Desk) envelopes(ctx context.Context, ns string, filter bson.D, limit int) ([]bson.Raw, error) {
	outbox, err := store.Outboxed(k.State.Client(), ns)
	if err != nil {
		return nil, err
	}
	cur, err := store.Majority(outbox).Find(ctx, filter, options.Find().SetLimit(int64(limit)).SetSort(bson.D{{Key: "ts", Value: -1}}).SetAllowDiskUse(true).
		SetProjection(bson.D{{Key: "payload", Value: 0}, {Key: "headers", Value: 0}}))
	if err != nil {
		return nil, wrapped("looking for envelopes in "+ns, err)
	}
	var docs []bson.Raw
	return docs, wrapped("looking for envelopes in "+ns, cur.All(ctx, &docs))
}

// settled is what the watcher has passed.
type settled struct {
	position bson.Timestamp
	margin   time.Duration
}

// lookedUp is an envelope as it is read.
type lookedUp struct {
	ID            bson.RawValue    `bson:"_id"`
	Type          bson.RawValue    `bson:"type"`
	AggregateType bson.RawValue    `bson:"aggregatetype"`
	AggregateID   bson.RawValue    `bson:"aggregateid"`
	Key           bson.RawValue    `bson:"key"`
	Topic         bson.RawValue    `bson:"topic"`
	TS            bson.RawValue    `bson:"ts"`
	State         string           `bson:"state"`
	Delivery      int32            `bson:"delivery"`
	Origin        string           `bson:"origin"`
	ReplayOf      string           `bson:"replayOf"`
	Pending       []string         `bson:"pending"`
	Attempts      int32            `bson:"attempts"`
	DueAt         *time.Time       `bson:"dueAt"`
	ScheduledFor  *time.Time       `bson:"scheduledFor"`
	NextAt        *time.Time       `bson:"nextAt"`
	SentAt        *time.Time       `bson:"sentAt"`
	Sent          []store.Position `bson:"sent"`
	Claim         bson.RawValue    `bson:"claim"`
	History       []struct {
		At     time.Time `bson:"at"`
		Topic  string    `bson:"topic"`
		Class  string    `bson:"class"`
		Reason string    `bson:"reason"`
		Node   string    `bson:"node"`
	} `bson:"history"`
}

// envelope tells of an envelope. One that is malformed, with fields of other types, is told of as far as it can be read.
func (s settled) envelope(ns string, raw bson.Raw) FoundEnvelope {
	var d lookedUp
	if bson.Unmarshal(raw, &d) != nil {
		d = lookedUp{ID: raw.Lookup("_id"), Type: raw.Lookup("type"), AggregateType: raw.Lookup("aggregatetype"), AggregateID: raw.Lookup("aggregateid"), Key: raw.Lookup("key"), TS: raw.Lookup("ts")}
	}
	e := FoundEnvelope{
		Collection: ns, ID: canonical(d.ID), Type: clip(canonical(d.Type)), AggregateType: clip(canonical(d.AggregateType)), AggregateID: clip(canonical(d.AggregateID)),
		Key: clip(cmp.Or(canonical(d.Key), canonical(d.AggregateID))), Topic: clip(canonical(d.Topic)), State: d.State, Delivery: d.Delivery, Origin: d.Origin, ReplayOf: d.ReplayOf,
		Waits: d.Pending, Attempts: d.Attempts, DueAt: d.DueAt, NextAt: d.NextAt, SentAt: d.SentAt, Sent: d.Sent, Timeline: []Moment{},
	}
	if e.Waits == nil {
		e.Waits = []string{}
	}
	if e.Sent == nil {
		e.Sent = []store.Position{}
	}
	t, i, _ := d.TS.TimestampOK()
	ts := bson.Timestamp{T: t, I: i}
	if t > 0 {
		at := time.Unix(int64(t), 0).UTC()
		e.Written = &at
		e.Timeline = append(e.Timeline, Moment{At: at, What: "written"})
	}
	for _, h := range d.History {
		e.Timeline = append(e.Timeline, Moment{At: h.At.UTC(), What: "failed", Text: strings.TrimPrefix(h.Topic+": "+h.Class+": "+h.Reason, ": "), Node: h.Node})
	}
	if due := cmp.Or(d.ScheduledFor, d.DueAt); due != nil {
		e.Timeline = append(e.Timeline, Moment{At: due.UTC(), What: "due"})
	}
	if d.SentAt != nil {
		e.Timeline = append(e.Timeline, Moment{At: d.SentAt.UTC(), What: "sent", Text: positions(e.Sent)})
	}
	if e.State == "" {
		e.State = s.state(&d, ts)
	}
	e.order()
	return e
}

func (s settled) state(d *lookedUp, ts bson.Timestamp) string {
	switch old := (bson.Timestamp{T: s.position.T - min(uint32(s.margin/time.Second), s.position.T), I: s.position.I}); {
	case d.DueAt != nil && d.Claim.Type != 0:
		return "claimed"
	case d.DueAt != nil:
		return "scheduled"
	case d.SentAt != nil:
		return "sent"
	case !ts.IsZero() && old.After(ts):
		return "delivered"
	}
	return "recent"
}

func positions(list []store.Position) string {
	parts := make([]string, len(list))
	for i, p := range list {
		parts[i] = p.Topic + "/" + itoa(int64(p.Partition)) + "@" + itoa(p.Offset)
	}
	return strings.Join(parts, ", ")
}

// addLetters adds what the envelope's dead letters tell.
func (e *FoundEnvelope) addLetters(list []DeadLetter) {
	for i := range list {
		d := &list[i]
		if d.Collection != e.Collection || d.ID != e.ID {
			continue
		}
		e.Timeline = append(e.Timeline, Moment{At: d.DiedAt.UTC(), What: "died", Text: d.Class + ": " + d.Reason, Node: d.Source.Node})
		if r := d.Replayed; r != nil {
			e.Timeline = append(e.Timeline, Moment{At: r.At.UTC(), What: "requeued", Text: "by " + r.Actor + " as delivery " + itoa(int64(r.Delivery))})
		}
	}
	e.order()
}

func (e *FoundEnvelope) order() {
	slices.SortStableFunc(e.Timeline, func(a, b Moment) int { return a.At.Compare(b.At) })
}
