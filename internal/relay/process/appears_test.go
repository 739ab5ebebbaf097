package process_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// appendTo appends envelopes to a collection, in order.
func (b *bundle) appendTo(collection string, payloads ...string) {
	b.t.Helper()
	box, err := outbox.New(b.db, outbox.WithoutTransaction(), outbox.WithCollection(collection))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, p := range payloads {
		if err := box.Append(b.t.Context(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte(p)))); err != nil {
			b.t.Fatal(err)
		}
	}
}

// insertAged appends envelopes whose stamps are older than all margins.
func (b *bundle) insertAged(collection string, payloads ...string) {
	b.t.Helper()
	for i, p := range payloads {
		if _, err := b.db.Collection(collection).InsertOne(b.t.Context(), bson.D{
			{Key: "_id", Value: p},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "k"},
			{Key: "type", Value: "Placed"},
			{Key: "payload", Value: bson.Binary{Data: []byte(p)}},
			{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Add(-time.Hour).Unix()), I: uint32(i + 1)}},
		}); err != nil {
			b.t.Fatal(err)
		}
	}
}

// ageStamps makes the stamps of the envelopes in a collection older than all margins. The relay may create indexes at the same time.
// The server may then interrupt the read, so ageStamps repeats it.
func (b *bundle) ageStamps(collection string) {
	b.t.Helper()
	const queryPlanKilled = 175
	coll := b.db.Collection(collection)
	var docs []struct {
		ID bson.RawValue  `bson:"_id"`
		TS bson.Timestamp `bson:"ts"`
	}
	stacktest.Eventually(b.t, "the envelopes are read", func() bool {
		cur, err := coll.Find(b.t.Context(), bson.D{})
		if err == nil {
			err = cur.All(b.t.Context(), &docs)
		}
		if err != nil && !mongodb.HasCode(err, queryPlanKilled) {
			b.t.Fatal(err)
		}
		return err == nil
	})

	for _, d := range docs {
		older := bson.Timestamp{T: d.TS.T - 3600, I: d.TS.I}
		_, err := coll.UpdateByID(b.t.Context(), d.ID, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: older}}}})
		if err != nil {
			b.t.Fatal(err)
		}
	}
}

// rename gives a collection the name of another, in its place. A rename fails while the relay creates indexes, so it is repeated.
func (b *bundle) rename(from, to string) {
	b.t.Helper()
	stacktest.Eventually(b.t, "the collection is renamed", func() bool {
		err := b.client.Database("admin").RunCommand(b.t.Context(), bson.D{
			{Key: "renameCollection", Value: b.db.Name() + "." + from}, {Key: "to", Value: b.db.Name() + "." + to}, {Key: "dropTarget", Value: true},
		}).Err()
		if err != nil && !strings.Contains(err.Error(), "BackgroundOperationInProgress") {
			b.t.Fatal(err)
		}
		return err == nil
	})
}

// replaceByOut copies a collection into another by $out, which replaces it. The relay may create indexes at the same time, so that
// the server ends the statement without an effect. In that case, replaceByOut repeats it.
func (b *bundle) replaceByOut(from, to string) {
	b.t.Helper()
	const (
		// The message is "indexes of target collection ... changed during processing".
		commandFailed       = 125
		queryPlanKilled     = 175
		backgroundOperation = 12587
	)

	stacktest.Eventually(b.t, "the collection is copied", func() bool {
		cur, err := b.db.Collection(from).Aggregate(b.t.Context(), mongo.Pipeline{{{Key: "$out", Value: to}}})
		if err == nil {
			err = cur.Close(b.t.Context())
		}
		if err != nil && !mongodb.HasCode(err, commandFailed, queryPlanKilled, backgroundOperation) {
			b.t.Fatal(err)
		}
		return err == nil
	})
}

// readUntil returns the payloads of the first records of the topic, up to the record with the
// payload last.
func (b *bundle) readUntil(last string) (payloads []string) {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(b.t)...), kgo.ConsumeTopics(b.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		b.t.Fatal(err)
	}
	defer cl.Close()

	for {
		more := b.poll(cl)
		if more == nil {
			b.t.Fatalf("%q did not arrive; got %q", last, payloads)
		}
		for _, r := range more {
			payloads = append(payloads, string(r.Value))
			if string(r.Value) == last {
				return payloads
			}
		}
	}
}

// newPayloads returns n payloads with a common beginning.
func newPayloads(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprint(prefix, i)
	}
	return out
}

