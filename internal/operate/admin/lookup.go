package admin

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"
)

const defaultLookupWindow = time.Hour

// maxConcurrentLookups bounds the outboxes that are searched at the same time.
const maxConcurrentLookups = 8

// Lookup finds an event by its id, or the events of a key. An id costs one index lookup per
// outbox. Waiting envelopes and dead letters have indexes. Other envelopes of a
// key are found by reading the time index between From and To. The messages and marks of handlers cost a few index lookups for each
// database of a service.
func (o Operator) Lookup(ctx context.Context, query LookupQuery) (LookupResult, error) {
	if countSet(query.Text, query.ID, query.Key) != 1 {
		return LookupResult{Envelopes: []FoundEnvelope{}, Letters: []DeadLetter{}, Searched: []string{}}, invalidRequest("look up one text: an id or an ordering key")
	}
	if query.Text == "" {
		found, err := o.lookUp(ctx, query)
		return found.withCancellation(ctx, o, query.ID, err)
	}

	// Users paste a text without knowing whether it is an id or a key.
	byID, byKey := query, query
	byID.Text, byID.ID = "", query.Text
	byKey.Text, byKey.Key = "", query.Text
	found, err := o.lookUp(ctx, byID)
	if err != nil || len(found.Envelopes) > 0 {
		return found, err
	}
	found, err = o.lookUp(ctx, byKey)
	return found.withCancellation(ctx, o, query.Text, err)
}

// countSet returns how many texts are not empty.
func countSet(texts ...string) (n int) {
	for _, text := range texts {
		if text != "" {
			n++
		}
	}
	return n
}

// lookUp is Lookup of an id or a key.
func (o Operator) lookUp(ctx context.Context, query LookupQuery) (LookupResult, error) {
	out := LookupResult{ByKey: query.Key != "", Envelopes: []FoundEnvelope{}, Letters: []DeadLetter{}, Searched: []string{}}
	names, err := o.lookupCollections(ctx, query.Collection)
	if err != nil {
		return out, err
	}
	out.Searched, out.Outboxes = append(out.Searched, names[:min(len(names), maxSearched)]...), len(names)

	limit := pageSize(query.Limit)
	deadFilter := DeadFilter{Collection: query.Collection, IDs: optionalID(query.ID), Key: query.Key, Source: FromRelay}
	dead, moreDead, err := o.Letters().listWithArchive(ctx, deadFilter, limit)
	if err != nil {
		return out, err
	}
	out.Letters = append(out.Letters, dead...)

	filters, since, err := query.lookupFilters(o.Mapping)
	if err != nil {
		return out, err
	}
	out.Since = since

	settled := readSettled(ctx, o)
	// What waits is read before the outboxes, so an envelope that is sent in between does not look delivered before it is.
	waitingFilter := WaitingFilter{Collection: query.Collection, Key: query.Key, IDs: optionalID(query.ID)}
	waitQuery, err := o.Waiting().toQuery(ctx, waitingFilter)
	if err != nil {
		return out, err
	}
	waits, more, err := waiting.List(ctx, o.waiting(), waitQuery, heavyFields(o.Mapping, "payload"), limit, "")
	if err != nil {
		return out, err
	}

	claimed, err := o.findClaimed(ctx, waitingFilter)
	if err != nil {
		return out, err
	}

	if out.Envelopes, err = o.findInOutboxes(ctx, settled, names, filters, limit); err != nil {
		return out, err
	}
	for _, list := range [][]waiting.Document{waits, claimed} {
		for i := range list {
			out.Envelopes = addWaiting(out.Envelopes, settled.describeWaiting(o.Mapping, &list[i]))
		}
	}

	for i := range out.Letters {
		out.addUnknown(&out.Letters[i])
	}
	for i := range out.Envelopes {
		out.Envelopes[i].addLetters(out.Letters)
	}
	traces, err := readTraces(ctx, o, query, limit)
	if err != nil {
		return out, err
	}
	out.addTraces(traces)
	// Marks have no key, so they are found by the ids of all events, also of those that only the traces show.
	marks, err := findMarks(ctx, o, out.markedEvents(query, names))
	if err != nil {
		return out, err
	}
	out.addMarks(marks)
	out.settle()

	slices.SortStableFunc(out.Envelopes, func(a, b FoundEnvelope) int { return compareTimes(b.Written, a.Written) })
	slices.SortStableFunc(out.Letters, func(a, b DeadLetter) int { return b.DiedAt.Compare(a.DiedAt) })
	out.More = len(out.Envelopes) > limit || moreDead || more != "" || traces.more
	out.Envelopes = out.Envelopes[:min(len(out.Envelopes), limit)]
	out.setLimits()
	out.Pause, err = describePause(ctx, o, out.Envelopes)
	return out, err
}

