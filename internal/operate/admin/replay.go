package admin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Replays send delivered envelopes again that are still in the outbox.
//
// A replay stores envelopes as waiting. The relay sends them, marked as redelivered and with the delivery number of
// the replay (N18). The outboxes do not change. A replay is ordered once with [Replays.Order]. [Replays.Run] may be
// interrupted and repeated any number of times, and queues each envelope once.
type Replays struct {
	op     Operator
	stored *replayStore
}

// ReplayOrder selects the envelopes of a replay. Every list that is not empty is a condition.
type ReplayOrder struct {
	// From and To bound the time of the commit: the server's timestamp, in whole seconds, To excluded. The zero time is no bound.
	// Envelopes that the watcher has not passed yet are never replayed, nor are those that wait or are dead letters.
	From           time.Time `json:"from,omitzero"`
	To             time.Time `json:"to,omitzero"`
	IDs            []string  `json:"ids,omitempty" maxItems:"1000"`
	Keys           []string  `json:"keys,omitempty" maxItems:"1000" doc:"Ordering keys."`
	Types          []string  `json:"types,omitempty" maxItems:"100"`
	AggregateTypes []string  `json:"aggregate_types,omitempty" maxItems:"100"`
	Topics         []string  `json:"topics,omitempty" maxItems:"100" doc:"Send only to these topics."`
	Collections    []string  `json:"collections,omitempty" maxItems:"100" doc:"Default: all of the watcher."`
	Rate           float64   `json:"rate,omitempty" minimum:"0" maximum:"1000000" doc:"Envelopes per second; 0 means as fast as the relay accepts them."`
	Force          bool      `json:"force,omitempty" doc:"Also send to compacted topics."`
}

// ReplayPlan is the expected result of an order.
type ReplayPlan struct {
	Watcher     string        `json:"watcher"`
	Until       time.Time     `json:"until"` // the end of the order, or the position of the watcher if that is earlier
	Found       int64         `json:"found"` // envelopes to send again
	LeftOut     int64         `json:"left_out"`
	Unstamped   int64         `json:"unstamped"` // envelopes without a ts, at any time; not sent; 100,000 at most are counted per collection
	Collections []ReplayCount `json:"collections"`
	Topics      []ReplayTopic `json:"topics"`
	query       replayQuery
}

// ReplayCount is the number of found envelopes of a collection.
type ReplayCount struct {
	Name  string `json:"name"`
	Found int64  `json:"found"`
}

// ReplayTopic is the number of records that a topic gets.
type ReplayTopic struct {
	Name      string `json:"name"`
	Found     int64  `json:"found"`
	Compacted bool   `json:"compacted"`
}

// ErrCompacted is returned for a replay to compacted topics without Force.
var ErrCompacted = errors.New("the replay sends to compacted topics")

// ErrUnboundedReplay is returned for an order that would replay everything.
var ErrUnboundedReplay = errors.New("a replay needs a start time or ids")

// checkLists rejects an empty list: a program that has found no id means no envelope, and not each of them.
func (o *ReplayOrder) checkLists() error {
	lists := []struct {
		name string
		list []string
	}{
		{"ids", o.IDs}, {"keys", o.Keys}, {"types", o.Types}, {"aggregate_types", o.AggregateTypes}, {"topics", o.Topics}, {"collections", o.Collections},
	}
	for _, one := range lists {
		if one.list != nil && len(one.list) == 0 {
			return invalidRequest("%s is an empty list: leave it out, or name at least one", one.name)
		}
	}
	return nil
}

// Plan counts the envelopes that the order matches now.
func (r Replays) Plan(ctx context.Context, order ReplayOrder) (ReplayPlan, error) {
	if err := r.checkRouting(); err != nil {
		return ReplayPlan{}, err
	}
	plan := ReplayPlan{Watcher: r.op.Watcher, Collections: []ReplayCount{}, Topics: []ReplayTopic{}}
	if err := order.checkLists(); err != nil {
		return plan, err
	}
	if order.From.IsZero() && len(order.IDs) == 0 {
		return plan, ErrUnboundedReplay
	}

	// The stream may still deliver envelopes after the position.
	until, err := r.op.lowestPosition(ctx)
	if err != nil {
		return plan, err
	}
	// An order for a later time ends at the position, and does not wait for it.
	if !order.To.IsZero() {
		if end := outboxes.LastStampBefore(order.To); until.After(end) {
			until = end
		}
	}
	plan.Until = time.Unix(int64(until.T), 0).UTC()

	namespaces, err := r.resolveCollections(ctx, order.Collections)
	if err != nil {
		return plan, err
	}
	plan.query = replayQuery{
		Collections:    namespaces,
		From:           outboxes.FirstStampAt(order.From),
		Until:          until,
		IDs:            order.IDs,
		Keys:           order.Keys,
		Types:          order.Types,
		AggregateTypes: order.AggregateTypes,
		Topics:         order.Topics,
	}
	// The rest is derived from the configuration, and is stored with the order.
	plan.query = r.completeQuery(plan.query)

	if err := r.countTargets(ctx, &plan); err != nil {
		return plan, err
	}
	if len(plan.Topics) == 0 {
		return plan, nil
	}
	return plan, r.markCompacted(ctx, &plan, order.Force)
}

