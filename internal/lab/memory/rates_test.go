package memory

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/rates"
)

// A test of a consumer in memory is valid for MongoDB, so both stores reserve alike.
func TestReservationsFollowEachOtherUntilTheRateChanges(t *testing.T) {
	t.Parallel()
	for name, store := range map[string]rates.Store{
		"memory": &rateStore{}, "MongoDB": rates.NewMongo(stacktest.Database(t, stacktest.Client(t))),
	} {
		reserve := func(every time.Duration, n int, least, most time.Duration) {
			t.Helper()
			wait, err := store.Reserve(t.Context(), rates.Limit{Name: "h", Every: every, Burst: 2}, n)
			if err != nil || wait < least || wait > most {
				t.Errorf("%s: %d calls in %v begin after %v (%v), want %v to %v", name, n, every, wait, err, least, most)
			}
		}

		reserve(time.Hour, 3, -time.Hour, -time.Hour)
		reserve(time.Hour, 1, time.Hour, 2*time.Hour)
		reserve(time.Minute, 5, time.Minute, time.Minute)
		reserve(time.Minute, 1, 5*time.Minute, 6*time.Minute)
		reserve(time.Hour, 1, time.Hour, time.Hour)
	}
}

// A failover may lead to a clock that is behind, and the slots of the other clock lie in the future.
func TestAClockThatGoesBackStopsNoHandler(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	store, limit := rates.NewMongo(db), rates.Limit{Name: "h", Every: time.Minute, Burst: 1}
	for range 2 {
		if _, err := store.Reserve(t.Context(), limit, 1); err != nil {
			t.Fatal(err)
		}

		ahead := time.Hour.Microseconds()
		step := bson.D{{Key: "$inc", Value: bson.D{{Key: "now", Value: ahead}, {Key: "next", Value: ahead}, {Key: "first", Value: ahead}}}}
		if _, err := db.Collection(record.RatesCollection).UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "h"}}, step); err != nil {
			t.Fatal(err)
		}
	}

	if wait, err := store.Reserve(t.Context(), limit, 1); err != nil || wait < time.Minute || wait > 3*time.Minute {
		t.Errorf("the next call is after %v (%v), want 2 to 3 minutes", wait, err)
	}
}

// During a rolling deployment, old and new members reserve in turns. Together they stay below the higher rate.
func TestMembersWithTwoRatesShareTheirSlots(t *testing.T) {
	t.Parallel()
	for name, store := range map[string]rates.Store{
		"memory": &rateStore{}, "MongoDB": rates.NewMongo(stacktest.Database(t, stacktest.Client(t))),
	} {
		var last time.Duration
		began := time.Now()
		for i := range 20 {
			limit := rates.Limit{Name: "h", Every: time.Duration(1+i%2) * time.Second, Burst: 1}
			wait, err := store.Reserve(t.Context(), limit, 1)
			if err != nil {
				t.Fatal(err)
			}
			last = time.Since(began) + wait
		}
		if last < 19*time.Second {
			t.Errorf("%s: 20 calls take %v", name, last)
		}
	}
}
