package changes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Tune sets the options with which a stream's client detects a dead server within seconds: heartbeat
// 1 s, connect 2 s, server selection 4 s. It sets no Timeout, and the caller must not set one.
func Tune(clientOptions *options.ClientOptions) *options.ClientOptions {
	return clientOptions.SetHeartbeatInterval(time.Second).
		SetConnectTimeout(2 * time.Second).
		SetServerSelectionTimeout(4 * time.Second)
}

// oplogTimeout bounds the reading of the oplog window.
const oplogTimeout = 10 * time.Second

// ErrNotAllowed means that the user lacks an optional privilege.
var ErrNotAllowed = errors.New("not allowed")

// OplogWindow returns the times of the oldest and of the newest entry of the oplog. A position older
// than the oldest entry is lost. It needs the cluster privilege serverStatus, which is optional. If
// the user lacks it, the error is ErrNotAllowed.
func OplogWindow(ctx context.Context, client *mongo.Client) (oldest, newest bson.Timestamp, err error) {
	// Without these exclusions the response is large.
	cmd := bson.D{{Key: "serverStatus", Value: 1}, {Key: "oplog", Value: 1}}
	sections := []string{"metrics", "wiredTiger", "tcmalloc", "locks", "opcounters", "network", "transactions"}
	for _, section := range sections {
		cmd = append(cmd, bson.E{Key: section, Value: 0})
	}

	ctx, cancel := context.WithTimeout(ctx, oplogTimeout)
	defer cancel()
	raw, err := client.Database("admin").RunCommand(ctx, cmd).Raw()
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return oldest, newest, fmt.Errorf("reading the oplog window: %w: grant serverStatus on the cluster", ErrNotAllowed)
	}
	if err != nil {
		return oldest, newest, fmt.Errorf("reading the oplog window: %w", err)
	}

	optime := func(name string) (timestamp bson.Timestamp, ok bool) {
		value := raw.Lookup("oplog", name)
		if document, isDoc := value.DocumentOK(); isDoc {
			value = document.Lookup("ts")
		}
		timestamp.T, timestamp.I, ok = value.TimestampOK()
		return timestamp, ok
	}
	oldest, ok1 := optime("earliestOptime")
	newest, ok2 := optime("latestOptime")
	if !ok1 || !ok2 {
		return oldest, newest, errors.New("reading the oplog window: the server's response does not contain it")
	}
	return oldest, newest, nil
}
