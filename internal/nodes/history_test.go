package nodes

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

// The history of a watcher is that of its slots, and does not grow without a limit.
func TestHistoryOfAWatcher(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("history")
	h := NewHistory(coll)
	began := time.Now().UTC().Truncate(time.Minute).Add(-time.Hour)
	add := func(slot string, minute int, rate, lag float64) {
		t.Helper()
		if err := h.Append(t.Context(), slot, Sample{began.Add(time.Duration(minute)*time.Minute + time.Second), rate, lag}); err != nil {
			t.Fatal(err)
		}
	}
	add("orders/0of2", 0, 10, 1)
	add("orders/1of2", 0, 5, 4)
	add("orders/0of2", 1, 20, 2)
	add("orders2/0of1", 0, 99, 99)

	got, err := h.Read(t.Context(), "orders")
	if err != nil || len(got) != 2 || !got[0].At.Equal(began) || got[0].Rate != 15 || got[0].LagS != 4 || got[1].Rate != 20 {
		t.Errorf("got %+v, %v", got, err)
	}
	if none, err := h.Read(t.Context(), "nobody"); err != nil || len(none) != 0 {
		t.Errorf("of a watcher that never ran: %+v, %v", none, err)
	}

	full := make([]Sample, historyKept)
	for i := range full {
		full[i] = Sample{At: began.Add(-time.Duration(historyKept-i) * time.Minute), Rate: 1}
	}
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "full/0of1"}, {Key: "samples", Value: full}}); err != nil {
		t.Fatal(err)
	}
	add("full/0of1", 0, 7, 0)
	got, err = h.Read(t.Context(), "full")
	if err != nil || len(got) != historyKept || got[historyKept-1].Rate != 7 || !got[0].At.Equal(full[1].At) {
		t.Errorf("%d samples, %v", len(got), err)
	}
}
