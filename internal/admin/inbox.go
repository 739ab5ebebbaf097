package admin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// InboxCounts are the sizes of one inbox.
type InboxCounts struct {
	Database   string `json:"database"`
	Collection string `json:"collection"` // of the markers
	Handled    int64  `json:"handled"`    // markers, from the collection's metadata
	Claimed    int64  `json:"claimed"`    // messages that somebody holds, or held until the lease ran out
	Expired    int64  `json:"expired"`    // of those, the ones whose lease is over
}

// Inboxes are those in the databases in which the watcher has an outbox, up to a hundred databases. It costs as much as there
// are claims, of which there are few.
func (k Desk) Inboxes(ctx context.Context) ([]InboxCounts, error) {
	out := []InboxCounts{}
	names, err := k.serviceDatabases(ctx, "")
	if err != nil {
		return out, err
	}
	for _, name := range names {
		there, err := k.services(ctx, name)
		if err != nil {
			return out, err
		}
		for _, coll := range there.inboxes {
			n, err := k.inboxCounts(ctx, name, coll)
			if err != nil {
				return out, err
			}
			out = append(out, n)
		}
	}
	return out, nil
}

func (k Desk) inboxCounts(ctx context.Context, database, collection string) (InboxCounts, error) {
	x, err := inbox.New(k.database(database), inbox.WithCollection(collection))
	if err != nil {
		return InboxCounts{}, err
	}
	n, err := x.Counts(ctx)
	return InboxCounts{Database: database, Collection: collection, Handled: n.Markers, Claimed: n.Claimed, Expired: n.Expired}, err
}

// InboxMark is how far one consumer is in one lane of a partition.
type InboxMark struct {
	Consumer   string    `json:"consumer"`
	Topic      string    `json:"topic"`
	Partition  int32     `json:"partition"`
	Lane       int32     `json:"lane"`
	Next       int64     `json:"next"` // the first offset that was not dealt with
	Generation int64     `json:"generation"`
	Current    bool      `json:"current"` // the partition's current generation, which alone counts
	At         time.Time `json:"at"`
}

// InboxMarks reads all watermarks of an inbox, by consumer, topic, partition and lane.
func (k Desk) InboxMarks(ctx context.Context, database, collection string) ([]InboxMark, error) {
	out := []InboxMark{}
	x, _, err := k.inbox(ctx, database, collection)
	if err != nil {
		return out, err
	}
	list, err := x.Watermarks(ctx, "")
	if err != nil {
		return out, err
	}
	for _, w := range list {
		out = append(out, InboxMark{
			Consumer: w.Consumer, Topic: w.Place.Topic, Partition: w.Place.Partition, Lane: w.Place.Lane, Next: w.Place.Offset,
			Generation: w.Generation, Current: w.Current, At: w.At.UTC(),
		})
	}
	slices.SortFunc(out, func(a, b InboxMark) int {
		if c := strings.Compare(a.Consumer+"\x00"+a.Topic, b.Consumer+"\x00"+b.Topic); c != 0 {
			return c
		}
		return int(a.Partition-b.Partition)*inbox.Lanes + int(a.Lane-b.Lane)
	})
	return out, nil
}

// inbox is one that is there. An empty collection is the default name.
func (k Desk) inbox(ctx context.Context, database, collection string) (*inbox.Inbox, string, error) {
	if database == "" {
		return nil, "", invalid("name the database of the inbox")
	}
	if _, err := k.serviceDatabases(ctx, database); err != nil {
		return nil, "", err
	}
	if collection == "" {
		collection = inbox.DefaultCollection
	}
	there, err := k.services(ctx, database)
	if err != nil {
		return nil, "", err
	}
	if !slices.Contains(there.inboxes, collection) {
		return nil, "", wrapped("inbox "+database+"."+collection, store.ErrNotFound)
	}
	x, err := inbox.New(k.database(database), inbox.WithCollection(collection))
	return x, collection, err
}

// InboxPurge asks for the removal of markers of handled messages before their retention is over.
type InboxPurge struct {
	Database   string
	Collection string        // "" is inbox
	OlderThan  time.Duration // handled so long ago; at least [inbox.MinRetention]
	DryRun     bool
}

// InboxPurged counts what a purge of an inbox did, or with DryRun would do.
type InboxPurged struct {
	DryRun  bool  `json:"dry_run"`
	Matched int64 `json:"matched"`
	Removed int64 `json:"removed"`
}

const inboxBatch = 5000