// findInOutboxes returns the envelopes of the outboxes that one of the filters selects, up to one more than limit for each filter and
// outbox.
func (o Operator) findInOutboxes(
	ctx context.Context, settled settledUpTo, names []string, filters []mongo.Pipeline, limit int,
) ([]FoundEnvelope, error) {
	byOutbox := make([][]FoundEnvelope, len(names))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(maxConcurrentLookups)

	for i, ns := range names {
		group.Go(func() error {
			// The filters overlap: an id may contain the time of a stamp.
			seen := map[string]bool{}
			var stored []bson.Raw
			for _, f := range filters {
				// One envelope above the limit shows that there are more.
				docs, err := o.findEnvelopes(ctx, ns, f, limit+1)
				if err != nil {
					return err
				}
				for _, raw := range docs {
					id := mongodb.ValueKey(raw.Lookup("_id"))
					if !seen[id] {
						seen[id] = true
						stored = append(stored, raw)
					}
				}
			}

			var err error
			byOutbox[i], err = settled.describeStored(ctx, ns, stored)
			return err
		})
	}

	if err := group.Wait(); err != nil {
		return nil, err
	}
	return append([]FoundEnvelope{}, slices.Concat(byOutbox...)...), nil
}

// findClaimed returns the scheduled envelopes that the owners send at present and that match the filter.
func (o Operator) findClaimed(ctx context.Context, filter WaitingFilter) (list []waiting.Document, err error) {
	ids := map[string]bool{}
	for _, id := range filter.IDs {
		values, err := parseIDValues(id)
		if err != nil {
			return nil, err
		}
		for _, v := range values {
			ids[mongodb.ValueKey(v)] = true
		}
	}

	err = waiting.EachClaim(ctx, o.State.Collection(waiting.ClaimsName), o.Watcher, func(claim *waiting.Claim) error {
		for i := range claim.Envelopes {
			claimed := &claim.Envelopes[i]
			isOther := filter.Collection != "" && filter.Collection != claimed.NS || filter.Key != "" && filter.Key != claimed.Key ||
				filter.IDs != nil && !ids[mongodb.ValueKey(claimed.Raw.Lookup("_id"))]
			if isOther || claim.IsDone(i) {
				continue
			}
			entry := claimed.Entry(o.Watcher)
			list = append(list, entry.Document())
		}
		return nil
	})
	return list, err
}

// addWaiting adds a waiting envelope. Its first delivery replaces the document of the outbox from which it was taken.
func addWaiting(list []FoundEnvelope, envelope FoundEnvelope) []FoundEnvelope {
	i := slices.IndexFunc(list, func(foundEnvelope FoundEnvelope) bool {
		return foundEnvelope.isOf(envelope.Collection, envelope.ID, envelope.stamp) && foundEnvelope.State != stateWaiting
	})
	if i < 0 || envelope.Delivery > 0 {
		return append(list, envelope)
	}
	list[i] = envelope
	return list
}

// compareTimes compares two times. nil comes before every time.
func compareTimes(a, b *time.Time) int {
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

func optionalID(id string) []string {
	if id == "" {
		return nil
	}
	return []string{id}
}

// maxTimeless bounds the envelopes without a stamp that the lookup of a key reads in an outbox to find envelopes without a time.
const maxTimeless = 100_000

// lookupFilters returns the filters that together select everything. Each of them uses an index. For
// a key, it also returns the begin of the time window.
func (q LookupQuery) lookupFilters(mapping *envelope.Mapping) ([]mongo.Pipeline, *time.Time, error) {
	match := func(conditions ...bson.E) bson.D { return bson.D{{Key: "$match", Value: bson.D(conditions)}} }
	if q.ID != "" {
		ids, err := parseIDValues(q.ID)
		return []mongo.Pipeline{{match(bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}})}}, nil, err
	}

	since := q.From
	if since.IsZero() {
		since = time.Now().Add(-defaultLookupWindow)
	}
	if err := checkWindow(since, q.To); err != nil {
		return nil, nil, err
	}
	window := bson.D{{Key: "$gte", Value: outboxes.FirstStampAt(since)}}
	if !q.To.IsZero() {
		window = append(window, bson.E{Key: "$lte", Value: outboxes.LastStampBefore(q.To)})
	}

	// The ordering key of an envelope without a key is its aggregate id.
	hasKey := mapping.KeyFilter(parseKeyValues(q.Key))
	filters := []mongo.Pipeline{{match(envelope.Stamped(window...), hasKey)}}

	// If an envelope has no timestamp, its id may contain the time.
	for _, ids := range outboxes.IDsBetween(since, q.To) {
		filters = append(filters, mongo.Pipeline{match(ids, hasKey, bson.E{Key: "$and", Value: bson.A{bson.D{outboxes.Unstamped()}}})})
	}
	// An envelope without any time may be in the window: the purge stamps it after its delivery. Most UUIDs of other versions than 7 are
	// after the range.
	var hasTime bson.A
	for _, ids := range outboxes.IDsBetween(time.Time{}, time.Now().Add(outboxes.ClockMargin)) {
		hasTime = append(hasTime, bson.D{ids})
	}
	filters = append(filters, mongo.Pipeline{
		match(outboxes.Unstamped()), {{Key: "$limit", Value: maxTimeless}}, match(bson.E{Key: "$nor", Value: hasTime}, hasKey),
	})
	return filters, &since, nil
}

