package outboxes

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// ErrUnwatchable means that a name belongs to something that has no change stream.
var ErrUnwatchable = errors.New("cannot be watched")

// Inspect returns [ErrUnwatchable], with the cause and the fix, if the name is that of a view or a time series. It
// returns nil for a collection, for a name that does not exist yet, and if the user may not list collections. capped
// reports whether the server removes the oldest envelopes by itself.
func Inspect(ctx context.Context, client *mongo.Client, db, coll string) (capped bool, err error) {
	cur, err := mongodb.Database(client, db).ListCollections(ctx, bson.D{{Key: "name", Value: coll}})
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("inspecting %s.%s: %w", db, coll, err)
	}
	var found []struct {
		Type    string `bson:"type"`
		Options struct {
			Capped bool   `bson:"capped"`
			ViewOn string `bson:"viewOn"`
		} `bson:"options"`
	}
	if err := cur.All(ctx, &found); err != nil || len(found) == 0 {
		return false, err
	}

	switch f := found[0]; f.Type {
	case "view":
		return false, fmt.Errorf("%s.%s %w: it is a view of %s, and views have no change stream; set watch to %s.%s",
			db, coll, ErrUnwatchable, f.Options.ViewOn, db, f.Options.ViewOn)
	case "timeseries":
		return false, fmt.Errorf("%s.%s %w: it is a time series, which has no change stream; set watch to a regular collection",
			db, coll, ErrUnwatchable)
	default:
		return f.Options.Capped, nil
	}
}