// InboxPurge removes markers of messages that were handled so long ago, in bounded statements. A message that comes again
// after that, and that no watermark covers, is handled again: so long must be longer than a producer may repeat itself. It
// reads the markers, for there is no index by that time.
func (k Desk) InboxPurge(ctx context.Context, p InboxPurge) (InboxPurged, error) {
	out := InboxPurged{DryRun: p.DryRun}
	if p.OlderThan < inbox.MinRetention {
		return out, invalid("markers younger than %s are needed to tell duplicates; ask for what is older", inbox.MinRetention)
	}
	_, name, err := k.inbox(ctx, p.Database, p.Collection)
	if err != nil {
		return out, err
	}
	coll := store.Majority(k.database(p.Database).Collection(name))
	now, err := store.ServerTime(ctx, k.State.Client())
	if err != nil {
		return out, err
	}
	filter := bson.D{{Key: "s", Value: "handled"}, {Key: "at", Value: bson.D{{Key: "$lt", Value: now.Add(-p.OlderThan)}}}}
	if out.Matched, err = coll.CountDocuments(ctx, filter); err != nil || p.DryRun || out.Matched == 0 {
		return out, wrapped("counting markers of "+p.Database, err)
	}
	out.Removed, err = removeAll(ctx, coll, filter)
	if out.Removed == 0 {
		return out, err
	}
	return out, k.audit(ctx, "inbox_purged", bson.D{
		{Key: "inbox", Value: p.Database + "." + name}, {Key: "removed", Value: out.Removed}, {Key: "older_than_ms", Value: p.OlderThan.Milliseconds()},
	}, err)
}

// removeAll removes what matches in bounded statements, and returns how many that were, also after an error.
func removeAll(ctx context.Context, coll *mongo.Collection, filter bson.D) (removed int64, err error) {
	doing := "removing documents of " + store.Namespace(coll)
	for {
		cur, err := coll.Find(ctx, filter, options.Find().SetLimit(inboxBatch).SetProjection(bson.D{{Key: "_id", Value: 1}}))
		if err != nil {
			return removed, wrapped(doing, err)
		}
		var docs []struct {
			ID bson.RawValue `bson:"_id"`
		}
		if err := cur.All(ctx, &docs); err != nil {
			return removed, wrapped(doing, err)
		}
		if len(docs) == 0 {
			return removed, nil
		}
		ids := make(bson.A, len(docs))
		for i, d := range docs {
			ids[i] = d.ID
		}
		// Asked once more: what changed since is not what was meant.
		res, err := coll.DeleteMany(ctx, bson.D{{Key: "$and", Value: bson.A{bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, filter}}})
		if err != nil {
			return removed, wrapped(doing, err)
		}
		removed += res.DeletedCount
		if len(docs) < inboxBatch {
			return removed, nil
		}
	}
}

// InboxReleased counts the claims that were given up.
type InboxReleased struct {
	DryRun   bool  `json:"dry_run"`
	Matched  int64 `json:"matched"`
	Live     int64 `json:"live"` // of them, held by somebody right now
	Released int64 `json:"released"`
}

// ErrLive refuses what would pull something from under a process that works.
var ErrLive = errors.New("somebody works on it")

// InboxRelease removes the leases of claimed messages, so that they can be handled again at once. Those whose lease is over
// can be taken anyway; live ones are an [ErrLive] unless force is set, which is for a process that is known to be gone: its
// fence keeps it from finishing what another has taken.
func (k Desk) InboxRelease(ctx context.Context, database, collection string, force, dryRun bool) (InboxReleased, error) {
	out := InboxReleased{DryRun: dryRun}
	x, name, err := k.inbox(ctx, database, collection)
	if err != nil {
		return out, err
	}
	n, err := x.Counts(ctx)
	if err != nil {
		return out, err
	}
	out.Matched, out.Live = n.Claimed, n.Claimed-n.Expired
	switch {
	case dryRun || out.Matched == 0:
		return out, nil
	case out.Live > 0 && !force:
		return out, wrapped("releasing claims of "+database+"."+name, ErrLive)
	}
	res, err := store.Majority(k.database(database).Collection(name+"_claims")).DeleteMany(ctx, bson.D{})
	if err != nil {
		return out, wrapped("releasing claims of "+database+"."+name, err)
	}
	out.Released = res.DeletedCount
	return out, k.audit(ctx, "inbox_released", bson.D{{Key: "inbox", Value: database + "." + name}, {Key: "released", Value: out.Released}, {Key: "force", Value: force}}, nil)
}
