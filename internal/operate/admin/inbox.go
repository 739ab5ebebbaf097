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

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/inventory"
)

// InboxCounts are the sizes of one inbox.
type InboxCounts struct {
	Database   string `json:"database"`
	Collection string `json:"collection"` // of the marks
	Handled    int64  `json:"handled"`    // marks, from the collection's metadata
	Claimed    int64  `json:"claimed"`    // messages that a consumer has claimed, also if the claim has expired
	Expired    int64  `json:"expired"`    // expired claims
}

// Inboxes are the inboxes in [Operator.ServiceDatabases].
type Inboxes struct{ op Operator }

// List returns the inboxes. Its cost grows with the number of claims, which is small.
func (i Inboxes) List(ctx context.Context) ([]InboxCounts, error) {
	inboxes := []InboxCounts{}
	databases, err := i.op.ServiceDatabases(ctx, "")
	if err != nil {
		return inboxes, err
	}

	err = i.op.forEachService(ctx, databases, func(db string, found inventory.Inventory) error {
		for _, coll := range found.Inboxes {
			counts, err := i.count(ctx, db, coll)
			if err != nil {
				return err
			}
			inboxes = append(inboxes, counts)
		}
		return nil
	})
	return inboxes, err
}

func (i Inboxes) count(ctx context.Context, database, collection string) (InboxCounts, error) {
	n, err := i.storeOf(database, collection).Counts(ctx)
	return InboxCounts{
		Database:   database,
		Collection: collection,
		Handled:    n.Markers,
		Claimed:    n.Claimed,
		Expired:    n.Expired,
	}, err
}

// InboxMark is the progress of one consumer in one lane of a partition.
type InboxMark struct {
	Consumer   string    `json:"consumer"`
	Topic      string    `json:"topic"`
	Partition  int32     `json:"partition"`
	Lane       int32     `json:"lane"`
	Next       int64     `json:"next"` // the first offset that is not handled
	Generation int64     `json:"generation"`
	Current    bool      `json:"current"` // belongs to the current generation of the partition; others have no effect
	At         time.Time `json:"at"`
}

// Marks returns all watermarks of an inbox, sorted by consumer, topic, partition and lane.
func (i Inboxes) Marks(ctx context.Context, database, collection string) ([]InboxMark, error) {
	marks := []InboxMark{}
	store, _, err := i.openInbox(ctx, database, collection)
	if err != nil {
		return marks, err
	}
	list, err := store.Watermarks(ctx)
	if err != nil {
		return marks, err
	}

	for _, w := range list {
		marks = append(marks, InboxMark{
			Consumer:   w.Lane.Consumer,
			Topic:      w.Lane.Topic,
			Partition:  w.Lane.Number,
			Lane:       w.Lane.Lane,
			Next:       w.Mark.Next,
			Generation: w.Mark.Generation,
			Current:    w.Current,
			At:         w.At.UTC(),
		})
	}
	slices.SortFunc(marks, func(a, b InboxMark) int {
		if order := strings.Compare(a.Consumer+"\x00"+a.Topic, b.Consumer+"\x00"+b.Topic); order != 0 {
			return order
		}
		// A difference of lanes is less than inbox.Lanes, so the partition decides first.
		return int(a.Partition-b.Partition)*inbox.Lanes + int(a.Lane-b.Lane)
	})
	return marks, nil
}

// openInbox returns an existing inbox and the name of its collection. An empty collection means the
// default name.
func (i Inboxes) openInbox(ctx context.Context, database, collection string) (*mongostore.Store, string, error) {
	if database == "" {
		return nil, "", invalidRequest("name the database of the inbox")
	}
	if _, err := i.op.ServiceDatabases(ctx, database); err != nil {
		return nil, "", err
	}
	if collection == "" {
		collection = inbox.DefaultCollection
	}

	found, err := i.op.findServices(ctx, database)
	if err != nil {
		return nil, "", err
	}
	if !slices.Contains(found.Inboxes, collection) {
		return nil, "", wrapError("inbox "+database+"."+collection, mongodb.ErrNotFound)
	}

	return i.storeOf(database, collection), collection, nil
}

// storeOf returns the store of an inbox, which need not exist.
func (i Inboxes) storeOf(database, collection string) *mongostore.Store {
	return mongostore.New(i.op.database(database), inbox.Settings{Collection: collection})
}

// InboxPurge requests that marks of handled messages are removed before their retention ends.
type InboxPurge struct {
	Database   string
	Collection string        // "" means inbox
	OlderThan  time.Duration // age since the message was handled; at least [inbox.MinRetention]
	DryRun     bool
}

// InboxPurged counts the effects of a purge of an inbox, or with DryRun the expected effects.
type InboxPurged struct {
	DryRun  bool  `json:"dry_run"`
	Matched int64 `json:"matched"`
	Removed int64 `json:"removed"`
}

