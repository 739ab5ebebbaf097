package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/slots"
)

// The bounds of a check. A pattern may match a thousand outboxes of tenants, which are alike.
const (
	indexedMost   = 50   // outboxes whose indexes are listed
	sampledMost   = 20   // outboxes that are sampled
	sampledNewest = 1000 // envelopes of each
	lookTimeout   = 2 * time.Second
)

type outboxFacts struct {
	list  []outboxes.Outbox
	known bool
}

func (x *examination) checkCollections(ctx context.Context) finding {
	var dbs []string
	if db, _ := x.scope.Target(); db != "" {
		dbs = []string{db}
	}
	list, err := outboxes.ListOutboxes(ctx, x.mongo.client, x.scope.Matches, dbs...)
	if err != nil {
		return x.explainRefusal(err)
	}

	x.mongo.outboxes = outboxFacts{list, true}
	names := make([]string, len(list))
	for i, o := range list {
		names[i] = o.NS()
	}

	if len(names) == 0 {
		return warned("check watch in the configuration; the first event that is appended makes its collection",
			"no collection matches %s yet", x.scope)
	}
	return passed("%d: %s", len(names), joinFew(names, 5))
}

// explainRefusal returns the finding for a read that MongoDB rejected.
func (x *examination) explainRefusal(err error) finding {
	if p, ok := errors.AsType[*mongodb.PrivilegeError](err); ok {
		on := resource{cluster: p.On == "cluster"}
		if !on.cluster {
			on.db, on.coll, _ = strings.Cut(p.On, ".")
		}
		return unchecked(x.mongo.access.grant(privilege{on, strings.Split(strings.ReplaceAll(p.Action, " and ", ", "), ", ")}),
			"the action %s on %s is not allowed", p.Action, on)
	}

	if serverCode(err) == codeUnauthorized {
		return unchecked("", "it is not allowed; the privileges above say what to grant")
	}
	return unchecked("", "MongoDB answers: %v", err)
}

func (x *examination) checkIndexes(ctx context.Context) finding {
	list := x.mongo.outboxes.list
	var without, statements []string
	hidden := 0
	var denied error
	for _, o := range list[:min(len(list), indexedMost)] {
		call, cancel := context.WithTimeout(ctx, lookTimeout)
		missing, err := outboxes.MissingIndexes(call, x.mongo.client.Database(o.DB).Collection(o.Coll))
		cancel()
		if err != nil {
			hidden, denied = hidden+1, err
			continue
		}

		for _, i := range missing {
			statements = append(statements, i.Statement(o.DB, o.Coll))
		}

		if len(missing) > 0 {
			without = append(without, fmt.Sprintf("%s lacks %d of %d", o.NS(), len(missing), len(outboxes.Indexes())))
		}
	}

	switch {
	case len(without) > 0 && x.makesIndexes(list):
		return warned(joinLines(statements, 8), "%s; `outrelay run` makes them", joinFew(without, 5))
	case len(without) > 0:
		return warned(joinLines(statements, 8), "%s", joinFew(without, 5))
	case hidden > 0:
		f := x.explainRefusal(denied)
		o := list[0]
		f.fix = strings.TrimPrefix(f.fix+"\nor make sure of them: "+strings.Join(outboxes.IndexStatements(o.DB, o.Coll), "\n"),
			"\n")
		return f
	case !x.mongo.outboxes.known:
		return unchecked("", "the collections are not known")
	case len(list) == 0:
		return passed("there is no collection yet; its indexes are made with it")
	case len(list) > indexedMost:
		return passed("all %d are there, in the first %d of %d collections", len(outboxes.Indexes()), indexedMost,
			len(list))
	}

	return passed("all %d are there", len(outboxes.Indexes()))
}

// makesIndexes reports whether the relay will create the missing indexes.
func (x *examination) makesIndexes(list []outboxes.Outbox) bool {
	return x.cfg.MongoDB.Indexes && !slices.ContainsFunc(list, func(o outboxes.Outbox) bool {
		return len(x.mongo.access.missing(resource{db: o.DB, coll: o.Coll}, "createIndex")) > 0
	})
}

