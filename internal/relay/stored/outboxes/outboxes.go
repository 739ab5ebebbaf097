package outboxes

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// Envelope is an undelivered document of an outbox, as it was inserted or last updated. Its slices are
// valid only during the call that it is passed to.
type Envelope struct {
	DB, Coll []byte
	TS       bson.Timestamp // the stamp of the server; zero if there is none
	Raw      bson.Raw
	// Delivery is 0 for the first delivery, and greater for a requeue or replay (N18).
	Delivery    int32
	Redelivered bool // sent again on purpose; its records get the header outrelay-redelivered
	// Pos is its position if it is sent out of the store instead of the stream; its records get the header outrelay-position.
	Pos string
	// Pending has the topics that it waits for. nil: all to which it is routed.
	Pending []string
	// StreamMS is the time of the records with which it may have been sent out of the stream before it was stored. 0: it was not.
	StreamMS int64
	// Unordered means that it has no place in the order of its key, as a scheduled envelope.
	Unordered bool
}

// NewEnvelope returns the first delivery of the envelope raw of the outbox ns, such as "shop.outbox".
func NewEnvelope(ns string, raw bson.Raw) Envelope {
	db, coll, _ := strings.Cut(ns, ".")
	return Envelope{DB: []byte(db), Coll: []byte(coll), Raw: raw}
}

// Outbox is a collection that a watcher reads.
type Outbox struct {
	DB, Coll string
	// UUID identifies the collection. If a collection is dropped and created again, it gets another UUID. If
	// the user lacks listCollections and sees only names, the UUID is zero.
	UUID [16]byte
	// Slot is the range of the envelopes that the watcher's slot reads. The zero value is all of them (N28).
	Slot slot.Range
}

// NS returns the full name of the collection.
func (o Outbox) NS() string { return o.DB + "." + o.Coll }

// Identified reports whether the UUID is known.
func (o Outbox) Identified() bool { return o.UUID != [16]byte{} }

// maxListings bounds the number of databases that are listed at the same time.
const maxListings = 4

// ListOutboxes returns the existing collections that match, sorted by name: those of the named databases, or of all
// that the user may see. It queries several databases at the same time.
func ListOutboxes(
	ctx context.Context, client *mongo.Client, match func(db, coll []byte) bool, databases ...string,
) ([]Outbox, error) {
	listing, err := List(ctx, client, match, databases...)
	return listing.Outboxes, err
}

// Listing is what exists under watched names.
type Listing struct {
	Outboxes []Outbox // sorted by name
	Partial  bool     // it may lack names that exist; the caller sets it
	unfit    []unfit  // sorted by name; the capped ones are outboxes, too
}

// List is ListOutboxes that also returns what the matching names are instead of regular collections.
func List(ctx context.Context, client *mongo.Client, match func(db, coll []byte) bool, databases ...string) (Listing, error) {
	return ListEach(ctx, client, match, func(ctx context.Context, call func(context.Context) error) error { return call(ctx) },
		databases...)
}

// ListEach is List that passes each of its calls to run, such as to repeat it. A call that is repeated does not
// repeat the others, so the time for a list is not bounded by the time for one call. run is called concurrently.
func ListEach(
	ctx context.Context, client *mongo.Client, match func(db, coll []byte) bool,
	run func(ctx context.Context, call func(context.Context) error) error, databases ...string,
) (Listing, error) {
	if len(databases) == 0 {
		err := run(ctx, func(ctx context.Context) (err error) {
			databases, err = ListDatabases(ctx, client)
			return err
		})
		if err != nil {
			return Listing{}, err
		}
	}

	// Each goroutine writes to an element of its database only, so found needs no lock.
	found := make([]Listing, len(databases))
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(maxListings)
	for i, db := range databases {
		group.Go(func() error {
			return run(gctx, func(ctx context.Context) (err error) {
				found[i], err = listDatabase(ctx, mongodb.Database(client, db), match)
				return err
			})
		})
	}
	if err := group.Wait(); err != nil {
		return Listing{}, err
	}

	var all Listing
	for _, one := range found {
		all.Outboxes = append(all.Outboxes, one.Outboxes...)
		all.unfit = append(all.unfit, one.unfit...)
	}
	slices.SortFunc(all.Outboxes, func(a, b Outbox) int { return strings.Compare(a.NS(), b.NS()) })
	slices.SortFunc(all.unfit, func(a, b unfit) int { return strings.Compare(a.ns, b.ns) })
	return all, nil
}