// completeQuery returns a query, which may have been stored, with the parts that are not stored.
func (r Replays) completeQuery(query replayQuery) replayQuery {
	query.mapping = r.op.Mapping
	query.whole = r.op.Router != nil && r.op.Router.NeedsDocument()
	return query
}

// countTargets sets the counts of the plan.
func (r Replays) countTargets(ctx context.Context, plan *ReplayPlan) error {
	topics := map[string]int64{}
	for _, ns := range plan.query.Collections {
		coll := outboxes.CollectionOf(r.op.State.Client(), ns)
		found, err := r.countEnvelopes(ctx, coll, plan, topics)
		if err != nil {
			return err
		}

		unstamped, err := countUnstamped(ctx, coll, plan.query)
		if err != nil {
			return err
		}
		plan.Unstamped += unstamped

		plan.Found += found
		if found > 0 {
			plan.Collections = append(plan.Collections, ReplayCount{ns, found})
		}
	}

	for _, t := range slices.Sorted(maps.Keys(topics)) {
		plan.Topics = append(plan.Topics, ReplayTopic{Name: t, Found: topics[t]})
	}
	return nil
}

// countEnvelopes adds the envelopes of a collection to the counts of their topics, and to the envelopes that the plan leaves out.
// It returns the number of the others. It reads the same fields of each envelope as the replay.
func (r Replays) countEnvelopes(
	ctx context.Context, coll *mongo.Collection, plan *ReplayPlan, topics map[string]int64,
) (found int64, err error) {
	query, ns := plan.query, mongodb.Namespace(coll)
	var part []replayItem
	count := func() error {
		sent, _, err := r.delivered(ctx, ns, part)
		plan.LeftOut += int64(len(part) - len(sent))
		found += int64(len(sent))
		for _, it := range sent {
			for _, t := range it.topics {
				topics[t]++
			}
		}
		part = part[:0]
		return err
	}

	doing := "counting envelopes of " + ns
	err = mongodb.FindEach(ctx, mongodb.Majority(coll), doing, query.buildRangeFilter(bson.Timestamp{}, query.Until), func(raw bson.Raw) error {
		it, ok := r.newItem(ns, raw, query)
		if !ok {
			plan.LeftOut++
			return nil
		}
		if part = append(part, it); len(part) < mongodb.MaxDocuments {
			return nil
		}
		return count()
	}, options.Find().SetProjection(query.buildProjection()))
	if err != nil {
		return found, err
	}
	return found, count()
}

// replayItem is an envelope that a replay may send.
type replayItem struct {
	routedTopics
	id        bson.RawValue
	stamp     bson.Timestamp
	size      int   // of the document
	expiresAt int64 // Unix milliseconds; 0: never
}

// newItem returns the item of a document that was read with the fields of the query. It returns false for a malformed envelope, and
// for one of other topics.
func (r Replays) newItem(ns string, raw bson.Raw, query replayQuery) (item replayItem, ok bool) {
	var view envelope.View
	if query.mapping.Parse(raw, &view) != nil {
		return item, false
	}
	item.routedTopics = r.routeEnvelope(ns, &view, query.Topics)
	item.id, item.stamp, item.size = mongodb.CloneValue(raw.Lookup("_id")), view.TS, len(raw)
	if n, ok := raw.Lookup(sizeField).AsInt64OK(); ok {
		item.size = int(n)
	}
	if view.HasExpiresAt {
		item.expiresAt = view.ExpiresAt
	}
	return item, len(item.topics) > 0
}

