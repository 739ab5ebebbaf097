package process_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func (b *bundle) newOperator() admin.Operator {
	return admin.Operator{State: b.state, Watcher: "default", Actor: "ann"}
}

// countDryRun returns the count of a dry run, over all collections.
func (b *bundle) countDryRun(from time.Time) (n int64) {
	b.t.Helper()
	o := b.newOperator()
	o.Outboxes = func(ctx context.Context) ([]outboxes.Outbox, error) {
		return outboxes.ListOutboxes(ctx, b.client, func(_, coll []byte) bool { return string(coll) == "outbox" }, b.db.Name())
	}

	plan, err := o.Recovery().PlanSweep(b.t.Context(), from)
	if err != nil {
		b.t.Fatal(err)
	}

	for _, s := range plan {
		n += s.Envelopes
	}

	return n
}

// TestAnOrderedSweepSendsTheNumberOfItsDryRun: also if the order begins after undelivered envelopes, and if a collection
// was renamed in the meantime, which the watcher has not read.
func TestAnOrderedSweepSendsTheNumberOfItsDryRun(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		// from is a time before now. Zero means everything.
		from time.Duration
		down func(b *bundle)
		want int64
	}{
		{"everything", 0, func(*bundle) {}, 13},
		{"less the margin", 30 * time.Minute, func(*bundle) {}, 3},
		{"all of that time", 2 * time.Hour, func(*bundle) {}, 13},
		{"and undelivered envelopes", time.Second, func(b *bundle) { b.appendTo("outbox", "u1", "u2") }, 5},
		{"and a collection that was renamed in", 30 * time.Minute, func(b *bundle) {
			b.insertAged("stash", newPayloads("stash", 4)...)
			b.rename("stash", "outbox")
		}, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.appendTo("outbox", append(newPayloads("old", 9), "old")...)
			stop := b.start()
			b.readUntil("old")
			b.ageStamps("outbox")
			b.appendTo("outbox", "n0", "n1", "before")
			b.readUntil("before")
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			c.down(b)
			from := time.Time{}
			if c.from > 0 {
				from = time.Now().Add(-c.from)
			}

			if n := b.countDryRun(from); n != c.want {
				t.Errorf("the dry run counts %d, want %d", n, c.want)
			}

			if err := b.newOperator().Recovery().OrderSweep(t.Context(), from); err != nil {
				t.Fatal(err)
			}
			b.start()
			b.log.wait(t, "the gap is closed")
			b.appendTo("outbox", "after")
			if got := len(b.readUntil("after")) - 13 - 1; got != int(c.want) {
				t.Errorf("the sweep sent %d, want %d", got, c.want)
			}
		})
	}
}

// TestN22_AnOrderDuringASweepIsCarriedOut: an operator who sees that the sweep under way begins too late orders another one.
func TestN22_AnOrderDuringASweepIsCarriedOut(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.appendTo("outbox", "old", "before")
	stop := b.start()
	b.readUntil("before")
	b.ageStamps("outbox")
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := b.newOperator().Recovery().OrderSweep(t.Context(), time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}

	// The sweep cannot end before the second order comes.
	read := stacktest.FailCommand(t, "outrelay stream "+b.topic, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: 91}})
	b.start("node="+b.topic, "lease.checkpoint=20ms")
	b.log.wait(t, "sweeping the outbox")
	if err := b.newOperator().Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
		t.Fatal(err)
	}

	read()
	stacktest.Eventually(t, "the gap is closed", func() bool {
		doc, err := b.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Raw()
		return err == nil && doc.Lookup("gap").IsZero()
	})

	b.appendTo("outbox", "after")
	got := b.readUntil("after")
	if n := len(slices.DeleteFunc(slices.Clone(got), func(p string) bool { return p != "old" })); n != 2 {
		t.Errorf("an old envelope was delivered %d times, want once and once more by the second order\n%s", n, b.log.buf.String())
	}
}