// findTopics derives the topics from the rules. If a rule depends on the envelope, it routes the newest
// envelopes.
func (x *examination) findTopics(ctx context.Context) finding {
	t := &x.topics
	templates := []string{x.cfg.Topics.Template}
	for _, r := range x.cfg.Topics.Rules {
		templates = append(templates, r.To...)
	}

	for _, name := range templates[1:] {
		if !strings.Contains(name, "{") {
			t.addTopic(name)
		}
	}

	if !strings.Contains(templates[0], "{") {
		t.addTopic(templates[0])
	}
	var refusals []string
	looked := 0
	list := x.mongo.outboxes.list
	var err error
	for _, o := range list[:min(len(list), sampledMost)] {
		if one := x.sampleOutbox(ctx, o, &refusals); one != nil {
			err = one
			continue
		}

		looked++
	}

	switch {
	case len(refusals) > 0:
		return warned("correct the envelope's writer, or topics in the configuration: the relay moves such "+
			"envelopes to the dead letters", "%s", joinFew(refusals, 3))
	case err != nil:
		return x.explainRefusal(err)
	case len(t.names) == 0:
		return passed("none is known yet: the topics depend on the envelopes, and there are none")
	}

	return passed("%s, by the rules and the newest envelopes of %d collections", joinFew(t.names, 5), looked)
}

// sampleOutbox routes the newest envelopes of one outbox. It reads only the fields that the router uses.
func (x *examination) sampleOutbox(ctx context.Context, o outboxes.Outbox, refusals *[]string) error {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	coll := mongodb.Majority(x.mongo.client.Database(o.DB).Collection(o.Coll))
	cur, err := coll.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "$natural", Value: -1}}).SetLimit(sampledNewest).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "aggregatetype", Value: 1}, {Key: "type", Value: 1}, {Key: "topic", Value: 1}}))
	if err != nil {
		return err
	}

	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	for cur.Next(ctx) {
		v := envelope.View{Partition: envelope.AnyPartition}
		text := func(field string) []byte {
			s, _ := cur.Current.Lookup(field).StringValueOK()
			return []byte(s)
		}
		v.AggregateType, v.Type = text("aggregatetype"), text("type")
		if topic := text("topic"); len(topic) > 0 {
			v.Topic = topic
		}
		targets, err := x.router.Route(&v, nil)
		if refusal, ok := errors.AsType[*record.Refusal](err); ok {
			if line := fmt.Sprintf("%s: an envelope would be refused: %s", o.NS(), refusal.Reason); !slices.Contains(*refusals, line) && len(*refusals) < 10 {
				*refusals = append(*refusals, line)
			}
			continue
		}

		for _, target := range targets {
			x.topics.addTopic(target.Topic)
		}
	}

	return cur.Err()
}

// checkRegistrations finds collections that belong to another watcher. N25
func (x *examination) checkRegistrations(ctx context.Context) finding {
	all, err := outboxes.NewRegistry(x.mongo.client.Database(x.cfg.MongoDB.State).Collection("collections")).Registrations(ctx,
		"")
	if err != nil {
		return x.explainRefusal(err)
	}

	var others, fixes []string
	for _, c := range all {
		mine := slices.ContainsFunc(x.mongo.outboxes.list, func(o outboxes.Outbox) bool {
			return o.Identified() && slices.Equal(o.UUID[:], c.UUID.Data)
		})
		if mine && c.Watcher != x.cfg.Watcher {
			others = append(others, fmt.Sprintf("%s belongs to watcher %q", c.NS, c.Watcher))
			fixes = append(fixes,
				"change watch in one of the two configurations, or: outrelay recover --release "+c.NS)
		}
	}

	if len(others) > 0 {
		return failed(joinLines(fixes, 3), "%s", joinFew(others, 5))
	}
	return passed("no watched collection belongs to another watcher")
}

// checkWatcher checks the watcher documents and the reports of their owners.
func (x *examination) checkWatcher(ctx context.Context) finding {
	parts := slot.Ranges(x.cfg.Slots)
	v, err := slots.NewDivisions(x.mongo.client.Database(x.cfg.MongoDB.State)).Read(ctx, x.cfg.Watcher)
	if err == nil && v.Of != len(parts) {
		return failed(fmt.Sprintf("set slots: %d, or: outrelay reslice --slots %d", v.Of, len(parts)),
			"watcher %q has %d slots, and the configuration says %d", x.cfg.Watcher, v.Of, len(parts))
	}

	if len(parts) == 1 {
		return x.checkSlot(ctx, parts[0])
	}

	all := passed("")
	for i, p := range parts {
		f := x.checkSlot(ctx, p)
		if i > 0 {
			all.detail += "; "
		}
		all.detail += p.String() + ": " + f.detail
		if f.status == Fail || all.status == OK {
			all.status = f.status
		}
		if f.fix != "" && all.fix == "" {
			all.fix = f.fix
		}
	}

	return all
}