// delivered returns the items without those that wait or are claimed, and without the topics for which they are dead letters: only what was
// delivered is sent again. skipped is the number of the others.
func (r Replays) delivered(ctx context.Context, ns string, list []replayItem) (out []replayItem, skipped int64, err error) {
	if len(list) == 0 {
		return nil, 0, nil
	}
	ids := make([]bson.RawValue, len(list))
	for i := range list {
		ids[i] = list[i].id
	}
	type event struct {
		id    string
		stamp bson.Timestamp
	}
	waits := map[event]bool{}
	// With `recording: mark`, a claimed envelope stays in its outbox. The claims come first, because an envelope may leave one to wait.
	err = waiting.EachClaim(ctx, r.op.State.Collection(waiting.ClaimsName), r.op.Watcher, func(claim *waiting.Claim) error {
		for i := range claim.Envelopes {
			if claimed := &claim.Envelopes[i]; claimed.NS == ns && !claim.IsDone(i) {
				waits[event{mongodb.ValueKey(claimed.Raw.Lookup("_id")), outboxes.Stamp(claimed.Raw)}] = true
			}
		}
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	err = waiting.EachStampOf(ctx, r.op.waiting(), r.op.Watcher, ns, ids, func(id bson.RawValue, stamp bson.Timestamp) {
		waits[event{mongodb.ValueKey(id), stamp}] = true
	})
	if err != nil {
		return nil, 0, err
	}
	dead := map[event][]string{}
	err = letters.Known(ctx, r.op.letters(), r.op.Watcher, ns, ids, func(mark letters.Mark) error {
		if !mark.Requeued {
			event := event{mongodb.ValueKey(mark.ID), mark.Stamp}
			dead[event] = append(dead[event], mark.Topic)
		}
		return nil
	})
	if err != nil {
		return nil, 0, err
	}

	out = make([]replayItem, 0, len(list))
	for _, it := range list {
		rejected := dead[event{mongodb.ValueKey(letters.ShortID(it.id)), it.stamp}]
		if len(rejected) > 0 {
			n := len(it.topics)
			it.topics = slices.DeleteFunc(slices.Clone(it.topics), func(topic string) bool { return slices.Contains(rejected, topic) })
			it.partial = it.partial || len(it.topics) < n
		}
		if waits[event{mongodb.ValueKey(it.id), it.stamp}] || len(it.topics) == 0 || slices.Contains(rejected, "") {
			skipped++
			continue
		}
		out = append(out, it)
	}
	return out, skipped, nil
}

// markCompacted marks the compacted topics of the plan. With force, Kafka may be unavailable.
func (r Replays) markCompacted(ctx context.Context, plan *ReplayPlan, force bool) error {
	names := make([]string, len(plan.Topics))
	for i, t := range plan.Topics {
		names[i] = t.Name
	}

	compacted, err := r.op.Compacted(ctx, names)
	if err != nil && !force {
		return fmt.Errorf("reading from Kafka which topics are compacted (--force skips this check): %w", err)
	}
	for i := range plan.Topics {
		plan.Topics[i].Compacted = slices.Contains(compacted, plan.Topics[i].Name)
	}
	return nil
}

// routedTopics are the topics of an envelope in a replay.
type routedTopics struct {
	topics  []string
	partial bool // the routing has further topics
}

// routeEnvelope returns the topics of an envelope of the collection ns, restricted to those in only unless only is
// empty. An envelope that the routing rejects has no topics.
func (r Replays) routeEnvelope(ns string, view *envelope.View, only []string) routedTopics {
	db, coll, _ := strings.Cut(ns, ".")
	targets, err := r.op.Router.Route(view, &routing.Meta{DB: []byte(db), Coll: []byte(coll)}, nil)
	if err != nil {
		return routedTopics{}
	}

	var routed routedTopics
	for _, t := range targets {
		if len(only) == 0 || slices.Contains(only, t.Topic) {
			routed.topics = append(routed.topics, t.Topic)
		}
	}
	routed.partial = len(routed.topics) < len(targets)
	return routed
}

// Order stores the order of a plan and returns its replay, which Run runs. It returns
// [ErrCompacted] if the order needs Force (N10). A replay with an id is stored, even if there is an error.
func (r Replays) Order(ctx context.Context, plan ReplayPlan, order ReplayOrder) (ReplayInfo, error) {
	var compacted []string
	// In a compacted topic, an old event would replace the newest of its key.
	for _, t := range plan.Topics {
		if t.Compacted {
			compacted = append(compacted, t.Name)
		}
	}
	if len(compacted) > 0 && !order.Force {
		return ReplayInfo{}, fmt.Errorf("%w (%s): an old event becomes the newest of its key, and compaction removes the later ones; "+
			"use --force if the readers tolerate that, or --topic to send only to other topics", ErrCompacted, strings.Join(compacted, ", "))
	}

	delivery, err := waiting.NextDelivery(ctx, r.op.State.Collection("counters"))
	if err != nil {
		return ReplayInfo{}, err
	}
	id := fmt.Sprintf("%s-%04x", time.Now().UTC().Format("20060102T150405"), rand.Uint32()&0xffff)
	doc, err := r.stored.Start(ctx, storedReplay{
		ID:       id,
		Watcher:  r.op.Watcher,
		Query:    plan.query,
		Actor:    r.op.Actor,
		Found:    plan.Found,
		Rate:     order.Rate,
		Delivery: delivery,
	})
	if err != nil {
		return ReplayInfo{}, err
	}

	// Ids and keys may be personal data, so the audit log contains only their number.
	return newReplayInfo(doc), r.op.logAction(ctx, "replay_ordered", bson.D{
		{Key: "replay", Value: id},
		{Key: "found", Value: plan.Found},
		{Key: "from", Value: order.From},
		{Key: "until", Value: plan.Until},
		{Key: "ids", Value: len(order.IDs)},
		{Key: "keys", Value: len(order.Keys)},
		{Key: "types", Value: order.Types},
		{Key: "aggregate_types", Value: order.AggregateTypes},
		{Key: "topics", Value: order.Topics},
		{Key: "collections", Value: len(plan.Collections)},
		{Key: "force", Value: order.Force},
	})
}

// ReplayInfo is the state of a replay.
type ReplayInfo struct {
	ID          string     `json:"id"`
	Watcher     string     `json:"watcher"`
	State       string     `json:"state"` // running (also if interrupted), done, cancelled
	Actor       string     `json:"actor"`
	Found       int64      `json:"found"`       // when it was ordered
	Queued      int64      `json:"queued"`      // for the relay to send
	Skipped     int64      `json:"skipped"`     // expired, malformed, or routed to none of the topics
	Outstanding int64      `json:"outstanding"` // queued and not sent yet; −1 means not counted
	From        time.Time  `json:"from,omitzero"`
	Until       time.Time  `json:"until"`
	StartedAt   time.Time  `json:"started_at"`
	UpdatedAt   time.Time  `json:"updated_at"`
	FinishedAt  *time.Time `json:"finished_at,omitempty"`
}

func newReplayInfo(replay storedReplay) ReplayInfo {
	info := ReplayInfo{
		ID:          replay.ID,
		Watcher:     replay.Watcher,
		State:       replay.State,
		Actor:       replay.Actor,
		Found:       replay.Found,
		Queued:      replay.Queued,
		Skipped:     replay.Skipped,
		Outstanding: -1,
		Until:       time.Unix(int64(replay.Query.Until.T), 0).UTC(),
		StartedAt:   replay.StartedAt,
		UpdatedAt:   replay.UpdatedAt,
		FinishedAt:  replay.FinishedAt,
	}

	if replay.Query.From.T > 0 {
		info.From = time.Unix(int64(replay.Query.From.T), 0).UTC()
	}
	return info
}

// resolveCollections returns the named collections, or all that the watcher is registered for.
func (r Replays) resolveCollections(ctx context.Context, named []string) ([]string, error) {
	all, err := r.op.collectionNames(ctx)
	if err != nil || len(named) == 0 {
		return all, err
	}

	named = slices.Compact(slices.Sorted(slices.Values(named)))
	for _, ns := range named {
		if !slices.Contains(all, ns) {
			return nil, fmt.Errorf("collection %s is not one of watcher %s's collections, which are %s",
				ns, r.op.Watcher, JoinSome(all))
		}
	}
	return named, nil
}

// JoinSome joins up to five names for a message.
func JoinSome(names []string) string {
	if len(names) == 0 {
		return "none yet"
	}
	if len(names) > 5 {
		return strings.Join(names[:5], ", ") + fmt.Sprintf(" and %d more", len(names)-5)
	}
	return strings.Join(names, ", ")
}

// lowestPosition returns the position that all slots of the watcher have passed.
func (o Operator) lowestPosition(ctx context.Context) (bson.Timestamp, error) {
	return lease.LowestPosition(ctx, o.watcherDocuments(), o.Watcher)
}
