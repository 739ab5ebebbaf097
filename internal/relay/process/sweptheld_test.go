package process_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN22_EnvelopesHeldInASweepKeepTheirOrder: envelopes that were swept while their topic was missing wait at their stamps, and
// go in that order, flagged.
func TestN22_EnvelopesHeldInASweepKeepTheirOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	missing := "late-" + b.topic
	b.append(1)
	stop := b.start()
	b.consume(1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	const n = 300
	for i := range n {
		if err := b.box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "same"}, "Placed", event.Bytes("", fmt.Appendf(nil, "%-10000d", i)), event.WithTopic(missing))); err != nil {
			t.Fatal(err)
		}
	}
	if err := (admin.Operator{State: b.state, Watcher: "default", Actor: "ann"}).Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
		t.Fatal(err)
	}

	// Most of the envelopes find the topic parked.
	b.start("limits.memory=1MiB")
	stacktest.Eventually(t, "all envelopes wait", func() bool { return b.countWaiting(bson.D{}) == n })

	var docs []struct {
		Pos string `bson:"pos"`
	}

	cur, err := b.state.Collection("waiting").Find(t.Context(), bson.D{})
	if err == nil {
		err = cur.All(t.Context(), &docs)
	}
	if err != nil {
		t.Fatal(err)
	}

	seen := map[string]bool{}
	for _, d := range docs {
		if len(d.Pos) != 18 || seen[d.Pos] {
			t.Fatalf("an envelope waits at position %q, want a unique position, made of its stamp", d.Pos)
		}
		seen[d.Pos] = true
	}

	stacktest.CreateTopic(t, missing, 1)
	read := *b
	read.topic = missing
	for i, r := range read.consume(n) {
		if got := strings.TrimSpace(string(r.Value)); got != fmt.Sprint(i) {
			t.Fatalf("record %d is %q", i, got)
		}
		flagged := false
		for _, h := range r.Headers {
			flagged = flagged || h.Key == record.HeaderRedelivered
		}
		if !flagged {
			t.Fatalf("record %d is not flagged", i)
		}
	}
}
