package nodes

import (
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/activity"
)

// The history of a watcher is that of its slots, and does not grow without a limit.
func TestHistoryOfAWatcher(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("history")
	h := NewHistory(coll)
	began := time.Now().UTC().Truncate(time.Minute).Add(-time.Hour)
	add := func(slot string, minute int, rate, lag float64) {
		t.Helper()
		if err := h.Append(t.Context(), slot, Sample{At: began.Add(time.Duration(minute)*time.Minute + time.Second), Rate: rate, LagS: lag, P50MS: lag, P99MS: 2 * lag}); err != nil {
			t.Fatal(err)
		}
	}
	add("orders/0of2", 0, 10, 1)
	add("orders/1of2", 0, 5, 4)
	add("orders/0of2", 1, 20, 2)
	add("orders2/0of1", 0, 99, 99)

	got, err := h.Read(t.Context(), "orders", HistoryKept)
	if err != nil || len(got) != 2 || !got[0].At.Equal(began) || got[0].Rate != 15 || got[0].LagS != 4 || got[0].P50MS != 4 || got[0].P99MS != 8 || got[1].Rate != 20 {
		t.Errorf("got %+v, %v", got, err)
	}
	if none, err := h.Read(t.Context(), "nobody", HistoryKept); err != nil || len(none) != 0 {
		t.Errorf("of a watcher that never ran: %+v, %v", none, err)
	}

	full := make([]Sample, HistoryKept)
	for i := range full {
		full[i] = Sample{At: began.Add(-time.Duration(HistoryKept-i) * time.Minute), Rate: 1}
	}
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "full/0of1"}, {Key: "samples", Value: full}}); err != nil {
		t.Fatal(err)
	}
	add("full/0of1", 0, 7, 0)
	got, err = h.Read(t.Context(), "full", HistoryKept)
	if err != nil || len(got) != HistoryKept || got[HistoryKept-1].Rate != 7 || !got[0].At.Equal(full[1].At) {
		t.Errorf("%d samples, %v", len(got), err)
	}
	if got, err = h.Read(t.Context(), "full", 2); err != nil || len(got) != 2 || got[1].Rate != 7 {
		t.Errorf("the newest two samples: %+v, %v", got, err)
	}
}

// The activity of a slot is replaced, and keeps the minutes of the slot. The rates of an owner that has stopped are 0.
func TestActivityOfAWatcher(t *testing.T) {
	t.Parallel()
	h := NewHistory(stacktest.Database(t, stacktest.Client(t)).Collection("history"))
	now := time.Now().UTC().Truncate(time.Millisecond)
	save := func(slot string, at time.Time, offset int64) {
		t.Helper()
		r := activity.Report{
			At: at, Topics: []activity.Topic{{Topic: "t", Rate: 3, P99MS: 2, Offset: offset, LastAt: at}}, Others: activity.Others{Topics: 1, Rate: 4},
			Events: []activity.Event{{ID: "e", Topic: "t", AckedAt: at}},
		}
		if err := h.SaveActivity(t.Context(), slot, r); err != nil {
			t.Fatal(err)
		}
	}
	if r, err := h.ReadSlotActivity(t.Context(), "orders/0of2"); err != nil || len(r.Topics) != 0 {
		t.Errorf("without a report: %+v, %v", r, err)
	}

	if err := h.Append(t.Context(), "orders/0of2", Sample{At: now, Rate: 1, LagS: 1}); err != nil {
		t.Fatal(err)
	}
	save("orders/0of2", now, 1)
	save("orders/0of2", now, 2)
	save("orders/1of2", now.Add(-time.Hour), 3)
	save("orders2/0of1", now, 4)

	list, err := h.ReadActivity(t.Context(), "orders")
	if err != nil || len(list) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	slices.SortFunc(list, func(a, b activity.Report) int { return b.At.Compare(a.At) })
	if live := list[0]; live.Topics[0].Offset != 2 || live.Topics[0].Rate != 3 || live.Others.Rate != 4 || len(live.Events) != 1 || !live.At.Equal(now) {
		t.Errorf("%+v", live)
	}
	if stopped := list[1]; stopped.Topics[0].Offset != 3 || stopped.Topics[0].Rate != 0 || stopped.Topics[0].P99MS != 0 || stopped.Others.Rate != 0 || len(stopped.Events) != 1 {
		t.Errorf("%+v", stopped)
	}
	if samples, err := h.Read(t.Context(), "orders", HistoryKept); err != nil || len(samples) != 1 {
		t.Errorf("the minutes: %+v, %v", samples, err)
	}
}
