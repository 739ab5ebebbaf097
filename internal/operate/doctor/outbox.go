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

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// The bounds of a check. A pattern may match a thousand outboxes of tenants, which are alike.
const (
	indexedMost   = 50   // outboxes whose indexes are listed
	sampledMost   = 20   // outboxes that are sampled
	sampledNewest = 1000 // envelopes of each
	sampledFields = 100  // envelopes of each whose fields are compared with the contract
	lookTimeout   = 2 * time.Second
)

type outboxFacts struct {
	list  []outboxes.Outbox
	known bool
}

// outboxChecks check the watched collections.
type outboxChecks struct{ *examination }

// checkCollections inspects the watched names. The steps of the privileges check the rights.
func (x outboxChecks) checkCollections(ctx context.Context) finding {
	found, err := connect.InspectWatched(ctx, x.cfg, x.mongo.client, connect.Depth{Patterns: true})
	if err != nil {
		return x.mongo.access.explainRejection(err)
	}
	list := found.Listing.Outboxes
	x.mongo.outboxes = outboxFacts{list, true}

	names := make([]string, len(list))
	for i, o := range list {
		names[i] = o.NS()
	}
	all := passed("%d: %s", len(names), joinFew(names, 5))
	if len(found.Findings) == 0 {
		return all
	}

	// A finding that prevents the start comes first.
	findings := slices.Clone(found.Findings)
	slices.SortStableFunc(findings, func(a, b outboxes.Finding) int {
		switch {
		case a.Fatal == b.Fatal:
			return 0
		case a.Fatal:
			return -1
		}
		return 1
	})
	var causes, fixes []string
	for _, f := range findings {
		causes = append(causes, f.NS+": "+f.Cause)
		fixes = append(fixes, f.NS+": "+f.Fix)
	}
	judge := warned
	if findings[0].Fatal {
		judge = failed
	}
	return judge(joinLines(fixes, 5), "%s", joinFew(causes, 5))
}

// checkIndexes compares the indexes of the collections with those that the configuration wants.
func (x outboxChecks) checkIndexes(ctx context.Context) finding {
	list, want := x.mongo.outboxes.list, connect.WantedIndexes(x.cfg)
	if len(want.List()) == 0 && want.SentTTL == 0 {
		return passed("the relay wants no index on the outboxes with this configuration")
	}
	var without, statements []string
	hidden := 0
	var denied error

	// Each collection costs a call, so only the first ones are examined.
	for _, o := range list[:min(len(list), indexedMost)] {
		call, cancel := context.WithTimeout(ctx, lookTimeout)
		missing, err := want.Missing(call, x.mongo.client.Database(o.DB).Collection(o.Coll))
		cancel()
		if err != nil {
			hidden, denied = hidden+1, err
			continue
		}

		for _, i := range missing {
			statements = append(statements, i.Statement(o.DB, o.Coll))
		}
		if len(missing) > 0 {
			without = append(without, o.NS())
		}
	}

	const cost = "without the index of the purge or of purge.ttl: each purge reads the whole collection"
	switch {
	// With the privilege, an owner creates missing indexes itself.
	case len(without) > 0 && x.makesIndexes(list):
		return warned(joinLines(statements, 8), "%s %s; `outrelay run` creates it", joinFew(without, 5), cost)
	case len(without) > 0:
		return warned(joinLines(statements, 8), "%s %s", joinFew(without, 5), cost)
	case hidden > 0:
		finding := x.mongo.access.explainRejection(denied)
		// The statements let an administrator create the indexes although this user cannot list them.
		for _, i := range want.List() {
			finding.fix = strings.TrimPrefix(finding.fix+"\nor create the index: "+i.Statement(list[0].DB, list[0].Coll), "\n")
		}
		return finding
	case !x.mongo.outboxes.known:
		return unchecked("", "the collections could not be listed")
	case len(list) == 0:
		return passed("no collection exists yet; its indexes are created with it")
	case len(list) > indexedMost:
		return passed("all exist in the first %d of %d collections", indexedMost, len(list))
	}
	return passed("all exist")
}

// makesIndexes reports whether the relay will create the missing indexes.
func (x outboxChecks) makesIndexes(list []outboxes.Outbox) bool {
	return x.cfg.MongoDB.Indexes && !slices.ContainsFunc(list, func(outbox outboxes.Outbox) bool {
		return len(x.mongo.access.Missing(Resource{DB: outbox.DB, Collection: outbox.Coll}, "createIndex")) > 0
	})
}

// findTopics derives the topics from the rules. If a rule depends on the envelope, it routes the newest
// envelopes.
func (x outboxChecks) findTopics(ctx context.Context) finding {
	facts := &x.topics
	var templates []string
	for _, r := range x.cfg.Topics.Rules {
		templates = append(templates, r.To...)
	}
	// Topics without a placeholder are known without an envelope.
	for _, name := range append(templates, x.cfg.Topics.Template) {
		if !strings.Contains(name, "{") {
			facts.addTopic(name)
		}
	}

	// Each sample costs a query, so only the first collections are examined.
	var rejected rejections
	var err error
	looked := 0
	list := x.mongo.outboxes.list
	for _, o := range list[:min(len(list), sampledMost)] {
		if one := x.sampleOutbox(ctx, o, &rejected); one != nil {
			err = one
			continue
		}
		looked++
	}

	switch {
	case len(rejected.lines) > 0:
		fix := "correct the service that writes the envelope, or topics in the configuration: the relay moves such envelopes to the dead letters"
		if rejected.malformed {
			fix += "; with the validator that outrelay schema validator prints, MongoDB rejects most mistakes at the insert"
		}
		return warned(fix, "%s", joinFew(rejected.lines, 3))
	case err != nil:
		return x.mongo.access.explainRejection(err)
	case len(facts.names) == 0:
		return passed("no topic is known yet: the topics depend on the envelopes, and there are none")
	}
	return passed("%s, by the rules and the newest envelopes of %d collections", joinFew(facts.names, 5), looked)
}

