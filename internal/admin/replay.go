package admin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// Replayer sends delivered envelopes that are still in the outbox again. All fields are needed.
//
// A replay queues envelopes, the relay publishes them, flagged as redelivered and with their next delivery number (N18).
// It is ordered once ([Replayer.Start]) and may be run and broken off any number of times ([Replayer.Run]): each envelope
// is queued once.
type Replayer struct {
	Operator
	Router *routing.Router // of the configuration: it tells the topics
	// Compacted tells which topics keep only the newest record of a key.
	Compacted func(ctx context.Context, topics []string) ([]string, error)
}

// ReplayOrder says what is to be replayed. Every list that is not empty narrows it.
type ReplayOrder struct {
	// From and To bound the time of the delivery, or of the commit where nothing else was recorded: the server's stamp, in
	// whole seconds, To excluded. The zero time is no bound. What the watcher has not passed yet is never replayed.
	From, To       time.Time
	IDs            []string // canonical text
	Keys           []string // ordering keys, as canonical text
	Types          []string
	AggregateTypes []string
	Topics         []string // to which alone it is sent again
	Collections    []string // namespaces; none: all of the watcher's
	Rate           float64  // envelopes a second; 0: as fast as the relay takes them
	Force          bool     // also into compacted topics
}

// ReplayPlan is what an order would do.
type ReplayPlan struct {
	Watcher     string        `json:"watcher"`
	Until       time.Time     `json:"until"` // the end of the order, or where the watcher is
	Found       int64         `json:"found"` // envelopes to send again
	LeftOut     int64         `json:"left_out"`
	Collections []ReplayCount `json:"collections"`
	Topics      []ReplayTopic `json:"topics"`
	query       store.ReplayQuery
}

// ReplayCount is how many envelopes of a collection, or of a type, are found.
type ReplayCount struct {
	Name  string `json:"name"`
	Found int64  `json:"found"`
}

// ReplayTopic is how many records a topic gets.
type ReplayTopic struct {
	Name      string `json:"name"`
	Found     int64  `json:"found"`
	Compacted bool   `json:"compacted"`
}

// CompactedError refuses a replay into compacted topics without Force.
type CompactedError struct{ Topics []string }

func (e *CompactedError) Error() string {
	return fmt.Sprintf("the replay goes to compacted topics (%s): an old event becomes the newest of its key there, and compaction removes what came later; use --force if its readers can bear that, or --topic for the others alone",
		strings.Join(e.Topics, ", "))
}

// ErrNoBound refuses an order that would replay everything.
var ErrNoBound = errors.New("a replay needs a time to begin at, or ids")

// Plan counts what the order finds now.
func (r Replayer) Plan(ctx context.Context, o ReplayOrder) (ReplayPlan, error) {
	p := ReplayPlan{Watcher: r.Watcher, Collections: []ReplayCount{}, Topics: []ReplayTopic{}}
	if o.From.IsZero() && len(o.IDs) == 0 {
		return p, ErrNoBound
	}
	at, err := r.position(ctx)
	if err != nil {
		return p, err
	}
	until := at
	if !o.To.IsZero() {
		if end := lastStampBefore(o.To); until.After(end) {
			until = end
		}
	}
	p.Until = time.Unix(int64(until.T), 0).UTC()
	colls, err := r.collections(ctx, o.Collections)
	if err != nil {
		return p, err
	}
	p.query = store.ReplayQuery{
		Collections: colls, From: firstStampAt(o.From), Until: until,
		IDs: o.IDs, Keys: o.Keys, Types: o.Types, AggregateTypes: o.AggregateTypes, Topics: o.Topics,
	}
	if err := r.count(ctx, &p); err != nil {
		return p, err
	}
	if len(p.Topics) == 0 {
		return p, nil
	}
	return p, r.markCompacted(ctx, &p, o.Force)
}

// count fills the plan in. Where an envelope goes follows from three of its fields, so it is asked once for each
// combination.
func (r Replayer) count(ctx context.Context, p *ReplayPlan) error {
	topics := map[string]int64{}
	for _, ns := range p.query.Collections {
		coll, err := store.Outboxed(r.State.Client(), ns)
		if err != nil {
			return err
		}
		groups, err := store.CountReplay(ctx, coll, p.query)
		if err != nil {
			return err
		}
		var n int64
		for _, g := range groups {
			v := event.View{AggregateType: []byte(g.AggregateType), Type: []byte(g.Type), Partition: event.AnyPartition}
			if g.Topic != "" {
				v.Topic = []byte(g.Topic)
			}
			to := r.route(&v, p.query.Topics)
			if malformed := g.AggregateType == "" || g.Type == ""; malformed || len(to.topics) == 0 {
				p.LeftOut += g.N
				continue
			}
			n += g.N
			for _, t := range to.topics {
				topics[t] += g.N
			}
		}
		p.Found += n
		if n > 0 {
			p.Collections = append(p.Collections, ReplayCount{ns, n})
		}
	}
	for _, t := range slices.Sorted(maps.Keys(topics)) {
		p.Topics = append(p.Topics, ReplayTopic{Name: t, Found: topics[t]})
	}
	return nil
}

