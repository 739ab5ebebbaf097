package scheduled

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// countSkipped returns how many removed entries the reads of an index of the outbox have passed.
func (p *planned) countSkipped(index string) int64 {
	p.t.Helper()
	var stats bson.Raw
	err := p.db.RunCommand(p.t.Context(), bson.D{{Key: "collStats", Value: p.coll.Name()}, {Key: "indexDetails", Value: true}}).Decode(&stats)
	if err != nil {
		p.t.Fatal(err)
	}
	skipped, known := stats.Lookup("indexDetails", index, "cursor", "Total number of entries skipped by cursor next calls").AsInt64OK()
	if !known {
		p.t.Fatalf("no statistics of %s: %s", index, stats.Lookup("indexDetails"))
	}
	return skipped
}

// MongoDB keeps the entries of removed envelopes in the index. The claims of a backlog do not pass the entries of earlier claims again.
func TestABacklogIsReadOnce(t *testing.T) {
	t.Parallel()
	const n, claim = 3000, 50
	p := newPlanned(t)
	for i := range n / claim {
		p.schedule(claim, -time.Hour+time.Duration(i)*time.Second)
	}
	// Regular looks pass all of them.
	x := p.takeOver(func(c *setUp) { c.claim, c.Poll = claim, time.Minute })
	x.waitSettled(n)

	for _, index := range []string{"dueAt_1_slot_1", "_id_"} {
		if skipped := p.countSkipped(index); skipped > 4*n {
			t.Errorf("%d removed entries of %s were passed for %d envelopes", skipped, index, n)
		}
	}
}

// An envelope that moves to a time before the backlog, which no hint reports, does not wait until the backlog is sent.
func TestABacklogDoesNotDelayAnEarlierEnvelope(t *testing.T) {
	t.Parallel()
	const n, claim = 8000, 5
	p := newPlanned(t)
	for i := range n / 1000 {
		p.schedule(1000, -time.Hour+time.Duration(i)*time.Second)
	}
	moved := p.schedule(1, time.Hour)[0]
	x := p.takeOver(func(c *setUp) { c.claim = claim })
	x.waitUntil("the start of the backlog", func(o *outlet) bool { return len(o.sent) > 5*claim })

	update := bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: time.Now().Add(-2 * time.Hour)}}}}
	if _, err := p.coll.UpdateByID(t.Context(), moved, update); err != nil {
		t.Fatal(err)
	}
	x.waitUntil("the moved envelope", func(o *outlet) bool { return len(o.sent[moved.String()]) > 0 })
	x.outlet.mu.Lock()
	defer x.outlet.mu.Unlock()
	if sent := len(x.outlet.sent); sent > n-10*claim {
		t.Errorf("it was sent after %d of %d others", sent-1, n)
	}
}

// While claims follow each other, each begins where the previous claim has ended, unless a look has found an earlier envelope: before
// the claim ends, or across its end.
func TestAClaimBeginsWithTheFirstEnvelope(t *testing.T) {
	t.Parallel()
	began := time.Now()
	for _, c := range []struct {
		name         string
		found        int64
		across       bool
		after, first int64
	}{
		{"the envelopes of the claim", 100, false, 200, 200},
		{"the envelopes of the claim, across its end", 100, true, 200, 100},
		{"an earlier one", 50, false, 50, 50},
		{"an earlier one, across its end", 50, true, 200, 50},
	} {
		s := New(Config{OnRecovered: func() {}})
		collection := &scheduledCollection{first: 100, looking: true, claimAt: began, size: mongodb.NewPartSize(maxClaim)}
		claimed := &part{scheduledCollection: collection, query: query{from: 100}, list: []taken{{due: 100}, {due: 200}}, full: true}

		look := func() { s.noteLook(collection, &firstDue{at: c.found}, began, began) }
		if !c.across {
			look()
		}
		s.noteClaimed([]*part{claimed})
		if collection.first != c.after {
			t.Errorf("%s: after the claim, the next one begins at %d, want %d", c.name, collection.first, c.after)
		}
		if c.across {
			look()
		}
		if collection.first != c.first || collection.claimAt.IsZero() {
			t.Errorf("%s: the next claim begins at %d, want %d", c.name, collection.first, c.first)
		}
	}
}