// rejections are the envelopes that the relay would reject.
type rejections struct {
	lines     []string
	malformed bool // a validator of the collection would reject one of them
}

// sampleOutbox routes the newest envelopes of one outbox. With a mapping, it also checks that the documents fit.
func (x outboxChecks) sampleOutbox(ctx context.Context, outbox outboxes.Outbox, rejected *rejections) error {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	coll := mongodb.Majority(x.mongo.client.Database(outbox.DB).Collection(outbox.Coll))

	// The natural order needs no index, and is nearly the order of the inserts.
	newest := options.Find().SetHint(bson.D{{Key: "$natural", Value: -1}}).SetLimit(sampledNewest)
	mapping := x.cfg.DocumentMapping()
	whole := mapping != nil || x.router.NeedsDocument()
	if !whole {
		newest.SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "aggregatetype", Value: 1}, {Key: "type", Value: 1}, {Key: "topic", Value: 1}})
	}

	return mongodb.FindEach(ctx, coll, "sampling "+outbox.NS(), bson.D{}, func(raw bson.Raw) error {
		var view envelope.View
		var err error
		if whole {
			err = mapping.Parse(raw, &view)
		} else {
			view = routingFields(raw)
			// The relay moves it to the dead letters before it looks for a topic.
			if len(view.AggregateType) == 0 {
				err = &record.Rejection{Class: record.Malformed, Reason: "field aggregatetype is missing, empty, or no text"}
			}
		}

		var targets []routing.Target
		if err == nil {
			targets, err = x.router.Route(&view, &routing.Meta{DB: []byte(outbox.DB), Coll: []byte(outbox.Coll)}, nil)
		}
		// Envelopes that a rule drops are no problem of the service.
		if rejection, ok := errors.AsType[*record.Rejection](err); ok && rejection.Class != record.Dropped {
			line := fmt.Sprintf("%s: the relay would reject an envelope: %s", outbox.NS(), rejection.Reason)
			if !slices.Contains(rejected.lines, line) && len(rejected.lines) < 10 {
				rejected.lines = append(rejected.lines, line)
			}
			// The validator describes documents without a mapping.
			rejected.malformed = rejected.malformed || mapping == nil && rejection.Class == record.Malformed
		}
		for _, target := range targets {
			x.topics.addTopic(target.Topic)
		}
		return nil
	}, newest)
}

// routingFields returns the fields of an envelope of the contract that the router uses.
func routingFields(raw bson.Raw) envelope.View {
	view := envelope.View{Partition: envelope.AnyPartition}
	text := func(field string) []byte {
		value, _ := raw.Lookup(field).StringValueOK()
		return []byte(value)
	}
	view.AggregateType, view.Type = text("aggregatetype"), text("type")
	if topic := text("topic"); len(topic) > 0 {
		view.Topic = topic
	}
	return view
}

// checkRegistrations finds collections that belong to another watcher. N25
func (x outboxChecks) checkRegistrations(ctx context.Context) finding {
	all, err := outboxes.NewRegistry(state.Open(x.mongo.client, x.cfg.State).Collection("collections")).Registrations(ctx,
		"")
	if err != nil {
		return x.mongo.access.explainRejection(err)
	}

	var others, fixes []string
	for _, c := range all {
		// Names may repeat after a rename; the UUID identifies a collection.
		mine := slices.ContainsFunc(x.mongo.outboxes.list, func(outbox outboxes.Outbox) bool {
			return outbox.Identified() && slices.Equal(outbox.UUID[:], c.UUID.Data)
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

// checkSlotFields finds envelopes without a slot. They all belong to slot 0, so they are not ordered
// with envelopes of the same key that have a slot.
func (x outboxChecks) checkSlotFields(ctx context.Context) finding {
	if x.cfg.Slots <= 1 {
		return passed("the watcher has one slot")
	}

	var without []string
	for _, o := range x.mongo.outboxes.list[:min(len(x.mongo.outboxes.list), sampledMost)] {
		call, cancel := context.WithTimeout(ctx, lookTimeout)
		outbox := x.mongo.client.Database(o.DB).Collection(o.Coll)
		// Only the newest envelopes count: older ones may be from before the service was updated.
		found, err := mongodb.AggregateAll[struct{ N int }](call, outbox, "sampling "+o.NS(), mongo.Pipeline{
			{{Key: "$sort", Value: bson.D{{Key: "ts", Value: -1}}}},
			{{Key: "$limit", Value: sampledNewest}},
			{{Key: "$match", Value: bson.D{{Key: "slot", Value: nil}}}},
			{{Key: "$count", Value: "n"}},
		})
		cancel()
		if err != nil {
			return x.mongo.access.explainRejection(err)
		}

		if len(found) > 0 {
			without = append(without, fmt.Sprintf("%d of the newest %d of %s", found[0].N, sampledNewest, o.NS()))
		}
	}

	if len(without) > 0 {
		return warned("store slot = murmur2(key) & 1023 in the envelopes, as outbox.Append does, or set slots: 1",
			"envelopes have no slot, so slot 0 delivers all of them: %s", joinFew(without, 3))
	}
	return passed("the newest envelopes have a slot")
}
