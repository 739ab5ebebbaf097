package process_test

import (
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// The owner reports its deliveries, so that any process of the deployment can show them. The next owner continues the
// report.
func TestOwnersReportTopicsAndRecentEvents(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start("node=one")
	b.append(7)

	op := admin.Operator{State: b.state, Watcher: "default"}
	recent := func() admin.RecentEvents {
		t.Helper()
		r, err := op.Activity().Recent(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	stacktest.Eventually(t, "the owner reports seven events", func() bool { return len(recent().Events) == 7 })
	places := map[[2]int64]bool{}
	for _, r := range b.consume(7) {
		places[[2]int64{int64(r.Partition), r.Offset}] = true
	}
	for _, e := range recent().Events {
		if e.Type != "Placed" || e.Key == "" || e.ID == "" || e.Collection != b.db.Name()+".outbox" || e.Topic != b.topic || !places[[2]int64{int64(e.Partition), e.Offset}] {
			t.Errorf("%+v is at none of %v", e, places)
		}
		if e.CommittedAt.IsZero() || e.LatencyMS == nil || e.AckedAt.Before(e.CommittedAt) && *e.LatencyMS != 0 {
			t.Errorf("%+v", e)
		}
	}

	topics, err := op.Activity().Topics(t.Context())
	if err != nil || len(topics.Topics) != 1 {
		t.Fatalf("%+v, %v", topics, err)
	}
	if one := topics.Topics[0]; one.Topic != b.topic || one.Rate <= 0 || one.BytesRate <= 0 || one.P50MS <= 0 || one.P99MS < one.P50MS || !places[[2]int64{int64(one.LastPartition), one.LastOffset}] {
		t.Errorf("%+v", one)
	}

	if err := stop(); err != nil {
		t.Fatal(err)
	}
	b.start("node=two")
	b.append(1)
	stacktest.Eventually(t, "the next owner reports its event and the others", func() bool { return len(recent().Events) == 8 })
}