// ListDatabases returns the databases that the user may see, without those of the server.
func ListDatabases(ctx context.Context, client *mongo.Client) ([]string, error) {
	notSystem := bson.D{{Key: "name", Value: bson.D{{Key: "$nin", Value: bson.A{"admin", "local", "config"}}}}}
	databases, err := client.ListDatabaseNames(ctx, notSystem, options.ListDatabases().SetAuthorizedDatabases(true))
	return databases, mongodb.DescribeErrorWithFix(err, "listing databases", "listDatabases", "cluster", "name the collections one by one")
}

// listDatabase returns what exists in db under matching names, in no order.
func listDatabase(ctx context.Context, db *mongo.Database, match func(db, coll []byte) bool) (Listing, error) {
	cur, err := db.ListCollections(ctx, bson.D{})
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		// Without listCollections, the user may still list the names of collections that it can use.
		namesOnly := options.ListCollections().SetNameOnly(true).SetAuthorizedCollections(true)
		cur, err = db.ListCollections(ctx, bson.D{}, namesOnly)
	}
	if err != nil {
		return Listing{}, mongodb.DescribeError(err, "listing collections of "+db.Name(), "listCollections", db.Name())
	}

	var specs []collectionSpec
	if err := cur.All(ctx, &specs); err != nil {
		return Listing{}, fmt.Errorf("listing collections of %s: %w", db.Name(), err)
	}

	var listing Listing
	for _, s := range specs {
		if strings.HasPrefix(s.Name, "system.") || !match([]byte(db.Name()), []byte(s.Name)) {
			continue
		}
		if unfit, is := s.unfit(db.Name()); is {
			listing.unfit = append(listing.unfit, unfit)
		}
		if s.isCollection() {
			outbox := Outbox{DB: db.Name(), Coll: s.Name}
			copy(outbox.UUID[:], s.Info.UUID.Data)
			listing.Outboxes = append(listing.Outboxes, outbox)
		}
	}
	return listing, nil
}

// NameHolder returns the UUID of the collection that has the name of o now, or zero if there is none. If the
// user may not see UUIDs, collections cannot be distinguished, and NameHolder returns the UUID of o.
func (o Outbox) NameHolder(ctx context.Context, client *mongo.Client) (uuid [16]byte, err error) {
	if !o.Identified() {
		return o.UUID, nil
	}

	uuid, err = mongodb.CollectionUUID(ctx, client, o.DB, o.Coll)
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return o.UUID, nil
	}
	return uuid, err
}

// CurrentName returns the name that the collection has now in its database, or "" if it was dropped. If the UUID is not
// known, or the user lacks listCollections, it returns o.Coll.
func (o Outbox) CurrentName(ctx context.Context, client *mongo.Client) (string, error) {
	// The server finds a name at once, but looks for a UUID in the list of all collections of the database.
	holder, err := o.NameHolder(ctx, client)
	if err != nil || holder == o.UUID {
		return o.Coll, err
	}
	return mongodb.CollectionName(ctx, client, o.DB, o.UUID)
}

// CollectionOf returns the collection of a namespace. The driver rejects each use of a collection whose namespace is not
// <database>.<collection>.
func CollectionOf(client *mongo.Client, ns string) *mongo.Collection {
	db, coll, _ := strings.Cut(ns, ".")
	return mongodb.Database(client, db).Collection(coll)
}

// DatabasesOf returns the sorted names of the databases of the namespaces.
func DatabasesOf(namespaces []string) []string {
	databases := make([]string, len(namespaces))
	for i, ns := range namespaces {
		databases[i], _, _ = strings.Cut(ns, ".")
	}
	slices.Sort(databases)
	return slices.Compact(databases)
}
