package pipeline

import (
	"errors"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/tracing"
)

// newTestOutlet returns an outlet with these rules, whose sink has every record already.
func newTestOutlet(t *testing.T, cfg routing.Config) *Outlet {
	t.Helper()
	router, err := routing.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	preset, err := routing.NewPreset(routing.PresetConfig{Name: routing.Debezium})
	if err != nil {
		t.Fatal(err)
	}
	resolver, _, _ := newTestDispatcher(t, Config{})
	build := BuildConfig{Router: router, Preset: preset, Now: time.Now, Tap: tracing.NewTap(nil, nil, time.Now)}
	return NewOutlet(build, NewDispatcher(resolver.Resolver, sinkWithHits{&fakeSink{acks: resolver.Resolver, got: make(chan struct{}, 10)}}))
}

// sinkWithHits has read back a record of every envelope in each topic.
type sinkWithHits struct{ *fakeSink }

func (sinkWithHits) FindHit(rec *record.Record) (record.TopicPartition, int64, bool) {
	return record.TopicPartition{Topic: rec.Topic}, 7, true
}

func newTestEnvelope(t *testing.T, fields ...bson.E) *outboxes.Envelope {
	t.Helper()
	raw, err := bson.Marshal(append(bson.D{
		{Key: "_id", Value: "e-1"}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "Placed"}, {Key: "payload", Value: nil},
	}, fields...))
	if err != nil {
		t.Fatal(err)
	}
	envelope := outboxes.NewEnvelope("shop.outbox", raw)
	return &envelope
}

// N8: a takeover recognizes the records of a waiting envelope without its headers, although the rules discard it now.
func TestN08_HitsOfListedTopicsNeedNoRouting(t *testing.T) {
	t.Parallel()
	outlet := newTestOutlet(t, routing.Config{
		Rules: []routing.Rule{{Headers: map[string]string{"tenant": "*"}, To: []string{"t"}}, {Drop: true}}, Allow: []string{"t"},
	})
	envelope := newTestEnvelope(t)
	envelope.Pending = []string{"t", "formerly-allowed"}
	hits, all := outlet.FindHits(envelope)
	if len(hits) != 2 || !slices.Equal(all, []string{"t", "formerly-allowed"}) {
		t.Errorf("hits %v in %v", hits, all)
	}

	// The routing decides the targets of an envelope that lists none.
	if hits, all = outlet.FindHits(newTestEnvelope(t, bson.E{Key: "headers", Value: bson.D{{Key: "tenant", Value: "x"}}})); len(hits) != 1 || !slices.Equal(all, []string{"t"}) {
		t.Errorf("hits %v in %v", hits, all)
	}
}

// N17: a topic that may no longer be written decides nothing about the other topics of an envelope.
func TestN17_ATopicThatIsNotAllowedRejectsNotTheEnvelope(t *testing.T) {
	t.Parallel()
	outlet := newTestOutlet(t, routing.Config{Allow: []string{"b"}})
	var reported []record.Published
	err := outlet.Publish(t.Context(), newTestEnvelope(t), []string{"a"}, func(published record.Published) { reported = append(reported, published) })
	if err != nil || len(reported) != 1 || len(reported[0].Results) != 1 {
		t.Fatalf("reported %v, %v", reported, err)
	}
	if result := reported[0].Results[0]; result.Topic != "a" || result.Rejection == nil || result.Rejection.Class != record.NotAllowed {
		t.Errorf("the result is %+v", result)
	}
}

// N19: a scheduled envelope has no place in the order of its key, so a rejection stops no other one, and nothing has to resume the key.
func TestN19_ARejectedScheduledEnvelopeStopsNoKey(t *testing.T) {
	t.Parallel()
	outlet := newTestOutlet(t, routing.Config{})
	envelope := newTestEnvelope(t)
	envelope.Unordered = true
	published := make(chan record.Published, 1)
	if err := outlet.Publish(t.Context(), envelope, nil, func(results record.Published) { published <- results }); err != nil {
		t.Fatal(err)
	}

	dispatcher := outlet.dispatcher
	ticket := dispatcher.sink.(sinkWithHits).sent[0]
	dispatcher.Withdrawn([]record.Withdrawn{{
		Ticket: ticket, Topic: "outbox.event.order", Key: []byte("7"), Rejection: &record.Rejection{Class: record.RecordRejected}, Bytes: 10,
	}})
	if results := (<-published).Results; len(results) != 1 || results[0].Rejection == nil {
		t.Errorf("results %+v", results)
	}
	if n := dispatcher.gates.active.Load(); n != 0 {
		t.Errorf("%d keys are stopped", n)
	}
}

// N17: whether an expired envelope was sent in time is unknown until the topics that may have its records are read back. It waits for these
// topics, and has expired in the others.
func TestN17_AnEnvelopeOfAnUnreadTopicHasNotExpired(t *testing.T) {
	t.Parallel()
	outlet := newTestOutlet(t, routing.Config{})
	expired := newTestEnvelope(t, bson.E{Key: "expiresAt", Value: time.Now().Add(-time.Hour)})
	expired.Pending = []string{"parked", "read", "unread"}
	sink := &fakeSink{unread: map[string]bool{"unread": true}, hold: map[string]error{"unread": record.ErrPartitionParked}, got: make(chan struct{}, 10)}
	outlet.dispatcher.sink = sink

	// The turn of the parked topic has not come.
	var published record.Published
	if err := outlet.Publish(t.Context(), expired, []string{"read", "unread"}, func(results record.Published) { published = results }); err != nil {
		t.Fatal(err)
	}
	for _, result := range published.Results {
		isExpired := result.Rejection != nil && result.Rejection.Class == record.Expired
		if isExpired != (result.Topic == "read") || errors.Is(result.Held, record.ErrPartitionParked) != (result.Topic == "unread") {
			t.Errorf("%+v", result)
		}
	}
	if len(published.Results) != 2 || len(sink.sent) > 0 {
		t.Errorf("results %+v; %d sent", published.Results, len(sink.sent))
	}

	// Its record in another topic may be unread.
	sink.unread = map[string]bool{"parked": true}
	published = record.Published{}
	err := outlet.Publish(t.Context(), expired, []string{"read", "unread"}, func(results record.Published) { published = results })
	if err != nil || len(published.Results) != 2 {
		t.Errorf("%+v, %v", published, err)
	}

	sink.unread = nil
	var rejection *record.Rejection
	if err := outlet.Publish(t.Context(), expired, []string{"read", "unread"}, nil); !errors.As(err, &rejection) || rejection.Class != record.Expired {
		t.Errorf("with all topics read: %v", err)
	}
}
