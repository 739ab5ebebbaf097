package term

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// A start before 1970 is the first timestamp, not one in the distant future.
func TestAStartBefore1970IsTheFirstTimestamp(t *testing.T) {
	t.Parallel()
	for when, want := range map[time.Time]uint32{time.Unix(-1, 0): 0, time.Unix(5, 0): 5} {
		start := &startPoint{slot: &Runner{cfg: config.Config{Start: config.Start{At: when}}}}
		if got, err := start.findFirstStart(t.Context(), bson.Timestamp{T: 9}); err != nil || got != (bson.Timestamp{T: want, I: 1}) {
			t.Errorf("%s: got %v (%v), want the second %d", when.UTC(), got, err, want)
		}
	}
}
