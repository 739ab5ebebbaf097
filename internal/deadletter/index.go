package deadletter

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/schema"
)

// Indexes returns the indexes of every collection of dead letters. They serve the newest letters
// and time ranges, the order of a requeue, envelope ids, keys, and the two conditions that select
// few of many letters.
func Indexes() []mongodb.Index {
	index := func(name string, fields ...string) mongodb.Index {
		keys := make(bson.D, len(fields))
		for i, f := range fields {
			keys[i] = bson.E{Key: f, Value: int32(1)}
		}
		return mongodb.Index{Name: name, Keys: keys}
	}

	return []mongodb.Index{
		index("movedAt_1__id_1", "movedAt", "_id"),
		index("pos_1__id_1", "pos", "_id"),
		index("_id.id_1", "_id.id"),
		index("key_1_movedAt_1", "key", "movedAt"),
		index("class_1_movedAt_1", "class", "movedAt"),
		index("type_1_movedAt_1", "type", "movedAt"),
	}
}

// The names of the TTL indexes of letters and of their chunks.
const (
	expiryIndex      = "outrelay_expiry"
	chunkExpiryIndex = "outrelay_expiry_of_chunks"
)

// minExpiry is the shortest expiry of letters: operators need time to see them.
const minExpiry = time.Hour

// SetExpiry makes the server remove letters after they have existed for the time after, also
// letters that were requeued. The server removes them within a minute or so. 0 keeps letters until
// they are discarded.
//
// letters is a collection of dead letters. SetExpiry changes an existing expiry to the new time,
// and does nothing if the time is the same.
func SetExpiry(ctx context.Context, letters *mongo.Collection, after time.Duration) error {
	if after < 0 || after > 0 && after < minExpiry || after.Seconds() > math.MaxInt32 {
		return fmt.Errorf("dead letters cannot expire after %s: use at least %s, or 0 to keep them", after, minExpiry)
	}
	if after == 0 {
		return dropExpiry(ctx, letters)
	}

	existing, err := readExpirySeconds(ctx, letters)
	if err != nil {
		return err
	}

	// Chunks expire later than their letter.
	for _, index := range []struct {
		name, field string
		after       time.Duration
	}{
		{expiryIndex, "movedAt", after},
		{chunkExpiryIndex, "chunkedAt", after + time.Hour},
	} {
		seconds := int64(min(index.after/time.Second, math.MaxInt32))
		current, exists := existing[index.name]
		if exists && current == seconds {
			continue
		}

		command := bson.D{{Key: "createIndexes", Value: letters.Name()}, {Key: "indexes", Value: bson.A{bson.D{
			{Key: "key", Value: bson.D{{Key: index.field, Value: int32(1)}}},
			{Key: "name", Value: index.name},
			{Key: "expireAfterSeconds", Value: seconds},
		}}}}
		if exists {
			command = bson.D{{Key: "collMod", Value: letters.Name()}, {Key: "index", Value: bson.D{
				{Key: "name", Value: index.name},
				{Key: "expireAfterSeconds", Value: seconds},
			}}}
		}

		err = schema.Change(ctx, letters, func(ctx context.Context) error {
			return letters.Database().RunCommand(ctx, command).Err()
		})
		if err != nil {
			return fmt.Errorf("setting the expiry of the letters of %s to %s (needs the privileges createIndex and collMod): %w",
				mongodb.Namespace(letters), after, err)
		}
	}
	return nil
}

// codeNamespaceNotFound is the server's error code for a collection that does not exist.
const codeNamespaceNotFound = 26

// readExpirySeconds returns the seconds of each existing expiry index by its name, or -1 if they
// are not a number.
func readExpirySeconds(ctx context.Context, letters *mongo.Collection) (map[string]int64, error) {
	seconds := map[string]int64{}

	cur, err := letters.Indexes().List(ctx)
	var se mongo.ServerError
	if errors.As(err, &se) && se.HasErrorCode(codeNamespaceNotFound) {
		return seconds, nil
	}
	if err != nil {
		return nil, mongodb.Refusal(err, "listing indexes of "+mongodb.Namespace(letters), "listIndexes", mongodb.Namespace(letters))
	}
	var indexes []struct {
		Name  string `bson:"name"`
		After any    `bson:"expireAfterSeconds"`
	}
	if err := cur.All(ctx, &indexes); err != nil {
		return nil, mongodb.Refusal(err, "listing indexes of "+mongodb.Namespace(letters), "listIndexes", mongodb.Namespace(letters))
	}

	for _, index := range indexes {
		if index.Name != expiryIndex && index.Name != chunkExpiryIndex {
			continue
		}
		switch n := index.After.(type) {
		case int32:
			seconds[index.Name] = int64(n)
		case int64:
			seconds[index.Name] = n
		default:
			seconds[index.Name] = -1
		}
	}
	return seconds, nil
}

func dropExpiry(ctx context.Context, letters *mongo.Collection) error {
	existing, err := readExpirySeconds(ctx, letters)
	if err != nil {
		return err
	}

	for name := range existing {
		err := schema.Change(ctx, letters, func(ctx context.Context) error { return letters.Indexes().DropOne(ctx, name) })
		if err != nil {
			return fmt.Errorf("removing the expiry of the letters of %s (needs the privilege dropIndex): %w",
				mongodb.Namespace(letters), err)
		}
	}
	return nil
}
