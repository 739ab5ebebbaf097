package process_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// A first start sweeps envelopes without a server stamp, because they have no time. An envelope that can never be sent
// becomes a dead letter in the same way as one of the stream.
func TestFirstStartSweepsUnstampedEnvelopes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, d := range []bson.D{
		{{Key: "_id", Value: "foreign"}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "1"}, {Key: "type", Value: "Placed"}, {Key: "payload", Value: "x"}},
		{{Key: "_id", Value: "malformed"}, {Key: "aggregatetype", Value: 5}},
	} {
		if _, err := b.db.Collection("outbox").InsertOne(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}

	b.append(10)
	stop := b.start()
	flagged := 0
	for i, r := range b.consume(11) {
		for _, h := range r.Headers {
			if h.Key == record.HeaderRedelivered {
				flagged++
			}
		}
		if i == 0 && string(r.Headers[0].Value) == "" {
			t.Error("a record without an id")
		}
	}
	if flagged != 11 {
		t.Errorf("%d of 11 records are flagged", flagged)
	}

	stacktest.Eventually(t, "the malformed envelope is a dead letter", func() bool {
		return b.countLetters(bson.D{{Key: "id", Value: "malformed"}}) == 1
	})

	b.log.wait(t, "the gap is closed")
	b.log.wait(t, `level=INFO msg="sweeping the outbox" epoch=1 reason=backlog`)
	if log := b.log.wait(t, "an envelope is dead"); !strings.Contains(log, "id=malformed") {
		t.Errorf("no line names the envelope: %s", log)
	}
	b.append(1)
	b.consume(12)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	doc, err := b.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Raw()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := doc.LookupErr("gap"); err == nil {
		t.Errorf("the gap is still open: %s", doc.Lookup("gap"))
	}

	stop = b.start() // nothing is swept again
	b.append(1)
	if n := len(b.consume(13)); n != 13 {
		t.Errorf("%d records, want 13", n)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

// An owner that dies right after it has closed a gap leaves a time as the position. The next owner does not have the ids that were swept, so it
// flags the events that the sweep may have sent.
func TestN22_TheNextOwnerFlagsEventsThatASweepMayHaveSent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start()
	b.append(1)
	b.consume(1)
	stacktest.Eventually(t, "everything is resolved", func() bool { return b.status().Unresolved == 0 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	watchers := b.state.Collection("watchers")
	document, err := watchers.FindOne(t.Context(), bson.D{}).Raw()
	if err != nil {
		t.Fatal(err)
	}
	envelope, err := b.db.Collection("outbox").FindOne(t.Context(), bson.D{}).Raw()
	if err != nil {
		t.Fatal(err)
	}
	// The event was committed after its stamp and before the position.
	if _, err := watchers.UpdateOne(t.Context(), bson.D{}, bson.D{
		{Key: "$set", Value: bson.D{
			{Key: "clusterTime", Value: envelope.Lookup("ts")},
			{Key: "swept", Value: bson.D{{Key: "to", Value: envelope.Lookup("ts")}, {Key: "until", Value: document.Lookup("clusterTime")}}},
		}},
		{Key: "$unset", Value: bson.D{{Key: "token", Value: ""}}},
	}); err != nil {
		t.Fatal(err)
	}

	b.start()
	b.append(1)

	for i, r := range b.consume(3) {
		flagged := slices.ContainsFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == record.HeaderRedelivered })
		if flagged != (i == 1) {
			t.Errorf("record %d is flagged: %t", i, flagged)
		}
	}
}
