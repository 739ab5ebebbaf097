package pipeline

import (
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/changes"
)

// N15: a reread event may have been sent in time, as long as a partition that can have its record was not read back.
func TestN15_AnEventOfAnUnreadPartitionHasNotExpired(t *testing.T) {
	t.Parallel()
	outlet := newTestOutlet(t, routing.Config{})
	sink := &fakeSink{}
	outlet.dispatcher.sink = sink
	feed := newFeed(outlet.BuildConfig, FeedConfig{Dispatcher: outlet.dispatcher})
	envelope := newTestEnvelope(t, bson.E{Key: "expiresAt", Value: time.Now().Add(-time.Hour)})
	feed.ev = changes.Event{DB: envelope.DB, Coll: envelope.Coll, Document: envelope.Raw, HasDocument: true, Pos: []byte("8266")}
	outlet.dispatcher.BeginReread(false)

	var rejection *record.Rejection
	if err := feed.fillItem(&feed.item, stored{}); !errors.As(err, &rejection) || rejection.Class != record.Expired || len(feed.item.Records) > 0 {
		t.Errorf("all partitions are read: %d records, %v", len(feed.item.Records), err)
	}

	sink.unread = map[string]bool{"outbox.event.order": true}
	if err := feed.fillItem(&feed.item, stored{}); err != nil || len(feed.item.Records) != 1 || !feed.item.Hold {
		t.Errorf("its partition is not read: %d records, held %t, %v", len(feed.item.Records), feed.item.Hold, err)
	}
}