func (r Replayer) markCompacted(ctx context.Context, p *ReplayPlan, force bool) error {
	names := make([]string, len(p.Topics))
	for i, t := range p.Topics {
		names[i] = t.Name
	}
	compacted, err := r.Compacted(ctx, names)
	if err != nil && !force {
		return fmt.Errorf("asking Kafka which topics are compacted (--force goes without): %w", err)
	}
	for i := range p.Topics {
		p.Topics[i].Compacted = slices.Contains(compacted, p.Topics[i].Name)
	}
	return nil
}

// routed is where an envelope goes.
type routed struct {
	topics []string
	part   bool // fewer than the rules say
}

// route applies the rules, and keeps those of only, if there are any. An envelope that the rules refuse goes nowhere.
func (r Replayer) route(v *event.View, only []string) routed {
	targets, err := r.Router.Route(v, nil)
	if err != nil {
		return routed{}
	}
	var out routed
	for _, t := range targets {
		if len(only) == 0 || slices.Contains(only, t.Topic) {
			out.topics = append(out.topics, t.Topic)
		}
	}
	out.part = len(out.topics) < len(targets)
	return out
}

// Start writes the order down and returns its replay, which Run carries out. The error is a [*CompactedError] where Force
// would be needed (N10).
func (r Replayer) Start(ctx context.Context, o ReplayOrder) (ReplayInfo, error) {
	p, err := r.Plan(ctx, o)
	if err != nil {
		return ReplayInfo{}, err
	}
	return r.StartPlan(ctx, p, o)
}

// StartPlan is Start with a plan that was made before.
func (r Replayer) StartPlan(ctx context.Context, p ReplayPlan, o ReplayOrder) (ReplayInfo, error) {
	var compacted []string
	for _, t := range p.Topics {
		if t.Compacted {
			compacted = append(compacted, t.Name)
		}
	}
	if len(compacted) > 0 && !o.Force {
		return ReplayInfo{}, &CompactedError{compacted}
	}
	id := fmt.Sprintf("%s-%04x", time.Now().UTC().Format("20060102T150405"), rand.Uint32()&0xffff)
	replays := store.NewReplays(r.State)
	if err := replays.Start(ctx, store.Replay{ID: id, Watcher: r.Watcher, Query: p.query, Actor: r.Actor, Found: p.Found, Rate: o.Rate}); err != nil {
		return ReplayInfo{}, err
	}
	doc, err := replays.Get(ctx, id)
	if err != nil {
		return ReplayInfo{}, err
	}
	// Ids and keys are people's data: the log of events has their number only.
	return info(doc), r.note(ctx, "replay_ordered", bson.D{
		{Key: "replay", Value: id},
		{Key: "found", Value: p.Found},
		{Key: "from", Value: o.From},
		{Key: "until", Value: p.Until},
		{Key: "ids", Value: len(o.IDs)},
		{Key: "keys", Value: len(o.Keys)},
		{Key: "types", Value: o.Types},
		{Key: "aggregate_types", Value: o.AggregateTypes},
		{Key: "topics", Value: o.Topics},
		{Key: "collections", Value: len(p.Collections)},
		{Key: "force", Value: o.Force},
	})
}

// ReplayInfo is a replay as it stands.
type ReplayInfo struct {
	ID          string     `json:"id"`
	Watcher     string     `json:"watcher"`
	State       string     `json:"state"` // running (or broken off), done, cancelled
	Actor       string     `json:"actor"`
	Found       int64      `json:"found"`       // when it was ordered
	Queued      int64      `json:"queued"`      // handed to the relay
	Skipped     int64      `json:"skipped"`     // left out on the way: expired, malformed, or for no wanted topic
	Outstanding int64      `json:"outstanding"` // of the queued ones, not sent yet; −1: not asked
	From        time.Time  `json:"from,omitzero"`
	Until       time.Time  `json:"until"`
	StartedAt   time.Time  `json:"started_at"`
	UpdatedAt   time.Time  `json:"updated_at"`
	FinishedAt  *time.Time `json:"finished_at,omitempty"`
}

