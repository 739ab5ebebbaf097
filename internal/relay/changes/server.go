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
// 2 s, connect 2 s, server selection 4 s. Servers report an election at once. It sets no Timeout, and the caller must not set one.
func Tune(clientOptions *options.ClientOptions) *options.ClientOptions {
	return clientOptions.SetHeartbeatInterval(2 * time.Second).
		SetConnectTimeout(2 * time.Second).
		SetServerSelectionTimeout(4 * time.Second)
}

// oplogTimeout bounds the reading of the oplog window.
const oplogTimeout = 10 * time.Second

// ErrNotAllowed means that the user lacks an optional privilege.
var ErrNotAllowed = errors.New("not allowed")

// ErrNoOplog means that the response of a server has no times of an oplog.
var ErrNoOplog = errors.New("the server's response does not contain it")

// Oplog describes the oplog of a server.
type Oplog struct {
	Oldest, Newest bson.Timestamp // the times of its ends
	// Whole means that nothing was cut off since the server started: the oplog may not be full yet, and how far it will reach back is
	// unknown.
	Whole     bool
	Retention time.Duration // entries of this age stay; 0: only the size of the oplog decides, or it is unknown
}

// Window returns the time between the ends of the oplog.
func (o Oplog) Window() time.Duration { return time.Duration(o.Newest.T-o.Oldest.T) * time.Second }

// ReadOplog reads the ends of the oplog. A position older than the oldest entry is lost. It needs the cluster privilege serverStatus, which
// is optional. If the user lacks it, the error is ErrNotAllowed. If the server has no oplog, as mongos, it is ErrNoOplog.
func ReadOplog(ctx context.Context, client *mongo.Client) (Oplog, error) {
	// Without these exclusions the response is large.
	cmd := bson.D{{Key: "serverStatus", Value: 1}, {Key: "oplog", Value: 1}, {Key: "oplogTruncation", Value: 1}}
	sections := []string{"metrics", "wiredTiger", "tcmalloc", "locks", "opcounters", "network", "transactions"}
	for _, section := range sections {
		cmd = append(cmd, bson.E{Key: section, Value: 0})
	}

	ctx, cancel := context.WithTimeout(ctx, oplogTimeout)
	defer cancel()
	raw, err := client.Database("admin").RunCommand(ctx, cmd).Raw()
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return Oplog{}, fmt.Errorf("reading the oplog window: %w: grant serverStatus on the cluster", ErrNotAllowed)
	}
	if err != nil {
		return Oplog{}, fmt.Errorf("reading the oplog window: %w", err)
	}
	return parseOplog(raw)
}

// parseOplog reads the response of serverStatus.
func parseOplog(raw bson.Raw) (oplog Oplog, err error) {
	optime := func(name string) (timestamp bson.Timestamp) {
		value := raw.Lookup("oplog", name)
		if document, isDoc := value.DocumentOK(); isDoc {
			value = document.Lookup("ts")
		}
		timestamp.T, timestamp.I, _ = value.TimestampOK()
		return timestamp
	}
	oplog.Oldest, oplog.Newest = optime("earliestOptime"), optime("latestOptime")
	if oplog.Oldest.IsZero() || oplog.Newest.IsZero() {
		return Oplog{}, fmt.Errorf("reading the oplog window: %w", ErrNoOplog)
	}

	truncated, known := raw.Lookup("oplogTruncation", "truncateCount").AsInt64OK()
	oplog.Whole = known && truncated == 0
	hours, _ := raw.Lookup("oplogTruncation", "oplogMinRetentionHours").AsFloat64OK()
	oplog.Retention = time.Duration(hours * float64(time.Hour))
	return oplog, nil
}
