package deadletter

import (
	"context"
	"fmt"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Indexes returns the indexes of every collection of dead letters. They serve the newest letters
// and time ranges, the order of a requeue, envelope ids, keys, and the two conditions that select
// few of many letters.
func Indexes() []mongodb.Index {
	return []mongodb.Index{
		{Name: "movedAt_1__id_1", Keys: mongodb.Ascending("movedAt", "_id")},
		{Name: "pos_1__id_1", Keys: mongodb.Ascending("pos", "_id")},
		{Name: "_id.id_1", Keys: mongodb.Ascending("_id.id")},
		{Name: "key_1_movedAt_1", Keys: mongodb.Ascending("key", "movedAt")},
		{Name: "class_1_movedAt_1", Keys: mongodb.Ascending("class", "movedAt")},
		{Name: "type_1_movedAt_1", Keys: mongodb.Ascending("type", "movedAt")},
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

	index := func(name, field string, after time.Duration) mongodb.Index {
		seconds := int32(min(after/time.Second, math.MaxInt32))
		return mongodb.Index{Name: name, Keys: mongodb.Ascending(field), TTL: &seconds}
	}
	for _, index := range []mongodb.Index{
		index(expiryIndex, "movedAt", after),
		// Chunks expire later than their letter.
		index(chunkExpiryIndex, "chunkedAt", after+time.Hour),
	} {
		if after == 0 {
			index.TTL = nil
		}
		if _, err := mongodb.EnsureTTL(ctx, letters, index); err != nil {
			return fmt.Errorf("setting the expiry of the dead letters to %s: %w", after, err)
		}
	}
	return nil
}
