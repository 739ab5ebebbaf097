package process_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestEveryQueryOfTheStateHasAnIndex: with notablescan, the server rejects a query with a condition that no index serves. The relay takes
// over outboxes without indexes all the same, delivers, parks and keeps its lists, and operators read and act.
func TestEveryQueryOfTheStateHasAnIndex(t *testing.T) {
	t.Parallel()
	s := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{Parameters: map[string]string{"notablescan": "1"}}})
	b := setupOn(t, s.MongoURI())
	b.logAs = &slog.HandlerOptions{Level: slog.LevelDebug}
	b.env = append(b.env, "OUTRELAY_LOG_LEVEL=debug", "OUTRELAY_SLOTS=2")

	// The relay logs at debug level what fails every few seconds.
	t.Cleanup(func() {
		b.log.mu.Lock()
		defer b.log.mu.Unlock()
		reported := map[string]bool{}
		for line := range strings.Lines(b.log.buf.String()) {
			_, text, _ := strings.Cut(line, " msg=")
			if strings.Contains(line, "NoQueryExecutionPlans") && !reported[text] {
				reported[text] = true
				t.Errorf("log: %s", text)
			}
		}
	})
	b.append(1)
	b.append(1, event.WithID("failed"))
	stop := b.startAs(func(r *process.Relay) { r.Hasten(10 * time.Second) }, "purge.interval=1s", "retention=1m")
	b.consume(2)
	b.append(1, event.WithTopic("missing-"+b.topic))
	b.append(1, event.WithPartition(1000))
	b.append(1, event.WithDueAt(time.Now().Add(time.Hour)))

	op := admin.New(admin.Operator{State: b.state, Watcher: "default", Actor: "ann"})
	var state []any
	stacktest.EventuallyIn(t, patience, "an event waits, one is dead, and one is on the agenda", func() bool {
		scheduled, err := outboxes.ListScheduled(t.Context(), b.state.Collection("schedules"), "default")
		state = []any{b.countLetters(bson.D{}), b.countWaiting(bson.D{}), scheduled, err}
		return b.countLetters(bson.D{}) == 1 && b.countWaiting(bson.D{}) == 1 && len(scheduled) == 1
	}, func() any { return state })
	stacktest.EventuallyIn(t, patience, "the history is recorded", func() bool { return b.count("history", bson.D{}) > 0 })
	stacktest.EventuallyIn(t, patience, "the figures are stored", func() bool { return b.count("figures", bson.D{}) > 0 })

	// A record that was rejected, as an operator sees it before the next attempt.
	b.enterWaiting("failed", "82", func(e *waiting.Entry) {
		e.Reason, e.Origin, e.Delivery, e.Attempts = waiting.Retry, waiting.OriginReplay, 1, 1
		e.Pending, e.NextAt = []string{b.topic}, time.Now().Add(time.Hour)
	})

	q := queries{t, b.db.Name(), b.topic}
	q.asOperator(op)
	q.asRelay(b)
	q.act(op)
	if err := stop(); err != nil {
		t.Error(err)
	}
	// A watcher with events that wait is not removed.
	if _, err := b.state.Collection("waiting").DeleteMany(t.Context(), bson.D{{Key: "watcher", Value: "default"}}); err != nil {
		t.Error(err)
	}
	runQuery(q, "removing the watcher", func() (any, error) { return op.Watchers().Remove(t.Context(), false) })
}

// queries runs queries, and reports errors, such as that of a query that no index serves.
type queries struct {
	t     *testing.T
	db    string // of the outbox
	topic string
}

// check reports an error. A query that fails for another reason than a missing index may not have reached the server.
func (q queries) check(name string, err error) {
	q.t.Helper()
	if err != nil {
		q.t.Errorf("%s: %v", name, err)
	}
}

// runQuery is check for a query with a result.
func runQuery[T any](q queries, name string, query func() (T, error)) {
	q.t.Helper()
	_, err := query()
	q.check(name, err)
}

