package memory

import (
	"testing"
	"time"

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
