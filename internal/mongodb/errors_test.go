package mongodb_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// The errors of a real server for documents that it does not store, in a transaction and without one.
func TestN16_ADocumentThatIsRejectedIsARejection(t *testing.T) {
	t.Parallel()
	db := database(t)
	command := func(c bson.D) {
		t.Helper()
		if err := db.RunCommand(t.Context(), c).Err(); err != nil {
			t.Fatal(err)
		}
	}
	command(bson.D{{Key: "create", Value: "c"}, {Key: "validator", Value: bson.D{{Key: "bad", Value: nil}}}})
	command(bson.D{{Key: "createIndexes", Value: "c"}, {Key: "indexes", Value: bson.A{
		bson.D{{Key: "name", Value: "u"}, {Key: "key", Value: bson.D{{Key: "u", Value: 1}}}, {Key: "unique", Value: true}},
		bson.D{{Key: "name", Value: "two"}, {Key: "key", Value: bson.D{{Key: "a", Value: 1}, {Key: "b", Value: 1}}}},
		bson.D{{Key: "name", Value: "geo"}, {Key: "key", Value: bson.D{{Key: "geo", Value: "2dsphere"}}}},
	}}})
	command(bson.D{{Key: "create", Value: "capped"}, {Key: "capped", Value: true}, {Key: "size", Value: 4096}})
	command(bson.D{{Key: "create", Value: "view"}, {Key: "viewOn", Value: "c"}, {Key: "pipeline", Value: bson.A{}}})
	if _, err := db.Collection("c").InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}, {Key: "u", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	deep := bson.D{{Key: "d", Value: 1}}
	for range 200 {
		deep = bson.D{{Key: "d", Value: deep}}
	}

	insert := func(coll string, doc bson.D) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := db.Collection(coll).BulkWrite(ctx, []mongo.WriteModel{mongo.NewInsertOneModel().SetDocument(doc)})
			return err
		}
	}
	update := func(u any) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := db.Collection("c").UpdateOne(ctx, bson.D{{Key: "_id", Value: 1}}, u)
			return err
		}
	}
	for name, write := range map[string]func(context.Context) error{
		"a duplicate":              insert("c", bson.D{{Key: "_id", Value: 2}, {Key: "u", Value: 1}}),
		"a validator":              insert("c", bson.D{{Key: "u", Value: 3}, {Key: "bad", Value: 1}}),
		"two arrays in an index":   insert("c", bson.D{{Key: "u", Value: 4}, {Key: "a", Value: bson.A{1}}, {Key: "b", Value: bson.A{1}}}),
		"no place on earth":        insert("c", bson.D{{Key: "u", Value: 5}, {Key: "geo", Value: "x"}}),
		"a deep document":          insert("c", bson.D{{Key: "u", Value: 6}, {Key: "deep", Value: deep}}),
		"too large for the driver": insert("c", bson.D{{Key: "u", Value: 7}, {Key: "x", Value: make([]byte, 17<<20)}}),
		"an update that grows":     update(bson.D{{Key: "$set", Value: bson.D{{Key: "x", Value: make([]byte, 9<<20)}, {Key: "y", Value: make([]byte, 6<<20)}, {Key: "z", Value: strings.Repeat("z", 2<<20)}}}}),
		"a pipeline that grows":    update(mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "x", Value: strings.Repeat("x", 9<<20)}}}}, {{Key: "$set", Value: bson.D{{Key: "y", Value: "$x"}}}}}),
		"an update of the id":      update(bson.D{{Key: "$set", Value: bson.D{{Key: "_id", Value: 9}}}}),
		"a view":                   insert("view", bson.D{{Key: "u", Value: 8}}),
	} {
		if err := write(t.Context()); !mongodb.IsRejection(err) {
			t.Errorf("%s: %v is no rejection", name, err)
		}
		err := mongodb.InTransaction(t.Context(), db.Client(), func(tx context.Context) error {
			return fmt.Errorf("wrapped: %w", mongodb.DescribeError(write(tx), "writing", "insert", "x.y"))
		})
		if !mongodb.IsRejection(err) {
			t.Errorf("%s in a transaction: %v is no rejection", name, err)
		}
	}
}

// Errors of the server, its members, its users and the network are no fault of a document.
func TestN16_AnErrorOfTheEnvironmentIsNoRejection(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("c")
	mine := stacktest.Client(t, options.Client().SetAppName(app).SetRetryWrites(false)).Database(coll.Database().Name()).Collection("c")

	for name, fault := range map[string]bson.D{
		"no right":          {{Key: "errorCode", Value: 13}},
		"not the primary":   {{Key: "errorCode", Value: 10107}},
		"stepped down":      {{Key: "errorCode", Value: 189}},
		"shutting down":     {{Key: "errorCode", Value: 91}},
		"a time limit":      {{Key: "errorCode", Value: 50}},
		"the disk is full":  {{Key: "errorCode", Value: 14031}},
		"a quota of Atlas":  {{Key: "errorCode", Value: 8000}},
		"no key for a time": {{Key: "errorCode", Value: 211}},
		"many sessions":     {{Key: "errorCode", Value: 261}},
		"blocked writes":    {{Key: "errorCode", Value: 371}},
		"a write conflict":  {{Key: "errorCode", Value: 112}, {Key: "errorLabels", Value: bson.A{"TransientTransactionError"}}},
		"no such session":   {{Key: "errorCode", Value: 251}, {Key: "errorLabels", Value: bson.A{"TransientTransactionError"}}},
		"a lost connection": {{Key: "closeConnection", Value: true}},
		"a lost majority":   {{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 64}, {Key: "errmsg", Value: "waiting for replication timed out"}}}},
	} {
		off := stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: 1}}, append(bson.D{{Key: "failCommands", Value: bson.A{"insert"}}}, fault...))
		_, err := mine.InsertOne(t.Context(), bson.D{})
		off()
		if err == nil || mongodb.IsRejection(err) {
			t.Errorf("%s: %v", name, err)
		}
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := coll.InsertOne(ctx, bson.D{})
	for name, err := range map[string]error{"nothing": nil, "the end of a context": err, "a plain error": errors.New("x"), "a late end": context.DeadlineExceeded} {
		if mongodb.IsRejection(err) {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Atlas returns a quota as the error of the command. No document of it is at fault.
	if err := (mongo.CommandError{Code: 8000, Name: "AtlasError"}); mongodb.IsRejection(fmt.Errorf("storing: %w", err)) {
		t.Errorf("%v is a rejection", err)
	}

	// The real server returns it only with gigabytes of changes. The halves of the write fit.
	if err := (mongo.CommandError{Code: 388, Name: "TransactionTooLargeForCache"}); !mongodb.IsRejection(fmt.Errorf("storing: %w", err)) {
		t.Errorf("%v is no rejection", err)
	}
}
