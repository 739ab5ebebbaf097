package process_test

import (
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestN27_ACollectionThatTheConfigurationNamesLaterIsSwept: the stream contains no inserts from before. An event that is due is sent, nothing
// is purged unsent, and a repeat of an event that an even earlier configuration has sent is flagged.
func TestN27_ACollectionThatTheConfigurationNamesLaterIsSwept(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, start string
		named       bool // by an even earlier configuration
		want        []string
	}{
		{"new", "backlog", false, []string{"aged", "later"}},
		{"new, without its backlog", "now", false, nil},
		{"named before", "backlog", true, []string{"before", "later"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			one := []string{"retention=1m", "purge.interval=100ms", "start=" + c.start, "watch=[" + b.db.Name() + ".outbox]"}
			both := append(one[:3:3], "watch=["+b.db.Name()+".outbox, "+b.db.Name()+".later]")
			run := func(set []string, node, collection, payload string) {
				t.Helper()
				stop := b.start(append(set, "node="+node)...)
				b.waitOwned(node)
				b.appendTo(collection, payload)
				b.readUntil(payload)
				if err := stop(); err != nil {
					t.Fatal(err)
				}
			}

			if c.named {
				run(both, "both", "later", "before")
			} else {
				b.insertAged("later", "aged")
			}
			b.appendTo("later", "later")
			due := bson.D{
				{Key: "_id", Value: "due"},
				{Key: "aggregatetype", Value: "order"},
				{Key: "aggregateid", Value: "due"},
				{Key: "type", Value: "Placed"},
				{Key: "payload", Value: "due"},
				{Key: "ts", Value: bson.Timestamp{}},
				{Key: "dueAt", Value: time.Now()},
			}
			if _, err := b.db.Collection("later").InsertOne(t.Context(), due); err != nil {
				t.Fatal(err)
			}
			// The position passes all of them.
			run(one, "one", "outbox", "own")
			run(both, "again", "later", "after")
			want := append([]string{"after", "due", "end", "own"}, c.want...)
			b.start(append(both, "node=next")...)
			stacktest.Eventually(t, "the due event leaves the outbox", func() bool {
				n, err := b.db.Collection("later").CountDocuments(t.Context(), bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}})
				return err == nil && n == 0
			})
			b.appendTo("later", "end")

			b.readUntil("end")
			b.readUntil("due")
			var payloads []string
			for _, r := range b.consume(len(want)) {
				payload := string(r.Value)
				isFlagged := slices.ContainsFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == record.HeaderRedelivered })
				if payload != "before" || !isFlagged {
					payloads = append(payloads, payload)
				}
			}
			slices.Sort(payloads)
			slices.Sort(want)
			if !slices.Equal(payloads, want) {
				t.Errorf("delivered %q, want %q", payloads, want)
			}
		})
	}
}
