package sweep

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// TestN22_AListOfStampsIsSweptOnce: a list is no stamp, also if a read fails after it and the sweep continues there.
func TestN22_AListOfStampsIsSweptOnce(t *testing.T) {
	t.Parallel()
	for _, failing := range []bool{false, true} {
		t.Run(fmt.Sprint("failing=", failing), func(t *testing.T) {
			t.Parallel()
			b := newBundle(t)
			coll := b.newOutbox("o")
			var docs []any
			for i := range 100 {
				ts := any(bson.Timestamp{T: uint32(1000 + i), I: 1})
				if i == 31 {
					ts = bson.A{ts}
				}
				docs = append(docs, bson.D{{Key: "_id", Value: fmt.Sprintf("e%03d", i)}, {Key: "ts", Value: ts}, {Key: "payload", Value: make([]byte, 2000)}})
			}
			if _, err := coll.InsertMany(t.Context(), docs); err != nil {
				t.Fatal(err)
			}

			heal := func() {}
			p := &publisher{deliver: func(e *outboxes.Envelope) error {
				if failing && e.Raw.Lookup("_id").StringValue() == "e030" {
					heal = stacktest.FailCommand(t, b.app, bson.D{{Key: "times", Value: 1}}, bson.D{
						{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: 43},
					})
				}
				return nil
			}}
			b.run(b.newSweep(b.clusterTime(), p, "o"))
			heal()

			ids := slices.Sorted(slices.Values(p.ids))
			if different := len(slices.Compact(slices.Clone(ids))); different != 100 || len(ids) != 100 {
				t.Errorf("swept %d envelopes, %d different ones, want 100", len(ids), different)
			}
		})
	}
}

// TestN22_OnlyADueTimeIsLeftToTheSchedule: the stream makes a dead letter of an envelope whose dueAt is no date, so a sweep delivers it.
func TestN22_OnlyADueTimeIsLeftToTheSchedule(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	now := time.Now()
	var want []string
	for i, dueAt := range []any{nil, "2020", int32(5), int64(5), bson.Timestamp{T: 1}, bson.A{}, bson.A{now}, bson.A{nil}, bson.D{{Key: "$date", Value: "x"}}, bson.Undefined{}, bson.MinKey{}, true} {
		for _, ts := range []any{bson.Timestamp{}, nil} {
			id := fmt.Sprintf("%02d %T", i, ts)
			if _, err := b.newOutbox("o").InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "dueAt", Value: dueAt}, {Key: "ts", Value: ts}}); err != nil {
				t.Fatal(err)
			}
			want = append(want, id)
		}
	}
	for _, dueAt := range []time.Time{now.Add(time.Hour), {}, time.Unix(0, 0)} {
		b.insert(t.Context(), b.newOutbox("o"), "scheduled "+dueAt.String(), bson.E{Key: "dueAt", Value: dueAt})
	}

	p := &publisher{}
	b.run(b.newSweep(b.clusterTime(), p, "o"))
	slices.Sort(p.ids)
	slices.Sort(want)
	p.checkSent(t, want...)
}

// TestN22_AFieldOfAServiceIsNoMark: a service may store a field sentAt in its envelopes, which the stream ignores. A sweep delivers them as
// well, and leaves out only those that the relay has marked as delivered.
func TestN22_AFieldOfAServiceIsNoMark(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	now := time.Now()
	var want []string
	for i, fields := range []bson.D{
		{{Key: "sentAt", Value: now}},
		{{Key: "sentAt", Value: "today"}},
		{{Key: "sentAt", Value: bson.A{now}}},
		{{Key: "sentAt", Value: nil}},
		{{Key: "sent", Value: bson.A{}}},
		{{Key: "sentAt", Value: now}, {Key: "sent", Value: true}},
		{{Key: "sentAt", Value: now}, {Key: "sent", Value: bson.A{"a@example.org"}}},
		{{Key: "sentAt", Value: now}, {Key: "sent", Value: bson.A{bson.D{{Key: "topic", Value: "news"}}}}},
		{{Key: "sentAt", Value: "now"}, {Key: "sent", Value: bson.A{}}},
	} {
		for _, ts := range []any{bson.Timestamp{}, nil} {
			id := fmt.Sprintf("%02d %T", i, ts)
			if _, err := b.newOutbox("o").InsertOne(t.Context(), append(bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: ts}}, fields...)); err != nil {
				t.Fatal(err)
			}
			want = append(want, id)
		}
	}
	for _, places := range []bson.A{{}, {bson.D{{Key: "topic", Value: "orders"}, {Key: "partition", Value: 0}, {Key: "offset", Value: int64(5)}}}} {
		b.insert(t.Context(), b.newOutbox("o"), fmt.Sprint("marked ", len(places)), bson.E{Key: "sentAt", Value: now}, bson.E{Key: "sent", Value: places})
	}

	p := &publisher{}
	b.run(b.newSweep(b.clusterTime(), p, "o"))
	slices.Sort(p.ids)
	slices.Sort(want)
	p.checkSent(t, want...)
}