// asOperator reads what an operator reads, with each condition of each list.
func (q queries) asOperator(op admin.Operator) {
	ctx, now, ns := q.t.Context(), time.Now(), q.db+".outbox"
	runQuery(q, "status", func() (any, error) { return admin.ReadStatus(ctx, op.State) })
	runQuery(q, "overview", func() (any, error) { return op.Overview(ctx) })
	runQuery(q, "ping", func() (any, error) { return op.Ping(ctx) })
	runQuery(q, "watchers", func() (any, error) { return op.Watchers().List(ctx) })
	runQuery(q, "collections", func() (any, error) { return op.Collections(ctx, "") })
	runQuery(q, "one collection", func() (any, error) { return op.Collections(ctx, ns) })
	for _, node := range listNodes(q, op) {
		runQuery(q, "slots of a node", func() (any, error) { return op.Nodes().FindSlots(ctx, node) })
		runQuery(q, "removal of a node", func() (any, error) { return op.Nodes().PlanRemoval(ctx, node, admin.EvenIfAlive) })
	}
	runQuery(q, "slots", func() (any, error) { return op.Lease().Slots(ctx) })
	runQuery(q, "minutes", func() (any, error) { return op.Activity().Minutes(ctx, op.Watcher, admin.AllMinutes) })
	runQuery(q, "topics", func() (any, error) { return op.Activity().Topics(ctx) })
	runQuery(q, "recent", func() (any, error) { return op.Activity().Recent(ctx, "x") })
	runQuery(q, "replays", func() (any, error) { return op.Replays().List(ctx, 10) })
	if _, err := op.Replays().Get(ctx, "x"); !errors.Is(err, mongodb.ErrNotFound) {
		q.t.Errorf("a replay: %v", err)
	}
	runQuery(q, "outstanding", func() (any, error) { return waiting.CountReplayed(ctx, op.State.Collection("waiting"), "x", 10) })
	runQuery(q, "lookup by id", func() (any, error) { return op.Lookup(ctx, admin.LookupQuery{ID: "x"}) })
	runQuery(q, "lookup by key", func() (any, error) { return op.Lookup(ctx, admin.LookupQuery{Key: "x"}) })
	runQuery(q, "delivered", func() (any, error) { return op.History(ctx, admin.HistoryQuery{}) })
	runQuery(q, "purge", func() (any, error) { return op.Purge(ctx, admin.Purge{OlderThan: time.Hour, DryRun: true}) })
	runQuery(q, "sweep", func() (any, error) { return op.Recovery().PlanSweep(ctx, now.Add(-time.Hour)) })
	runQuery(q, "adoption", func() (any, error) { return op.Recovery().PlanAdoption(ctx) })
	runQuery(q, "clear", func() (any, error) {
		return op.Clear(ctx, admin.ClearOrder{What: []string{"envelopes", "dead", "audit", "replays"}, DryRun: true, Force: true})
	})

	letters, err := op.Letters().List(ctx, admin.DeadFilter{}, 1, "")
	if err != nil || len(letters.Items) != 1 {
		q.t.Fatalf("dead letters: %+v, %v", letters, err)
	}
	dead := letters.Items[0]

	// Actions read only letters that match.
	for _, f := range []admin.DeadFilter{
		{},
		{Collection: ns},
		{IDs: []string{dead.ID}},
		{From: now.Add(-time.Hour)},
		{To: now.Add(time.Hour)},
		{Topic: dead.Topic},
		{Type: dead.Type},
		{AggregateType: dead.AggregateType},
		{Key: dead.Key},
		{Class: dead.Class},
		{Message: dead.Reason},
		{Source: "relay"},
		{RequeueStatus: "any"},
		{RequeueStatus: "false"},
	} {
		name := fmt.Sprintf("letters %+v", f)
		runQuery(q, name, func() (any, error) { return op.Letters().List(ctx, f, 10, "") })
		if n, err := op.Letters().Count(ctx, f); n != 1 || err != nil {
			q.t.Errorf("%s: %d match, %v", name, n, err)
		}
		runQuery(q, name+": summary", func() (any, error) { return op.Letters().Summary(ctx, f) })
		f.All = true
		runQuery(q, name+": discard", func() (any, error) { return op.Letters().Discard(ctx, f, admin.DryRun, func(int64) {}) })
		runQuery(q, name+": requeue", func() (any, error) {
			return op.Letters().Requeue(ctx, f, admin.DeadOptions{DryRun: true}, func(int64) {})
		})
	}

	runQuery(q, "requeued letters", func() (any, error) { return op.Letters().List(ctx, admin.DeadFilter{RequeueStatus: "true"}, 10, "") })

	for _, f := range []admin.WaitingFilter{
		{}, {Collection: ns}, {Reason: "retry"}, {Topic: q.topic}, {Key: "0"}, {IDs: []string{"failed"}}, {Failed: true},
	} {
		name := fmt.Sprintf("waiting %+v", f)
		if page, err := op.Waiting().List(ctx, f, 10, ""); page.Total == 0 || err != nil {
			q.t.Errorf("%s: %d match, %v", name, page.Total, err)
		}
		f.All = true
		runQuery(q, name+": retry", func() (any, error) { return op.Waiting().Retry(ctx, f, admin.ResetAttempts, admin.DryRun) })
	}
	runQuery(q, "waiting topics", func() (any, error) { return op.Waiting().Topics(ctx) })
	runQuery(q, "waiting summary", func() (any, error) { return op.Waiting().Summary(ctx, "") })
	runQuery(q, "waiting of a collection", func() (any, error) { return op.Waiting().Summary(ctx, ns) })
	runQuery(q, "scheduled", func() (any, error) { return op.Schedule().Summary(ctx, admin.ScheduledFilter{}) })

	for _, f := range []admin.AuditFilter{
		{}, {ID: "x"}, {Watcher: "default"}, {Node: "x"}, {Actor: "x"}, {Kinds: []string{"purged"}}, {From: now}, {To: now},
	} {
		runQuery(q, fmt.Sprintf("events %+v", f), func() (any, error) { return op.Audit(ctx, f, 10, "") })
	}
}