// findEnvelopes returns up to limit of the selected envelopes, newest first, without payloads.
func (o Operator) findEnvelopes(ctx context.Context, ns string, filter mongo.Pipeline, limit int) ([]bson.Raw, error) {
	newest := append(slices.Clone(filter), bson.D{{Key: "$sort", Value: bson.D{{Key: "ts", Value: -1}}}}, bson.D{{Key: "$limit", Value: limit}})
	if without := o.Mapping.Without("payload"); len(without) > 0 {
		newest = append(newest, bson.D{{Key: "$project", Value: without}})
	}
	outbox := mongodb.Majority(outboxes.CollectionOf(o.State.Client(), ns))
	return mongodb.AggregateAll[bson.Raw](ctx, outbox, "finding envelopes in "+ns, newest, options.Aggregate().SetAllowDiskUse(true))
}

// storedEnvelope is an envelope as it is stored.
type storedEnvelope struct {
	ID            bson.RawValue    `bson:"_id"`
	Type          bson.RawValue    `bson:"type"`
	AggregateType bson.RawValue    `bson:"aggregatetype"`
	AggregateID   bson.RawValue    `bson:"aggregateid"`
	Key           bson.RawValue    `bson:"key"`
	Topic         bson.RawValue    `bson:"topic"`
	TS            bson.RawValue    `bson:"ts"`
	DueAt         *time.Time       `bson:"dueAt"`
	ScheduledFor  *time.Time       `bson:"scheduledFor"`
	SentAt        *time.Time       `bson:"sentAt"`
	Sent          []outboxes.Place `bson:"sent"`
}

// describeEnvelope returns the state and the timeline of an envelope. If the envelope is malformed,
// with fields of wrong types, the result contains only the fields that can be read.
func (s settledUpTo) describeEnvelope(ns string, raw bson.Raw) FoundEnvelope {
	// A document of another writer may have any type in any field.
	var stored storedEnvelope
	if bson.Unmarshal(raw, &stored) != nil {
		stored = storedEnvelope{
			ID:            raw.Lookup("_id"),
			Type:          raw.Lookup("type"),
			AggregateType: raw.Lookup("aggregatetype"),
			AggregateID:   raw.Lookup("aggregateid"),
			Key:           raw.Lookup("key"),
			TS:            raw.Lookup("ts"),
		}
	}

	// The mark of the relay has both fields. A service may store a field sentAt too.
	if stored.Sent == nil {
		stored.SentAt = nil
	}

	cause := readCause(raw)
	foundEnvelope := FoundEnvelope{
		Collection:    ns,
		ID:            letters.IDText(stored.ID),
		Type:          truncateText(envelope.CanonicalText(stored.Type)),
		AggregateType: truncateText(envelope.CanonicalText(stored.AggregateType)),
		AggregateID:   truncateText(envelope.CanonicalText(stored.AggregateID)),
		Key:           truncateText(cmp.Or(envelope.CanonicalText(stored.Key), envelope.CanonicalText(stored.AggregateID))),
		Topic:         truncateText(envelope.CanonicalText(stored.Topic)),
		Waits:         []string{},
		Handlers:      []FoundHandler{},
		DueAt:         stored.DueAt,
		SentAt:        stored.SentAt,
		Sent:          stored.Sent,
		Timeline:      []TimelineEntry{},
	}
	foundEnvelope.setCause(truncateText(cause.CorrelationID), truncateText(cause.CausationID))
	if foundEnvelope.Sent == nil {
		foundEnvelope.Sent = []outboxes.Place{}
	}

	seconds, i, _ := stored.TS.TimestampOK()
	foundEnvelope.stamp = bson.Timestamp{T: seconds, I: i}
	if seconds > 0 {
		at := time.Unix(int64(seconds), 0).UTC()
		foundEnvelope.Written = &at
	} else if at, ok := outboxes.IDTime(byte(stored.ID.Type), stored.ID.Value); ok {
		at = at.UTC()
		foundEnvelope.Written = &at
	}
	foundEnvelope.State = s.envelopeState(&stored, foundEnvelope.stamp)
	foundEnvelope.addHistory(&stored)
	return foundEnvelope
}