// checkSlotFields finds envelopes without a slot. They all belong to slot 0, so they are not ordered
// with envelopes of the same key that have a slot.
func (x *examination) checkSlotFields(ctx context.Context) finding {
	if x.cfg.Slots <= 1 {
		return passed("the watcher has one slot")
	}

	var without []string
	for _, o := range x.mongo.outboxes.list[:min(len(x.mongo.outboxes.list), sampledMost)] {
		call, cancel := context.WithTimeout(ctx, lookTimeout)
		cur, err := x.mongo.client.Database(o.DB).Collection(o.Coll).Aggregate(call, mongo.Pipeline{
			{{Key: "$sort", Value: bson.D{{Key: "ts", Value: -1}}}},
			{{Key: "$limit", Value: sampledNewest}},
			{{Key: "$match", Value: bson.D{{Key: "slot", Value: nil}}}},
			{{Key: "$count", Value: "n"}},
		})
		var found []struct{ N int }
		if err == nil {
			err = cur.All(call, &found)
		}
		cancel()
		if err != nil {
			return x.explainRefusal(err)
		}

		if len(found) > 0 {
			without = append(without, fmt.Sprintf("%d of the newest %d of %s", found[0].N, sampledNewest, o.NS()))
		}
	}

	if len(without) > 0 {
		return warned("have their writers store slot = murmur2(key) & 1023 as outbox.Append does, or set slots: 1",
			"envelopes have no slot, so that slot 0 has them all: %s", joinFew(without, 3))
	}
	return passed("the newest envelopes have a slot")
}

// checkSlot checks one slot of the watcher.
func (x *examination) checkSlot(ctx context.Context, p slot.Range) finding {
	state := x.mongo.client.Database(x.cfg.MongoDB.State)
	id := p.ID(x.cfg.Watcher)
	var doc lease.Document
	err := mongodb.Majority(state.Collection("watchers")).FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&doc)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return x.checkLostWatcher(ctx, state, p)
	}

	if err != nil {
		return x.explainRefusal(err)
	}

	here, err := lease.ReplicaSetID(ctx, x.mongo.client)
	if err == nil && here != "" && doc.ReplicaSetID != "" && here != doc.ReplicaSetID {
		return failed("outrelay recover --adopt",
			"its state was copied from another replica set (written on %s, this is %s)", doc.ReplicaSetID, here)
	}

	status, err := admin.ReadStatus(ctx, state)
	if err != nil {
		return x.explainRefusal(err)
	}

	at := slices.IndexFunc(status.Watchers, func(w admin.Watcher) bool { return w.Name+"/"+w.Slot == id })
	if at < 0 {
		return passed("nobody runs it")
	}
	return judgeWatcher(status.Watchers[at], doc.Gap)
}

func judgeWatcher(w admin.Watcher, gap *lease.Gap) finding {
	who := fmt.Sprintf("%s owns it, epoch %d, lag %.1f s", w.Node, w.Epoch, w.LagS)
	switch {
	case w.State == "paused":
		return warned("outrelay resume", "an operator paused it")
	case w.State == "no-owner":
		return passed("nobody runs it; epoch %d was the last", w.Epoch)
	case w.State == "halted":
		return failed("do what the reason says", "%s, and it is halted: %s", who, w.Reason)
	case len(w.Blocked) > 0:
		b := w.Blocked[0]
		return warned("", "%s; %d topics wait, such as %s with %d envelopes: %s", who, len(w.Blocked), b.Topic,
			b.Count, b.Reason)
	case w.Reason != "":
		return warned("", "%s; it is %s: %s", who, w.State, w.Reason)
	case gap != nil:
		return warned("", "%s; it sweeps a gap in its history (%s)", who, gap.Reason)
	}

	return passed("%s", who)
}

// checkLostWatcher distinguishes a first start from a lost watcher document.
func (x *examination) checkLostWatcher(ctx context.Context, state *mongo.Database, p slot.Range) finding {
	if !p.Whole() {
		if had, err := slots.NewDivisions(state).Begun(ctx, x.cfg.Watcher, p); err == nil && had {
			return failed("outrelay recover --slot "+p.String(),
				"its document vanished, and with it the place in the stream; nothing else is lost")
		}

		return passed("it has never run")
	}

	claims, err := outboxes.NewRegistry(state.Collection("collections")).Registrations(ctx, x.cfg.Watcher)
	if err == nil && len(claims) > 0 {
		return failed("outrelay recover",
			"the document of watcher %q vanished, and with it the place in the stream; nothing else is lost",
			x.cfg.Watcher)
	}
	return passed("watcher %q has never run; it will start with %s", x.cfg.Watcher, x.cfg.Start)
}
