package mongodb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/mongodb/concern"
)

// registry is that of the driver. A registry of the service could encode stored documents in another way.
var registry = bson.NewRegistry()

// Database returns a database whose collections write with majority, read from the primary, and use the
// driver's own encoding, regardless of the settings of the client. The client may belong to the service in which
// the relay is embedded. [Majority] is for reads that must not see a write that may be rolled back.
func Database(client *mongo.Client, name string) *mongo.Database {
	return client.Database(name, options.Database().
		SetReadConcern(readconcern.Local()).
		SetWriteConcern(concern.Majority()).
		SetReadPreference(readpref.Primary()).
		SetBSONOptions(&options.BSONOptions{}).
		SetRegistry(registry))
}

// InClient returns coll with another client, as [Database] does. A transaction is bound to the client that began it, and the lease may have
// another client than its caller.
func InClient(client *mongo.Client, coll *mongo.Collection) *mongo.Collection {
	return Database(client, coll.Database().Name()).Collection(coll.Name())
}

// ErrClientTimeout means that a client has a Timeout, which would end calls that may take long.
var ErrClientTimeout = errors.New("the client has a Timeout, which would end the wait for events and the build of an index")

// ErrClientStrict means that a client uses the strict stable API, which lacks commands that the relay needs, such as distinct.
var ErrClientStrict = errors.New("the client uses the strict stable API, which lacks commands that the relay needs, such as distinct and currentOp")

// limitOfCall bounds a call whose context must not have a deadline.
const limitOfCall = 10 * time.Second

// CheckClient returns [ErrClientTimeout] if client has a Timeout, [ErrClientStrict] if it uses the strict stable API,
// [mongo.ErrClientDisconnected] if it was disconnected, or the error of a server that cannot be reached. It returns nil if the server rejects the
// question. It blocks for at most 10 seconds.
func CheckClient(ctx context.Context, client *mongo.Client) error {
	// A client does not reveal its Timeout. For a call without a deadline, the driver sends it to the
	// server as maxTimeMS, and the server lists the call with all of its fields.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer time.AfterFunc(limitOfCall, cancel).Stop()

	comment := bson.NewObjectID()
	raw, err := client.Database("admin").RunCommand(ctx, bson.D{
		{Key: "currentOp", Value: 1},
		{Key: "$ownOps", Value: true},
		// The call finds itself by its comment.
		{Key: "command.comment", Value: comment},
		{Key: "comment", Value: comment},
	}).Raw()
	if HasCode(err, codeAPIStrict) {
		return ErrClientStrict
	}
	// A rejection proves that the server can be reached.
	if se := mongo.ServerError(nil); errors.As(err, &se) && !mongo.IsNetworkError(err) && !mongo.IsTimeout(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("checking the client: %w", err)
	}

	if _, err := raw.LookupErr("inprog", "0", "command", "maxTimeMS"); err == nil {
		return ErrClientTimeout
	}
	return nil
}
