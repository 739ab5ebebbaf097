package pipeline

import (
	"bytes"
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
	"github.com/outrelay/outrelay/internal/relay/tracing"
	"github.com/outrelay/outrelay/pkg/event"
)

// ackingSink acks each record at once.
type ackingSink struct {
	*fakeSink
	tickets []record.Ticket
	offset  int64
}

func (s *ackingSink) Send(rec *record.Record, t record.Ticket) error {
	s.tickets = append(s.tickets[:0], t)
	s.acks.Acked(record.TopicPartition{Topic: rec.Topic}, s.offset, s.tickets, len(rec.Value))
	s.offset++
	return nil
}

// The clock of the server is a system call, which costs as much as a tenth of an event.
func TestAnEventOfTheStreamCostsNoAllocationAndNoClock(t *testing.T) {
	e := event.New(event.Aggregate{Type: "order", ID: "7"}, "Placed", event.Bytes("", []byte("p")), event.WithID("e-1"))
	doc, err := e.MarshalBSON()
	if err != nil {
		t.Fatal(err)
	}
	uuid := [16]byte(bytes.Repeat([]byte{7}, 16))
	raw, err := bson.Marshal(bson.D{
		{Key: "_id", Value: bson.D{{Key: "_data", Value: "8266A1B2C3000000012B022C0100296E5A1004"}}},
		{Key: "operationType", Value: "insert"},
		{Key: "clusterTime", Value: bson.Timestamp{T: 1, I: 1}},
		{Key: "collectionUUID", Value: bson.Binary{Subtype: 4, Data: uuid[:]}},
		{Key: "wallTime", Value: time.Unix(1, 0)},
		{Key: "fullDocument", Value: bson.Raw(doc)},
		{Key: "ns", Value: bson.D{{Key: "db", Value: "shop"}, {Key: "coll", Value: "outbox"}}},
		{Key: "documentKey", Value: bson.D{{Key: "_id", Value: bson.Raw(doc).Lookup("_id")}}},
	})
	if err != nil {
		t.Fatal(err)
	}

	r, _, _ := newTestDispatcher(t, Config{})
	s := &ackingSink{fakeSink: &fakeSink{acks: r.Resolver}}
	router, err := routing.New(routing.Config{})
	if err != nil {
		t.Fatal(err)
	}
	preset, err := routing.NewPreset(routing.PresetConfig{Name: routing.Debezium})
	if err != nil {
		t.Fatal(err)
	}
	scope, err := changes.ParseScope([]string{"shop.outbox"})
	if err != nil {
		t.Fatal(err)
	}

	readings := 0
	clock := func() time.Time { readings++; return time.Now() }
	build := BuildConfig{Router: router, Preset: preset, Scope: scope, Now: clock, Tap: tracing.NewTap(nil, nil, time.Now)}
	p := NewPump(build, FeedConfig{Dispatcher: NewDispatcher(r.Resolver, s), StampMargin: 60}, PumpConfig{
		Collections: map[[16]byte]bool{uuid: true}, Swept: sweep.NewSkip(1 << 10),
	})
	deliver := func() {
		if err := p.handleEvent(context.Background(), raw); err != nil {
			t.Fatal(err)
		}
	}
	deliver()
	if n := testing.AllocsPerRun(1000, deliver); n >= 1 {
		t.Errorf("%.0f allocations for each event", n)
	}
	if readings > 0 {
		t.Errorf("the clock was read %d times for 1000 events that do not expire", readings)
	}
}