// TestN27_ACollectionThatGetsAWatchedNameIsDeliveredOnce: an envelope may get a watched name by a rename of its collection, or by
// $out. It is delivered then, unless it was delivered under an earlier watched name.
func TestN27_ACollectionThatGetsAWatchedNameIsDeliveredOnce(t *testing.T) {
	t.Parallel()
	for _, watch := range []struct {
		kind, pattern string // "%" is the database
		to            string // a watched name
	}{
		{"collection", "%.outbox", "outbox"},
		{"database", "%.outbox*", "outbox_2"},
		{"cluster", "%*.outbox*", "outbox_2"},
	} {
		for _, how := range []struct {
			name string
			do   func(b *bundle, to string)
			want []string
		}{
			{"renamed in", func(b *bundle, to string) {
				b.insertAged("stash", newPayloads("stash", 20)...)
				b.rename("stash", to)
			}, newPayloads("stash", 20)},
			{"renamed in, in place of another", func(b *bundle, to string) {
				b.appendTo(to, "target")
				b.insertAged("stash", newPayloads("stash", 20)...)
				b.rename("stash", to)
			}, append([]string{"target"}, newPayloads("stash", 20)...)},
			{"out", func(b *bundle, to string) {
				b.insertAged("stash", newPayloads("stash", 20)...)
				b.replaceByOut("stash", to)
			}, newPayloads("stash", 20)},
			{"renamed within", func(b *bundle, to string) {
				b.appendTo("outbox", newPayloads("own", 5)...)
				b.rename("outbox", "outbox_old")
				b.rename("outbox_old", to)
			}, newPayloads("own", 5)},
			{"renamed away and back", func(b *bundle, to string) {
				b.appendTo("outbox", newPayloads("own", 5)...)
				b.rename("outbox", "attic")
				b.appendTo("attic", newPayloads("attic", 5)...)
				b.rename("attic", to)
			}, append(newPayloads("own", 5), newPayloads("attic", 5)...)},
			{"renamed twice", func(b *bundle, to string) {
				b.insertAged("stash", newPayloads("stash", 5)...)
				b.rename("stash", "outbox")
				b.rename("outbox", "outbox_old")
				b.rename("outbox_old", to)
			}, newPayloads("stash", 5)},
		} {
			for _, relay := range []string{"up", "down", "lost"} {
				if relay == "lost" && how.name != "renamed in" && how.name != "renamed within" {
					// All tests share one fail point, so only these two cases set it.
					continue
				}
				if watch.kind == "cluster" && (relay != "down" || !strings.HasPrefix(how.name, "renamed")) {
					// The stream of a cluster differs from the stream of a database only by its pattern.
					continue
				}
				t.Run(watch.kind+"/"+how.name+"/"+relay, func(t *testing.T) {
					t.Parallel()

					b := setup(t)
					set := []string{"watch=" + strings.ReplaceAll(watch.pattern, "%", b.db.Name()), "node=" + b.topic}
					b.appendTo("outbox", "before")
					stop := b.start(set...)
					b.readUntil("before")

					b.ageStamps("outbox")
					if relay != "up" {
						if err := stop(); err != nil {
							t.Fatal(err)
						}
					}

					how.do(b, watch.to)
					// The server can open the stream neither at the token nor at its time.
					if relay == "lost" {
						stacktest.FailCommand(t, "outrelay stream "+b.topic, bson.D{{Key: "times", Value: 2}},
							bson.D{{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: 286}})
					}

					if relay != "up" {
						b.start(set...)
					}
					if relay == "lost" {
						b.log.wait(t, "the gap is closed")
					}

					b.appendTo(watch.to, "after")
					got := b.readUntil("after")
					want := slices.Concat([]string{"before"}, how.want, []string{"after"})
					// Envelopes that were dropped before the relay read them are gone.
					if relay == "lost" {
						want = slices.DeleteFunc(want, func(p string) bool { return p == "target" })
					}

					// A rename in the middle of a sweep ends the term, and the next one repeats the sweep.
					if b.log.countWith("a collection was renamed while it was swept") > 0 {
						seen := map[string]bool{}
						got = slices.DeleteFunc(got, func(payload string) bool { again := seen[payload]; seen[payload] = true; return again })
					}

					if !slices.Equal(got, want) {
						t.Errorf("delivered %q,\nwant %q\n%s", got, want, b.log.buf.String())
					}
				})
			}
		}
	}
}

// TestN27_AQuestionMarkInWatchIsOneCharacter: in the name of a collection and of a database, for the server and for the relay.
func TestN27_AQuestionMarkInWatchIsOneCharacter(t *testing.T) {
	t.Parallel()
	for _, watch := range []string{"%.outbox_?", "^?.outbox_?"} {
		t.Run(watch, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			name := b.db.Name()
			b.appendTo("outbox_1", "before")
			b.start("watch=" + strings.NewReplacer("%", name, "^", name[:len(name)-1]).Replace(watch))
			b.readUntil("before")

			// Envelopes of the collections that are not watched would arrive before the last envelope.
			b.appendTo("outbox_", "unwatched")
			b.appendTo("outbox_22", "unwatched")
			b.appendTo("outbox_2", "after")
			if got, want := b.readUntil("after"), []string{"before", "after"}; !slices.Equal(got, want) {
				t.Errorf("delivered %q, want %q", got, want)
			}
		})
	}
}
