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

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/slot"
)

// Envelope is an undelivered document of an outbox, as it was inserted or last updated. Its slices are
// valid only during the call that it is passed to.
type Envelope struct {
	DB, Coll    []byte
	TS          bson.Timestamp // the stamp of the server; zero if there is none
	Raw         bson.Raw
	Redelivered bool // it is sent again on purpose; its records get the header outrelay-redelivered
}

// Outbox is a collection that a watcher reads.
type Outbox struct {
	DB, Coll string
	// UUID is the identity of this very collection: one that is dropped and made again has another. It is zero where the
	// user may only see names, for want of listCollections.
	UUID [16]byte
	// Part is which of its envelopes the watcher's slot reads; the zero value is all of them (N28).
	Part slot.Range
}

// NS is the full name.
func (o Outbox) NS() string { return o.DB + "." + o.Coll }

// Identified reports whether the UUID is known.
func (o Outbox) Identified() bool { return o.UUID != [16]byte{} }

// listing bounds the databases that are asked at once.
const listing = 4

// ListOutboxes finds the collections that match in the databases named, or in all that the user may see if none is. A
// tenant's database costs one command. Views are left out. The result is sorted by name.
func ListOutboxes(ctx context.Context, client *mongo.Client, match func(db, coll []byte) bool, databases ...string) ([]Outbox, error) {
	if len(databases) == 0 {
		var err error
		databases, err = client.ListDatabaseNames(ctx, bson.D{{Key: "name", Value: bson.D{{Key: "$nin", Value: bson.A{"admin", "local", "config"}}}}},
			options.ListDatabases().SetAuthorizedDatabases(true))
		if err != nil {
			return nil, mongodb.DescribeRefusal(err, "listing databases", "listDatabases", "cluster", "name the collections one by one")
		}
	}
	found := make([][]Outbox, len(databases))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(listing)
	for i, db := range databases {
		g.Go(func() (err error) {
			found[i], err = listOne(gctx, client.Database(db), match)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	all := slices.Concat(found...)
	slices.SortFunc(all, func(a, b Outbox) int { return strings.Compare(a.NS(), b.NS()) })
	return all, nil
}

func listOne(ctx context.Context, db *mongo.Database, match func(db, coll []byte) bool) ([]Outbox, error) {
	filter := bson.D{{Key: "type", Value: "collection"}}
	cur, err := db.ListCollections(ctx, filter)
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		cur, err = db.ListCollections(ctx, filter, options.ListCollections().SetNameOnly(true).SetAuthorizedCollections(true))
	}
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "listing collections of "+db.Name(), "listCollections", db.Name(), "")
	}
	var specs []struct {
		Name string `bson:"name"`
		Info struct {
			UUID bson.Binary `bson:"uuid"`
		} `bson:"info"`
	}
	if err := cur.All(ctx, &specs); err != nil {
		return nil, fmt.Errorf("listing collections of %s: %w", db.Name(), err)
	}
	var out []Outbox
	for _, s := range specs {
		if strings.HasPrefix(s.Name, "system.") || !match([]byte(db.Name()), []byte(s.Name)) {
			continue
		}
		o := Outbox{DB: db.Name(), Coll: s.Name}
		copy(o.UUID[:], s.Info.UUID.Data)
		out = append(out, o)
	}
	return out, nil
}

// NameHolder is the UUID of the collection that has o's name now, zero if there is none. It is o's own where collections
// cannot be told apart, because their UUIDs are not shown.
func (o Outbox) NameHolder(ctx context.Context, client *mongo.Client) (uuid [16]byte, err error) {
	if !o.Identified() {
		return o.UUID, nil
	}
	raw, err := client.Database(o.DB).RunCommand(ctx, bson.D{
		{Key: "listCollections", Value: 1},
		{Key: "filter", Value: bson.D{{Key: "name", Value: o.Coll}}},
	}).Raw()
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return o.UUID, nil
	}
	if err != nil {
		return uuid, fmt.Errorf("asking for the UUID of %s: %w", o.NS(), err)
	}
	_, b, _ := raw.Lookup("cursor", "firstBatch", "0", "info", "uuid").BinaryOK()
	copy(uuid[:], b)
	return uuid, nil
}

// The ways in which an envelope came to be an exception, its field `origin`.
const (
	OriginStream    = "stream"
	OriginScheduled = "scheduled"
	OriginRequeue   = "requeue"
	OriginReplay    = "replay"
)

// Outboxed is the collection of a namespace.
func Outboxed(client *mongo.Client, ns string) (*mongo.Collection, error) {
	db, coll, ok := strings.Cut(ns, ".")
	if !ok || db == "" || coll == "" {
		return nil, fmt.Errorf("namespace %q is not <database>.<collection>", ns)
	}
	return client.Database(db).Collection(coll), nil
}
