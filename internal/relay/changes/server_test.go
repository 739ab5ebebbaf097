package changes

import (
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// TestAnOplogIsWholeUntilTheServerCutsItOff: only the count of truncations shows that. Without it, the oplog counts as full.
func TestAnOplogIsWholeUntilTheServerCutsItOff(t *testing.T) {
	t.Parallel()
	ends := bson.D{{Key: "earliestOptime", Value: bson.Timestamp{T: 100}}, {Key: "latestOptime", Value: bson.D{{Key: "ts", Value: bson.Timestamp{T: 160}}}}}

	for _, c := range []struct {
		truncation bson.D
		whole      bool
		retention  time.Duration
	}{
		{bson.D{{Key: "truncateCount", Value: int64(0)}}, true, 0},
		{bson.D{{Key: "truncateCount", Value: int64(1)}, {Key: "oplogMinRetentionHours", Value: 1.5}}, false, 90 * time.Minute},
		{bson.D{}, false, 0},
	} {
		raw, err := bson.Marshal(bson.D{{Key: "oplog", Value: ends}, {Key: "oplogTruncation", Value: c.truncation}})
		if err != nil {
			t.Fatal(err)
		}
		oplog, err := parseOplog(raw)
		if err != nil || oplog.Whole != c.whole || oplog.Retention != c.retention || oplog.Window() != time.Minute {
			t.Errorf("%v: %+v, %v", c.truncation, oplog, err)
		}
	}

	raw, err := bson.Marshal(bson.D{{Key: "ok", Value: 1}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parseOplog(raw); !errors.Is(err, ErrNoOplog) {
		t.Errorf("got %v, want ErrNoOplog", err)
	}
}
