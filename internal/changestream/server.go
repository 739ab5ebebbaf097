package changestream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Tune sets what a watching client needs so that a dead server shows in seconds: heartbeat 1 s, connect 2 s, server selection 4 s.
// It sets no Timeout, and none may be set.
func Tune(o *options.ClientOptions) *options.ClientOptions {
	return o.SetHeartbeatInterval(time.Second).SetConnectTimeout(2 * time.Second).SetServerSelectionTimeout(4 * time.Second)
}

// ErrNotAllowed says that the user lacks the privilege for something optional.
var ErrNotAllowed = errors.New("not allowed")

// OplogWindow is the time of the oldest and of the newest entry of the oplog: a position older than the oldest is lost. It needs
// the cluster privilege serverStatus, which is optional: without it the error is ErrNotAllowed.
func OplogWindow(ctx context.Context, client *mongo.Client) (oldest, newest bson.Timestamp, err error) {
	cmd := bson.D{{Key: "serverStatus", Value: 1}, {Key: "oplog", Value: 1}}
	for _, section := range []string{"metrics", "wiredTiger", "tcmalloc", "locks", "opcounters", "network", "transactions"} {
		cmd = append(cmd, bson.E{Key: section, Value: 0}) // a heavy answer otherwise
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	raw, err := client.Database("admin").RunCommand(ctx, cmd).Raw()
	if code(err) == 13 {
		return oldest, newest, fmt.Errorf("asking for the oplog window: %w: grant serverStatus on the cluster", ErrNotAllowed)
	}
	if err != nil {
		return oldest, newest, fmt.Errorf("asking for the oplog window: %w", err)
	}
	at := func(name string) (t bson.Timestamp, ok bool) {
		v := raw.Lookup("oplog", name)
		if d, isDoc := v.DocumentOK(); isDoc {
			v = d.Lookup("ts")
		}
		t.T, t.I, ok = v.TimestampOK()
		return t, ok
	}
	oldest, ok1 := at("earliestOptime")
	newest, ok2 := at("latestOptime")
	if !ok1 || !ok2 {
		return oldest, newest, errors.New("asking for the oplog window: the server does not say")
	}
	return oldest, newest, nil
}

// CollectionUUID is the UUID of a collection. It is not found when there is no such collection, and also when the user may not
// list collections: then the events' own UUID is all there is.
func CollectionUUID(ctx context.Context, client *mongo.Client, db, coll string) (uuid [16]byte, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	raw, err := client.Database(db).RunCommand(ctx, bson.D{
		{Key: "listCollections", Value: 1},
		{Key: "filter", Value: bson.D{{Key: "name", Value: coll}}},
	}).Raw()
	if code(err) == 13 {
		return uuid, false, nil
	}
	if err != nil {
		return uuid, false, fmt.Errorf("asking for the UUID of %s.%s: %w", db, coll, err)
	}
	_, b, ok := raw.Lookup("cursor", "firstBatch", "0", "info", "uuid").BinaryOK()
	if !ok || len(b) != len(uuid) {
		return uuid, false, nil
	}
	return [16]byte(b), true, nil
}

func code(err error) int {
	var se mongo.ServerError
	if errors.As(err, &se) && len(se.ErrorCodes()) > 0 {
		return se.ErrorCodes()[0]
	}
	return 0
}
