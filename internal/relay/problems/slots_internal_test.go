package problems

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// While no owner delivers, events may wait although the last report has the lag 0. So the lag is unknown.
func TestTheLagIsUnknownUnlessAnOwnerMeasuresIt(t *testing.T) {
	t.Parallel()
	// A lease of 5 s that was renewed a second ago.
	owned := lease.Document{ID: "orders/0of1", Owner: "n1/1", TTLMS: 5000, AcquiredAt: now.Add(-time.Minute), ExpiresAt: now.Add(4 * time.Second)}
	measured := bson.D{{Key: "at", Value: now.Add(-time.Second)}, {Key: "state", Value: "live"}, {Key: "lagMs", Value: int64(0)}}

	for name, c := range map[string]struct {
		change func(*lease.Document)
		stats  bson.D
		known  bool
	}{
		"a live owner":                   {func(*lease.Document) {}, measured, true},
		"a pause that is not obeyed yet": {func(document *lease.Document) { document.Control.Paused = true }, measured, true},
		"a released lease":               {func(document *lease.Document) { document.Owner, document.ExpiresAt = "", time.UnixMilli(0) }, measured, false},
		"an expired lease":               {func(document *lease.Document) { document.ExpiresAt = now.Add(-time.Second) }, measured, false},
		"a killed owner":                 {func(document *lease.Document) { document.ExpiresAt = now.Add(2 * time.Second) }, measured, false},
		"the report of the owner before": {func(document *lease.Document) { document.AcquiredAt = now.Add(-time.Second) }, measured, false},
		"a takeover":                     {func(*lease.Document) {}, measured[:2], false},
	} {
		document := watcherDocument{Document: owned, Now: now}
		c.change(&document.Document)
		stats, err := bson.Marshal(c.stats)
		if err != nil {
			t.Fatal(err)
		}
		document.Stats = stats

		slot, err := document.toSlotStatus()
		if err != nil || (slot.LagS != nil) != c.known {
			t.Errorf("%s: lag %v, known: %v, %v", name, slot.LagS, c.known, err)
		}
	}
}
