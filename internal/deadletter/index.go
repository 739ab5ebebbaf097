package deadletter

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/schema"
	"github.com/outrelay/outrelay/internal/store"
)

// Indexes are those of every collection of dead letters, for the queries: the newest and a window of time, the order of a
// requeue, ids of envelopes, keys, and the two conditions that single out few of many letters.
func Indexes() []store.Index {
	index := func(name string, fields ...string) store.Index {
		keys := make(bson.D, len(fields))
		for i, f := range fields {
			keys[i] = bson.E{Key: f, Value: int32(1)}
		}
		return store.Index{Name: name, Keys: keys}
	}
	return []store.Index{
		index("movedAt_1__id_1", "movedAt", "_id"),
		index("pos_1__id_1", "pos", "_id"),
		index("_id.id_1", "_id.id"),
		index("key_1_movedAt_1", "key", "movedAt"),
		index("class_1_movedAt_1", "class", "movedAt"),
		index("type_1_movedAt_1", "type", "movedAt"),
	}
}

// The names of the indexes by which letters and their chunks expire.
const (
	expiryIndex      = "outrelay_expiry"
	chunkExpiryIndex = "outrelay_expiry_of_chunks"
)

// MinExpiry is the shortest life of a letter: people have to get to see it.
const MinExpiry = time.Hour

// SetExpiry makes letters go away by themselves so long after they were moved; 0 keeps them for ever. letters is a
// collection of dead letters. It does nothing if it is so already, and moves an expiry that is there to the new time. The
// server removes them within a minute or so, those that were requeued too.
func SetExpiry(ctx context.Context, letters *mongo.Collection, after time.Duration) error {
	switch {
	case after < 0, after > 0 && after < MinExpiry, after.Seconds() > math.MaxInt32:
		return fmt.Errorf("dead letters cannot expire after %s; at least %s is wanted, or 0 to keep them for ever", after, MinExpiry)
	case after == 0:
		return dropExpiry(ctx, letters)
	}
	have, err := expiry(ctx, letters)
	if err != nil {
		return err
	}
	// A chunk does not go before its letter.
	for _, x := range []struct {
		name, field string
		after       time.Duration
	}{{expiryIndex, "movedAt", after}, {chunkExpiryIndex, "chunkedAt", after + time.Hour}} {
		seconds := int64(min(x.after/time.Second, math.MaxInt32))
		was, there := have[x.name]
		var command bson.D
		switch {
		case there && was == seconds:
			continue
		case there:
			command = bson.D{{Key: "collMod", Value: letters.Name()}, {Key: "index", Value: bson.D{
				{Key: "name", Value: x.name}, {Key: "expireAfterSeconds", Value: seconds},
			}}}
		default:
			command = bson.D{{Key: "createIndexes", Value: letters.Name()}, {Key: "indexes", Value: bson.A{bson.D{
				{Key: "key", Value: bson.D{{Key: x.field, Value: int32(1)}}}, {Key: "name", Value: x.name}, {Key: "expireAfterSeconds", Value: seconds},
			}}}}
		}
		err = schema.Change(ctx, letters, func(ctx context.Context) error { return letters.Database().RunCommand(ctx, command).Err() })
		if err != nil {
			return fmt.Errorf("letting the letters of %s expire after %s; it needs createIndex and collMod there: %w", store.Namespace(letters), after, err)
		}
	}
	return nil
}

// codeNamespaceNotFound is of a collection that is not there.
const codeNamespaceNotFound = 26

// expiry is the seconds of each expiry index that is there, by its name.
func expiry(ctx context.Context, letters *mongo.Collection) (map[string]int64, error) {
	out := map[string]int64{}
	cur, err := letters.Indexes().List(ctx)
	var se mongo.ServerError
	if errors.As(err, &se) && se.HasErrorCode(codeNamespaceNotFound) {
		return out, nil
	}
	if err != nil {
		return nil, store.Refusal(err, "listing indexes of "+store.Namespace(letters), "listIndexes", store.Namespace(letters))
	}
	var have []struct {
		Name  string `bson:"name"`
		After any    `bson:"expireAfterSeconds"`
	}
	if err := cur.All(ctx, &have); err != nil {
		return nil, store.Refusal(err, "listing indexes of "+store.Namespace(letters), "listIndexes", store.Namespace(letters))
	}
	for _, h := range have {
		if h.Name != expiryIndex && h.Name != chunkExpiryIndex {
			continue
		}
		switch n := h.After.(type) {
		case int32:
			out[h.Name] = int64(n)
		case int64:
			out[h.Name] = n
		default:
			out[h.Name] = -1
		}
	}
	return out, nil
}

func dropExpiry(ctx context.Context, letters *mongo.Collection) error {
	have, err := expiry(ctx, letters)
	if err != nil {
		return err
	}
	for name := range have {
		if err := schema.Change(ctx, letters, func(ctx context.Context) error { return letters.Indexes().DropOne(ctx, name) }); err != nil {
			return fmt.Errorf("ending the expiry of letters of %s; it needs dropIndex there: %w", store.Namespace(letters), err)
		}
	}
	return nil
}
