package outboxes

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

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// ErrUnwatchable means that a configured name cannot be watched. Its text has the cause and the fix.
var ErrUnwatchable = errors.New("cannot be watched")

// Kind is the kind of a [Finding].
type Kind string

// The kinds of findings.
const (
	IsView       Kind = "view"
	IsTimeSeries Kind = "time series"
	IsCapped     Kind = "capped"
	IsMissing    Kind = "missing"
	IsRejected   Kind = "no rights"
)

// Finding is a reason why events of a watched name are not delivered, or may get lost.
type Finding struct {
	NS    string // the name; if no name matches, the pattern
	Kind  Kind
	Fatal bool   // nothing of a configured name can be read
	Cause string // a sentence with the name
	Fix   string
	// NothingToRead is set on a missing name if no other watched name has a collection either.
	NothingToRead bool
	Since         time.Time // when a count found it first; zero if unknown
}

// KeepSince returns the findings, each with the time since which it is among the earlier ones, or with now.
func KeepSince(findings, earlier []Finding, now time.Time) []Finding {
	for i := range findings {
		findings[i].Since = now
		if at := slices.IndexFunc(earlier, findings[i].IsSame); at >= 0 && !earlier[at].Since.IsZero() {
			findings[i].Since = earlier[at].Since
		}
	}
	return findings
}

// IsSame reports whether both are the same finding about the same name.
func (f Finding) IsSame(other Finding) bool { return f.NS == other.NS && f.Kind == other.Kind }

// Err returns an error that wraps [ErrUnwatchable].
func (f Finding) Err() error {
	return fmt.Errorf("%s %w: %s; %s", f.NS, ErrUnwatchable, f.Cause, f.Fix)
}

// collectionSpec is an entry of listCollections. If the user may list names only, it has no options.
type collectionSpec struct {
	Name    string `bson:"name"`
	Type    string `bson:"type"`
	Options struct {
		Capped bool   `bson:"capped"`
		ViewOn string `bson:"viewOn"`
	} `bson:"options"`
	Info struct {
		UUID bson.Binary `bson:"uuid"`
	} `bson:"info"`
}

// isCollection reports whether the entry has a change stream.
func (s *collectionSpec) isCollection() bool { return s.Type == "collection" || s.Type == "" }

// unfit is a name that is no regular collection.
type unfit struct {
	ns, viewOn string
	kind       Kind
}

func (s *collectionSpec) unfit(db string) (found unfit, is bool) {
	found = unfit{ns: db + "." + s.Name}
	switch {
	case s.Type == "view":
		found.kind = IsView
		if s.Options.ViewOn != "" {
			found.viewOn = db + "." + s.Options.ViewOn
		}
	case s.Type == "timeseries":
		found.kind = IsTimeSeries
	case s.Options.Capped:
		found.kind = IsCapped
	}
	return found, found.kind != ""
}

// Inspect returns the findings about the names and patterns of watch, for which the listing was made. A name that exists
// and cannot be watched is fatal only if watch contains it: a pattern passes over it. If the listing is partial, Inspect
// reports no name as missing.
func (l Listing) Inspect(watch []string) (findings []Finding) {
	for _, u := range l.unfit {
		finding := Finding{NS: u.ns, Kind: u.kind, Fatal: u.kind != IsCapped && slices.Contains(watch, u.ns)}
		switch u.kind {
		case IsView:
			finding.Cause, finding.Fix = "it is a view, and views have no change stream", "set watch to the collection of the view"
			if u.viewOn != "" {
				finding.Cause = "it is a view of " + u.viewOn + ", and views have no change stream"
				finding.Fix = "set watch to " + u.viewOn
			}
		case IsTimeSeries:
			finding.Cause, finding.Fix = "it is a time series, and a time series has no change stream", "set watch to a regular collection"
		default:
			finding.Cause = "it is capped: the server removes its oldest envelopes, also undelivered ones"
			finding.Fix = "use a regular collection"
		}
		findings = append(findings, finding)
	}
	if l.Partial {
		return findings
	}

	for _, ns := range watch {
		if l.hasMatch(ns) {
			continue
		}
		finding := Finding{
			NS: ns, Kind: IsMissing, Cause: "it does not exist yet", NothingToRead: len(l.Outboxes) == 0,
			Fix: "check the name in watch; the first appended event creates the collection",
		}
		if glob.HasWildcard(ns) {
			finding.Cause = "no collection matches it yet"
		}
		findings = append(findings, finding)
	}
	return findings
}

// hasMatch reports whether anything exists under a name or pattern.
func (l Listing) hasMatch(pattern string) bool {
	matches := func(ns string) bool {
		db, coll, _ := strings.Cut(ns, ".")
		wantDB, wantColl, _ := strings.Cut(pattern, ".")
		return glob.Match(wantDB, db) && glob.Match(wantColl, coll)
	}
	return slices.ContainsFunc(l.Outboxes, func(outbox Outbox) bool { return matches(outbox.NS()) }) ||
		slices.ContainsFunc(l.unfit, func(unfit unfit) bool { return matches(unfit.ns) })
}

// rejected returns the finding of a name or scope on which the user lacks actions.
func rejected(ns, resource, actions, effect string) Finding {
	return Finding{
		NS: ns, Kind: IsRejected, Fatal: true,
		Cause: fmt.Sprintf("the MongoDB user lacks the action %s, so the relay cannot %s", actions, effect),
		Fix:   fmt.Sprintf("grant the action %s on %s; outrelay roles prints all that the relay needs", actions, resource),
	}
}

// InspectRights reads one document of each of the names, which must have no pattern, and returns a finding for each that
// the user may not read.
func InspectRights(ctx context.Context, client *mongo.Client, names []string) (findings []Finding, err error) {
	for _, ns := range names {
		one := options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})
		err := CollectionOf(client, ns).FindOne(ctx, bson.D{}, one).Err()
		switch {
		case mongodb.HasCode(err, mongodb.CodeUnauthorized):
			findings = append(findings, rejected(ns, ns, "find", "read its envelopes"))
		case err != nil && !errors.Is(err, mongo.ErrNoDocuments):
			return findings, fmt.Errorf("inspecting %s: %w", ns, err)
		}
	}
	return findings, nil
}

// RejectedStream returns the finding for a user who may not open a change stream on a collection, on all collections of a database, or
// if both are empty on all databases.
func RejectedStream(db, coll string) Finding {
	ns, resource := "the cluster", `{db: "", collection: ""}`
	switch {
	case coll != "":
		ns = db + "." + coll
		resource = ns
	case db != "":
		ns, resource = "database "+db, fmt.Sprintf(`{db: %q, collection: ""}`, db)
	}
	return rejected(ns, resource, "find and changeStream", "open the change stream")
}