const removeBatchSize = 5000

// Purge removes the marks of messages that were handled longer ago than OlderThan, in bounded
// statements. If such a message arrives again and no watermark covers it, it is handled again. So
// OlderThan must exceed the time within which a producer may send a message again. Purge reads
// all marks, because there is no index by that time.
func (i Inboxes) Purge(ctx context.Context, purge InboxPurge) (InboxPurged, error) {
	out := InboxPurged{DryRun: purge.DryRun}
	if purge.OlderThan < inbox.MinRetention {
		return out, invalidRequest("marks younger than %s are needed to detect duplicates; use at least that age",
			inbox.MinRetention)
	}

	_, name, err := i.openInbox(ctx, purge.Database, purge.Collection)
	if err != nil {
		return out, err
	}
	coll := mongodb.Majority(i.op.database(purge.Database).Collection(name))
	// The server wrote the times of the marks, so its clock decides their age.
	now, err := mongodb.ServerTime(ctx, i.op.State.Client())
	if err != nil {
		return out, err
	}

	filter := bson.D{
		{Key: "s", Value: "handled"},
		{Key: "at", Value: bson.D{{Key: "$lt", Value: now.Add(-purge.OlderThan)}}},
	}
	out.Matched, err = coll.CountDocuments(ctx, filter)
	if err != nil || purge.DryRun || out.Matched == 0 {
		return out, wrapError("counting marks of "+purge.Database, err)
	}

	out.Removed, err = removeAll(ctx, coll, filter)
	if out.Removed == 0 {
		return out, err
	}
	return out, i.op.logOutcome(ctx, "inbox_purged", bson.D{
		{Key: "inbox", Value: purge.Database + "." + name},
		{Key: "removed", Value: out.Removed},
		{Key: "older_than_ms", Value: purge.OlderThan.Milliseconds()},
	}, err)
}

// removeAll removes the matching documents in bounded statements. It returns their number, also
// after an error.
func removeAll(ctx context.Context, coll *mongo.Collection, filter bson.D) (removed int64, err error) {
	doing := "removing documents of " + mongodb.Namespace(coll)
	onlyIDs := options.Find().SetLimit(removeBatchSize).SetProjection(bson.D{{Key: "_id", Value: 1}})
	for {
		docs, err := mongodb.FindAll[bson.Raw](ctx, coll, doing, filter, onlyIDs)
		if err != nil || len(docs) == 0 {
			return removed, err
		}

		ids := make(bson.A, len(docs))
		for i, d := range docs {
			ids[i] = d.Lookup("_id")
		}

		// The filter is repeated because a document that has changed since may no longer match.
		res, err := coll.DeleteMany(ctx, bson.D{{Key: "$and", Value: bson.A{
			bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}},
			filter,
		}}})
		if err != nil {
			return removed, wrapError(doing, err)
		}
		removed += res.DeletedCount
		if len(docs) < removeBatchSize {
			return removed, nil
		}
	}
}

// InboxReleased counts the released claims.
type InboxReleased struct {
	DryRun   bool  `json:"dry_run"`
	Matched  int64 `json:"matched"`
	Live     int64 `json:"live"` // claims of Matched that have not expired
	Released int64 `json:"released"`
}

// ErrInUse is returned for an action on something that a process is using.
var ErrInUse = errors.New("a process is using it")

// Release removes the claims of messages, so that they can be handled again immediately.
// Expired claims do not prevent that anyway. If there are live claims, Release returns
// [ErrInUse] unless force is set. force is for a process that is known to be gone. Should it still
// run, its fence keeps it from finishing a message that another process has claimed.
func (i Inboxes) Release(
	ctx context.Context, database, collection string, force bool, effect Effect,
) (InboxReleased, error) {
	out := InboxReleased{DryRun: bool(effect)}
	store, name, err := i.openInbox(ctx, database, collection)
	if err != nil {
		return out, err
	}
	n, err := store.Counts(ctx)
	if err != nil {
		return out, err
	}

	out.Matched = n.Claimed
	out.Live = n.Claimed - n.Expired
	if effect == DryRun || out.Matched == 0 {
		return out, nil
	}
	if out.Live > 0 && !force {
		return out, wrapError("releasing claims of "+database+"."+name, ErrInUse)
	}

	// The claim's fence protects the message, so removing all claims at once does no harm.
	claims := mongodb.Majority(i.op.database(database).Collection(name + inbox.ClaimsSuffix))
	res, err := claims.DeleteMany(ctx, bson.D{})
	if err != nil {
		return out, wrapError("releasing claims of "+database+"."+name, err)
	}
	out.Released = res.DeletedCount
	return out, i.op.logOutcome(ctx, "inbox_released", bson.D{
		{Key: "inbox", Value: database + "." + name},
		{Key: "released", Value: out.Released},
		{Key: "force", Value: force},
	}, nil)
}