func info(p store.Replay) ReplayInfo {
	i := ReplayInfo{
		ID: p.ID, Watcher: p.Watcher, State: p.State, Actor: p.Actor, Found: p.Found, Queued: p.Queued, Skipped: p.Skipped, Outstanding: -1,
		Until: time.Unix(int64(p.Query.Until.T), 0).UTC(), StartedAt: p.StartedAt, UpdatedAt: p.UpdatedAt, FinishedAt: p.FinishedAt,
	}
	if p.Query.From.T > 0 {
		i.From = time.Unix(int64(p.Query.From.T), 0).UTC()
	}
	return i
}

// List returns the latest replays of the watcher.
func (r Replayer) List(ctx context.Context, n int64) ([]ReplayInfo, error) {
	docs, err := store.NewReplays(r.State).List(ctx, r.Watcher, n)
	if err != nil {
		return nil, err
	}
	out := make([]ReplayInfo, len(docs))
	for i, d := range docs {
		out[i] = info(d)
	}
	return out, nil
}

// Cancel ends a replay that is not done: what it has queued is sent, the rest is not.
func (r Replayer) Cancel(ctx context.Context, id string) error {
	if err := store.NewReplays(r.State).End(ctx, id, store.ReplayCancelled, 0); err != nil {
		return err
	}
	return r.note(ctx, "replay_cancelled", bson.D{{Key: "replay", Value: id}})
}

// collections are those named, or all that the watcher has claimed.
func (r Replayer) collections(ctx context.Context, named []string) ([]string, error) {
	claims, err := store.NewRegistry(r.State.Collection("collections")).Claims(ctx, r.Watcher)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, c := range claims {
		all = append(all, c.NS)
	}
	slices.Sort(all)
	all = slices.Compact(all) // one that was dropped and made anew is claimed twice
	if len(named) == 0 {
		return all, nil
	}
	named = slices.Compact(slices.Sorted(slices.Values(named)))
	for _, ns := range named {
		if !slices.Contains(all, ns) {
			return nil, fmt.Errorf("collection %s is not one of watcher %s; it reads %s", ns, r.Watcher, few(all))
		}
	}
	return named, nil
}

func few(names []string) string {
	if len(names) == 0 {
		return "none yet"
	}
	if len(names) > 5 {
		return strings.Join(names[:5], ", ") + fmt.Sprintf(" and %d more", len(names)-5)
	}
	return strings.Join(names, ", ")
}

// position is what all slots of the watcher have passed: what was committed before it is delivered, or an exception.
func (r Replayer) position(ctx context.Context) (bson.Timestamp, error) {
	cur, err := store.Majority(r.watchers()).Find(ctx, bson.D{{Key: "_id", Value: bson.Regex{Pattern: "^" + regexp.QuoteMeta(r.Watcher) + "/"}}},
		options.Find().SetProjection(bson.D{{Key: "token", Value: 1}, {Key: "clusterTime", Value: 1}}))
	if err != nil {
		return bson.Timestamp{}, fmt.Errorf("reading watcher %s: %w", r.Watcher, err)
	}
	var docs []lease.Document
	if err := cur.All(ctx, &docs); err != nil {
		return bson.Timestamp{}, fmt.Errorf("reading watcher %s: %w", r.Watcher, err)
	}
	if len(docs) == 0 {
		return bson.Timestamp{}, fmt.Errorf("watcher %s: %w; check the name, or start outrelay run once", r.Watcher, store.ErrNoWatcher)
	}
	lowest := bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32}
	for _, d := range docs {
		at, ok := d.Position().Time()
		if !ok || at.IsZero() {
			return bson.Timestamp{}, fmt.Errorf("slot %s of the watcher has no position yet, so nothing is known to be delivered; start outrelay run", d.ID)
		}
		if lowest.After(at) {
			lowest = at
		}
	}
	return lowest, nil
}

// firstStampAt is the first stamp of the second of at; zero for the zero time.
func firstStampAt(at time.Time) bson.Timestamp {
	if at.IsZero() {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: second(at)}
}

// lastStampBefore is the last stamp of the second before at.
func lastStampBefore(at time.Time) bson.Timestamp {
	if at.Nanosecond() > 0 {
		at = at.Add(time.Second)
	}
	t := second(at)
	if t == 0 {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: t - 1, I: math.MaxUint32}
}

func second(at time.Time) uint32 { return uint32(min(max(at.Unix(), 0), math.MaxUint32)) }
