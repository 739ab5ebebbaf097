package mongodb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// ReadUnindexed calls read, which may read a collection of services without an index. With the parameter notablescan, the server
// rejects that, and ReadUnindexed calls read again with a hint to the index of _id. It is not for transactions, which the rejection ends.
func ReadUnindexed(read func(hint any) error) error {
	err := read(nil)
	if HasCode(err, codeNoQueryExecutionPlans) {
		return read(bson.D{{Key: "_id", Value: 1}})
	}
	return err
}

// Exists reports whether coll has a document that filter matches. Without an index of the filter it reads the collection.
func Exists(ctx context.Context, coll *mongo.Collection, filter bson.D) (bool, error) {
	opts := options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})
	err := ReadUnindexed(func(hint any) error { return coll.FindOne(ctx, filter, opts.SetHint(hint)).Err() })
	if errors.Is(err, mongo.ErrNoDocuments) {
		return false, nil
	}
	return err == nil, DescribeError(err, "reading "+Namespace(coll), "find", Namespace(coll))
}

// Fetch returns one envelope unchanged, majority committed (N21). The caller owns the bytes. If the
// envelope is gone, the error is [ErrNotFound].
func Fetch(ctx context.Context, coll *mongo.Collection, id bson.RawValue) (bson.Raw, error) {
	raw, err := Majority(coll).FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil, fmt.Errorf("fetching an envelope of %s: %w", Namespace(coll), ErrNotFound)
	}
	if err != nil {
		return nil, DescribeError(err, "fetching an envelope of "+Namespace(coll), "find", Namespace(coll))
	}
	return raw, nil
}

// ValueKey returns a key of a map for value. Values of different BSON types have different keys.
func ValueKey(value bson.RawValue) string { return string(byte(value.Type)) + string(value.Value) }

// FetchMany calls take for each envelope of ids that exists, majority committed (N21), in no order. The
// bytes are valid only during the call. An error of take ends the read and is returned.
func FetchMany(ctx context.Context, coll *mongo.Collection, ids []bson.RawValue, take func(bson.Raw) error) error {
	if len(ids) == 0 {
		return nil
	}
	filter := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
	return FindEach(ctx, Majority(coll), "fetching envelopes of "+Namespace(coll), filter, take)
}

// FindAll returns the documents of coll that filter matches. doing names the purpose in errors.
func FindAll[T any](
	ctx context.Context, coll *mongo.Collection, doing string, filter any, opts ...options.Lister[options.FindOptions],
) ([]T, error) {
	cur, err := cursor.Find(ctx, coll, filter, opts...)
	return decodeAll[T](ctx, coll, doing, cur, err)
}

// AggregateAll returns the documents that pipeline produces from coll. doing names the purpose in errors.
func AggregateAll[T any](
	ctx context.Context, coll *mongo.Collection, doing string, pipeline mongo.Pipeline,
	opts ...options.Lister[options.AggregateOptions],
) ([]T, error) {
	cur, err := cursor.Aggregate(ctx, coll, pipeline, opts...)
	return decodeAll[T](ctx, coll, doing, cur, err)
}

// CountValues counts the documents that filter matches by the text in a field; "" stands for a missing one. It reads at most
// limit documents.
func CountValues(ctx context.Context, coll *mongo.Collection, filter bson.D, field string, limit int64) (map[string]int64, error) {
	groups, err := AggregateAll[struct {
		Text string `bson:"_id"`
		N    int64  `bson:"n"`
	}](ctx, coll, "counting "+Namespace(coll), mongo.Pipeline{
		{{Key: "$match", Value: filter}},
		{{Key: "$limit", Value: limit}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$" + field, ""}}}},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
		}}},
	})

	counts := map[string]int64{}
	for _, g := range groups {
		counts[g.Text] = g.N
	}
	return counts, err
}

// decodeAll returns the documents of a cursor, or the error of the statement that failed to open it.
func decodeAll[T any](
	ctx context.Context, coll *mongo.Collection, doing string, cur *mongo.Cursor, err error,
) ([]T, error) {
	if err != nil {
		return nil, DescribeError(err, doing, "find", Namespace(coll))
	}

	all := []T{}
	if err := cur.All(ctx, &all); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	return all, nil
}

