package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// The bounds of the search for outboxes that no watcher reads.
const (
	searchedDatabases   = 100
	searchedCollections = 200
)

// checkUnwatched names the collections that look like outboxes and that no watcher reads. A service whose name of the database or of the
// collection is wrong appends there without an error.
func (x outboxChecks) checkUnwatched(ctx context.Context) finding {
	search, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	candidates, limits, err := x.listCandidates(search)
	if err != nil {
		return x.mongo.access.explainRejection(err)
	}

	var found []string
	unreadable, searched := 0, 0
	for _, o := range candidates[:min(len(candidates), searchedCollections)] {
		isOutbox, err := x.looksLikeOutbox(search, o)
		if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
			unreadable++
			continue
		}
		// The checks of topics wait for this search, so the rest is left out when its time is up.
		if search.Err() != nil {
			break
		}
		if err != nil {
			return x.mongo.access.explainRejection(err)
		}

		searched++
		if isOutbox {
			found = append(found, o.NS())
		}
	}

	if rest := len(candidates) - searched - unreadable; rest > 0 {
		limits = append(limits, fmt.Sprintf("%d more collections were not searched", rest))
	}
	if unreadable > 0 {
		limits = append(limits, fmt.Sprintf("the user may not read %d collections", unreadable))
	}
	note := ""
	if len(limits) > 0 {
		note = " (" + strings.Join(limits, "; ") + ")"
	}
	if len(found) > 0 {
		return warned("correct the name in the service that appends there, or add it to watch: "+joinFew(found, namesMost)+
			"\nif another program reads the collection, nothing has to be fixed",
			"no watcher of this state database reads, although the newest document is an event: %s%s", joinFew(found, namesMost), note)
	}
	return passed("none of %d other collections looks like an outbox%s", searched, note)
}

// listCandidates returns the collections that no watcher reads, and sentences about the limits of the list. Collections with the name of a
// watched collection come first.
func (x outboxChecks) listCandidates(ctx context.Context) (candidates []outboxes.Outbox, limits []string, err error) {
	// The scope of everything leaves out the collections of outrelay and of the server.
	everything, err := changes.ParseScope([]string{"*.*"}, x.cfg.State.Pattern())
	if err != nil {
		return nil, nil, err
	}
	databases, err := outboxes.ListDatabases(ctx, x.mongo.client)
	if err != nil || len(databases) == 0 {
		return nil, nil, err
	}
	if len(x.mongo.access.Missing(Resource{Cluster: true}, "listDatabases")) > 0 {
		limits = append(limits, "the user may not list all databases, so only its own were searched; run doctor as an administrator")
	}
	if len(databases) > searchedDatabases {
		limits = append(limits, fmt.Sprintf("%d more databases were not searched", len(databases)-searchedDatabases))
		databases = databases[:searchedDatabases]
	}

	candidates, err = outboxes.ListOutboxes(ctx, x.mongo.client, everything.Matches, databases...)
	if err != nil {
		return nil, limits, err
	}
	registry, err := outboxes.NewRegistry(state.Open(x.mongo.client, x.cfg.State).Collection("collections")).Registrations(ctx, "")
	if err != nil {
		return nil, limits, err
	}
	candidates = slices.DeleteFunc(candidates, func(o outboxes.Outbox) bool {
		return x.scope.Matches([]byte(o.DB), []byte(o.Coll)) || x.belongsToWatcher(registry, o)
	})
	slices.SortStableFunc(candidates, func(a, b outboxes.Outbox) int {
		switch isA, isB := x.hasWatchedName(a), x.hasWatchedName(b); {
		case isA == isB:
			return 0
		case isA:
			return -1
		}
		return 1
	})
	return candidates, limits, nil
}

// belongsToWatcher reports whether the registry has the collection for another watcher, or as one that this watcher has read until a rename.
func (x outboxChecks) belongsToWatcher(registry []outboxes.Registration, outbox outboxes.Outbox) bool {
	return slices.ContainsFunc(registry, func(known outboxes.Registration) bool {
		same := known.NS == outbox.NS()
		if outbox.Identified() {
			same = slices.Equal(outbox.UUID[:], known.UUID.Data)
		}
		return same && (known.Watcher != x.cfg.Watcher || known.Away())
	})
}

// hasWatchedName reports whether watch has the name of the collection, in any database.
func (x outboxChecks) hasWatchedName(outbox outboxes.Outbox) bool {
	return slices.ContainsFunc(x.cfg.Watch, func(ns string) bool {
		_, coll, _ := strings.Cut(ns, ".")
		return glob.Match(coll, outbox.Coll)
	})
}

// looksLikeOutbox reports whether the newest document of the collection is an event.
func (x outboxChecks) looksLikeOutbox(ctx context.Context, outbox outboxes.Outbox) (bool, error) {
	mapping := x.cfg.DocumentMapping()
	// A mapping may fit any document, so it counts only under the name of a watched collection.
	if mapping != nil && !x.hasWatchedName(outbox) {
		mapping = nil
	}

	newest := options.FindOne().SetHint(bson.D{{Key: "$natural", Value: -1}})
	raw, err := mongodb.Majority(x.mongo.client.Database(outbox.DB).Collection(outbox.Coll)).FindOne(ctx, bson.D{}, newest).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("sampling %s: %w", outbox.NS(), err)
	}
	var view envelope.View
	return mapping.Parse(raw, &view) == nil, nil
}
