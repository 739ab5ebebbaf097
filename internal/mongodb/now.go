package mongodb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// errNoClusterTime means that the server has no cluster time, because it is not a replica set.
var errNoClusterTime = errors.New("the server has no cluster time, so it is not a replica set")

// ClusterTime returns the current cluster time of the server that responds to a ping. It is not before the time of any commit that
// is visible now. A transaction that becomes visible afterwards may have an earlier time: see [SettledTime]. It blocks for at most ten
// seconds.
func ClusterTime(ctx context.Context, client *mongo.Client) (clusterTime bson.Timestamp, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()

	raw, err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "ping", Value: 1}}).Raw()
	if err != nil {
		return clusterTime, fmt.Errorf("reading the cluster time: %w", err)
	}

	var ok bool
	if clusterTime.T, clusterTime.I, ok = raw.Lookup("operationTime").TimestampOK(); !ok {
		return clusterTime, fmt.Errorf("reading the cluster time: %w", errNoClusterTime)
	}
	return clusterTime, nil
}