// FindEach calls take for each document of coll that filter matches. The bytes are valid only during the
// call. An error of take ends the read and is returned as it is. doing names the purpose in other errors.
func FindEach(
	ctx context.Context, coll *mongo.Collection, doing string, filter any, take func(bson.Raw) error,
	opts ...options.Lister[options.FindOptions],
) error {
	cur, err := cursor.Find(ctx, coll, filter, opts...)
	if err != nil {
		return DescribeError(err, doing, "find", Namespace(coll))
	}
	return EachDocument(ctx, cur, doing, take)
}

// EachDocument calls take for each document of a cursor, and closes the cursor. An error of take ends the
// read and is returned as it is. doing names the purpose in the errors of the cursor.
func EachDocument(ctx context.Context, cur *mongo.Cursor, doing string, take func(bson.Raw) error) error {
	// An error may be ignored: the server closes an abandoned cursor after a while.
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()

	for cur.Next(ctx) {
		if err := take(cur.Current); err != nil {
			return err
		}
	}

	if err := cur.Err(); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// ServerTime returns the time of the primary's clock.
func ServerTime(ctx context.Context, client *mongo.Client) (time.Time, error) {
	var response struct {
		LocalTime time.Time `bson:"localTime"`
	}

	opts := options.RunCmd().SetReadPreference(readpref.Primary())
	err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}, opts).Decode(&response)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading the server's time: %w", err)
	}
	return response.LocalTime, nil
}

// CollectionUUID returns the UUID of a collection, or zero if the collection does not exist. It needs the
// privilege listCollections.
func CollectionUUID(ctx context.Context, client *mongo.Client, db, coll string) (uuid [16]byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()

	raw, err := client.Database(db).RunCommand(ctx, bson.D{
		{Key: "listCollections", Value: 1},
		{Key: "filter", Value: bson.D{{Key: "name", Value: coll}}},
	}).Raw()
	if err != nil {
		return uuid, DescribeError(err, "reading the UUID of "+db+"."+coll, "listCollections", db)
	}

	_, id, _ := raw.Lookup("cursor", "firstBatch", "0", "info", "uuid").BinaryOK()
	copy(uuid[:], id)
	return uuid, nil
}

// EncodeUUID returns the UUID of a collection as the server stores it.
func EncodeUUID(uuid [16]byte) bson.Binary {
	return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: uuid[:]}
}

// OnlyIn returns the field of a command that makes the server reject it with [CodeCollectionUUIDMismatch] if another collection has the name.
func OnlyIn(uuid [16]byte) bson.E { return bson.E{Key: "collectionUUID", Value: EncodeUUID(uuid)} }

// CollectionName returns the name of the collection with the UUID in the database, or "" if there is none.
func CollectionName(ctx context.Context, client *mongo.Client, db string, uuid [16]byte) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()

	cur, err := Database(client, db).ListCollections(ctx, bson.D{
		{Key: "info.uuid", Value: EncodeUUID(uuid)},
	})
	if err != nil {
		return "", DescribeError(err, "listing the collections of "+db, "listCollections", db)
	}
	var found []struct {
		Name string `bson:"name"`
	}
	if err := cur.All(ctx, &found); err != nil {
		return "", fmt.Errorf("listing the collections of %s: %w", db, err)
	}
	if len(found) == 0 {
		return "", nil
	}
	return found[0].Name, nil
}

// CollectionUUIDs returns the UUIDs of all collections of a database.
func CollectionUUIDs(ctx context.Context, client *mongo.Client, db string) (map[[16]byte]bool, error) {
	cur, err := Database(client, db).ListCollections(ctx, bson.D{})
	if err != nil {
		return nil, DescribeError(err, "listing the collections of "+db, "listCollections", db)
	}
	var found []struct {
		Info struct {
			UUID bson.Binary `bson:"uuid"`
		} `bson:"info"`
	}
	if err := cur.All(ctx, &found); err != nil {
		return nil, fmt.Errorf("listing the collections of %s: %w", db, err)
	}

	uuids := map[[16]byte]bool{}
	for _, f := range found {
		if len(f.Info.UUID.Data) == 16 {
			uuids[[16]byte(f.Info.UUID.Data)] = true
		}
	}
	return uuids, nil
}