// The states of a found envelope.
const (
	stateAppended  = "appended"
	stateScheduled = "scheduled"
	stateWaiting   = "waiting"
	stateDead      = "dead"
	stateDelivered = "delivered"
)

// describeWaiting returns the state and the timeline of a waiting envelope.
func (s settledUpTo) describeWaiting(mapping *envelope.Mapping, document *waiting.Document) FoundEnvelope {
	envelope := s.describeEnvelope(document.NS, mapping.ToContract(document.Envelope))
	envelope.State, envelope.Reason = stateWaiting, string(document.Reason)
	envelope.Key = truncateText(document.Key)
	envelope.Delivery = document.Delivery
	envelope.Origin = document.Origin
	envelope.ReplayOf = document.ReplayOf
	envelope.Waits = nonNil(document.Pending)
	envelope.Attempts = document.Attempts
	envelope.NextAt = document.NextTime()

	envelope.addAttempts("", document.History)
	envelope.sortTimeline()
	return envelope
}

// envelopeState returns the state of an envelope in an outbox that neither waits nor is dead.
func (s settledUpTo) envelopeState(envelope *storedEnvelope, ts bson.Timestamp) string {
	if envelope.DueAt != nil {
		return stateScheduled
	}
	if envelope.SentAt != nil {
		return stateDelivered
	}

	// A timestamp may precede its commit by the margin. Only an older envelope was certainly before
	// the position.
	margin := min(uint32(s.margin/time.Second), s.position.T)
	passed := bson.Timestamp{T: s.position.T - margin, I: s.position.I}
	if !ts.IsZero() && passed.After(ts) {
		return stateDelivered
	}
	return stateAppended
}

// formatPlace returns a place in Kafka as topic/partition@offset.
func formatPlace(place outboxes.Place) string {
	return place.Topic + "/" + formatInt(int64(place.Partition)) + "@" + formatInt(place.Offset)
}

func formatPlaces(list []outboxes.Place) string {
	parts := make([]string, len(list))
	for i, p := range list {
		parts[i] = formatPlace(p)
	}
	return strings.Join(parts, ", ")
}

// addLetters adds the dead letters of the envelope to the timeline.
func (e *FoundEnvelope) addLetters(list []DeadLetter) {
	for i := range list {
		letter := &list[i]
		if !e.isOf(letter.Collection, letter.ID, letter.origin.stamp) {
			continue
		}

		e.addAttempts("", letter.Attempts)
		e.Timeline = append(e.Timeline, TimelineEntry{
			At:   letter.DiedAt.UTC(),
			What: eventDead,
			Text: "given up by the relay: " + letter.Class + ": " + letter.Reason,
			Node: letter.Source.Node,

			Letter: letter.Letter,
		})
		// The envelope stays in the outbox, so only the letter shows that it was not delivered.
		if letter.Requeued == nil && (e.State == stateDelivered || e.State == stateAppended) {
			e.State = stateDead
		}
		if requeue := letter.Requeued; requeue != nil {
			text := "by " + requeue.Actor + " as delivery " + formatInt(int64(requeue.Delivery))
			e.Timeline = append(e.Timeline, TimelineEntry{At: requeue.At.UTC(), What: eventRequeued, Text: text, Letter: letter.Letter})
		}
		e.addDiscard(letter)
	}
	e.sortTimeline()
}

// parseKeyValues returns the BSON values as which a key with this text may be stored. text must not
// be empty.
func parseKeyValues(text string) []bson.RawValue {
	// parseIDValues fails only for the empty text.
	values, _ := parseIDValues(text)

	// MongoDB compares numbers of different types by value, so an int64 also matches an int32.
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && strconv.FormatInt(n, 10) == text {
		_, data, _ := bson.MarshalValue(n)
		values = append(values, bson.RawValue{Type: bson.TypeInt64, Value: data})
	}
	return values
}