// asRelay runs the queries of the relay that depend on what happens to it, on the state of b.
func (q queries) asRelay(b *bundle) {
	ctx, coll := q.t.Context(), b.state.Collection
	store := waiting.NewStore(coll("waiting"), "default", slot.Range{I: 1, N: 2})
	take := func(*waiting.Document) error { return nil }
	runQuery(q, "due keys", func() (any, error) { return store.DueKeys(ctx, time.Now(), []string{"t"}, 10) })
	runQuery(q, "of an outbox", func() (any, error) { return store.OfOutbox(ctx, q.db, "outbox", "82FF", 10) })
	q.check("each", store.Each(ctx, take))
	q.check("each of topics", store.EachWithoutPayload(ctx, []string{"t"}, take))
	q.check("stamps", store.EachStamp(ctx, func(*waiting.Document) error { return nil }))
	ids := []bson.RawValue{{Type: bson.TypeString, Value: bson.Raw{2, 0, 0, 0, 'x', 0}}}
	q.check("of ids", store.OfIDs(ctx, q.db+".outbox", ids, take))
	q.check("stamps of ids", waiting.EachStampOf(ctx, coll("waiting"), "default", q.db+".outbox", ids, func(bson.RawValue, bson.Timestamp) {}))

	registry := nodes.NewNodes(coll("nodes"))
	runQuery(q, "alive", func() (any, error) { return registry.Alive(ctx, "x", time.Minute) })
	runQuery(q, "another reaches Kafka", func() (any, error) { return registry.AnotherReachesKafka(ctx, "x", time.Minute) })
	runQuery(q, "stale nodes", func() (any, error) { return registry.MarkStale(ctx, time.Hour) })
	runQuery(q, "gone nodes", func() (any, error) { return registry.Forget(ctx, time.Hour) })

	stored := divisions.New(b.state)
	runQuery(q, "division", func() (any, error) { return stored.Read(ctx, "default") })
	runQuery(q, "documents", func() (any, error) { return stored.Documents(ctx, "default") })
	runQuery(q, "ids", func() (any, error) { return stored.IDs(ctx, "default") })
	runQuery(q, "registrations", func() (any, error) { return outboxes.NewRegistry(coll("collections")).Registrations(ctx, "default") })
}

// act changes what an operator can change.
func (q queries) act(op admin.Operator) {
	ctx := q.t.Context()
	runQuery(q, "requeuing", func() (any, error) {
		return op.Letters().Requeue(ctx, admin.DeadFilter{All: true}, admin.DeadOptions{}, func(int64) {})
	})
	runQuery(q, "retrying", func() (any, error) {
		return op.Waiting().Retry(ctx, admin.WaitingFilter{All: true}, admin.ResetAttempts, admin.ForReal)
	})
	runQuery(q, "purging", func() (any, error) { return op.Purge(ctx, admin.Purge{OlderThan: time.Hour}) })
	runQuery(q, "trimming", func() (any, error) { return op.TrimAudit(ctx, 1) })
	runQuery(q, "canceling", func() (any, error) {
		return op.Schedule().Cancel(ctx, admin.ScheduledFilter{All: true}, func(int64) {})
	})
	q.check("pinning", op.Lease().Pin(ctx, ""))
	q.check("pausing", op.Lease().Pause(ctx))
	for _, node := range listNodes(q, op) {
		runQuery(q, "releasing a node", func() (any, error) { return op.Nodes().Release(ctx, node, time.Second) })
		q.check("removing a node", op.Nodes().Remove(ctx, node, admin.EvenIfAlive))
	}
	runQuery(q, "discarding", func() (any, error) {
		return op.Letters().Discard(ctx, admin.DeadFilter{All: true}, admin.ForReal, func(int64) {})
	})
	runQuery(q, "clearing", func() (any, error) {
		return op.Clear(ctx, admin.ClearOrder{What: []string{"dead", "audit", "replays"}, Confirm: admin.ClearPhrase("default"), Force: true})
	})
	runQuery(q, "releasing a collection", func() (any, error) { return op.Recovery().ReleaseCollection(ctx, q.db+".outbox") })
}

// listNodes returns the names of the nodes.
func listNodes(q queries, op admin.Operator) (names []string) {
	list, err := op.Nodes().List(q.t.Context())
	q.check("nodes", err)
	if len(list) == 0 {
		q.t.Errorf("no node is listed: %v", err)
	}
	for _, n := range list {
		names = append(names, n.Node)
	}
	return names
}
