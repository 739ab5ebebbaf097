package entity_test

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
)

// records returns the events of the outbox as records that the relay would write with this preset.
func (w world) records(c routing.PresetConfig) []*transport.Record {
	w.t.Helper()
	preset, err := routing.NewPreset(c)
	if err != nil {
		w.t.Fatal(err)
	}

	cur, err := w.db.Collection("outbox").Find(w.t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	if err != nil {
		w.t.Fatal(err)
	}

	meta := routing.Meta{DB: []byte(w.db.Name()), Coll: []byte("outbox"), CommitMS: time.Now().UnixMilli()}
	var list []*transport.Record
	for cur.Next(w.t.Context()) {
		var v envelope.View
		if err := envelope.Parse(cur.Current, &v); err != nil {
			w.t.Fatal(err)
		}

		var rec record.Record
		if err := preset.Filler().Fill(&v, &meta, routing.Target{Topic: "orders", Partition: record.AnyPartition}, &rec); err != nil {
			w.t.Fatal(err)
		}

		r := &transport.Record{Topic: "orders", Offset: int64(len(list)), Key: bytes.Clone(rec.Key), Value: bytes.Clone(rec.Value)}
		for _, h := range rec.Headers {
			r.Headers = append(r.Headers, event.Header{Key: string(h.Key), Value: bytes.Clone(h.Value)})
		}

		list = append(list, r)
	}

	if err := cur.Err(); err != nil {
		w.t.Fatal(err)
	}

	return list
}

// With every preset of the relay, a projector reads the same changes from the records, including
// tombstones.
func TestChangesSurviveEachPreset(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.history()
	for name, c := range map[string]routing.PresetConfig{
		"debezium": {Name: routing.Debezium}, "plain": {Name: routing.Plain}, "binary": {Name: routing.CloudEvents},
		"structured": {Name: routing.CloudEvents, Structured: true},
	} {
		p, err := entity.NewProjector[order, orderID](w.db.Collection(name), "order")
		if err != nil {
			t.Fatal(err)
		}

		for i, r := range w.records(c) {
			m := &consumer.Message{Topic: r.Topic, Offset: r.Offset, Key: r.Key, Value: r.Value, Headers: r.Headers}
			if err := consumer.Decode(t.Context(), m); err != nil {
				t.Fatal(err)
			}

			if err := p.Handle(t.Context(), m); err != nil {
				t.Errorf("%s: %v", name, err)
			}

			if i == 2 { // deleted
				w.checkDocuments(name)
			}
		}

		w.checkDocuments(name, w.listStored("orders")...)
	}
}

// In a consumer, the projection and the inbox share a transaction. A message that the projector
// does not understand becomes a dead letter, and the other messages continue.
func TestProjectorBehindAConsumer(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.history()
	broker := memory.NewBroker(0)
	c, err := consumer.New("readers", w.db, consumer.WithTopics("orders"), consumer.WithSurroundings(consuming.Surroundings{Transport: broker}), consumer.WithCommitCount(1))
	if err != nil {
		t.Fatal(err)
	}

	p := w.projector()
	if err := c.Handle("order.*", consumer.Batch(0, p.HandleBatch, "order.*")); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var ms []transport.Record
	for _, r := range w.records(routing.PresetConfig{Name: routing.Plain}) {
		ms = append(ms, *r)
	}

	strange := consumer.Message{Headers: ms[1].Headers}
	strange.SetHeader("id", []byte("strange"))
	strange.SetHeader("entity-id", []byte("int64:5"))
	foreign := ms[1]
	foreign.Headers = strange.Headers
	// All records arrive a second time.
	ms = slices.Concat(ms[:2], []transport.Record{foreign}, ms[2:], ms)
	if err := broker.Publish(ctx, "orders", ms); err != nil {
		t.Fatal(err)
	}

	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(run) }()
	if err := broker.AwaitCommitted(ctx, "readers", "orders"); err != nil {
		t.Error(err)
	}

	stop()
	ending, cancelEnding := context.WithTimeout(t.Context(), time.Minute)
	defer cancelEnding()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-ending.Done():
		t.Fatal("the consumer does not end")
	}

	w.checkDocuments("view", w.listStored("orders")...)
	n, err := w.db.Collection(deadletter.DefaultCollection).CountDocuments(ctx, bson.D{})
	if n != 1 || err != nil {
		t.Errorf("%d dead letters, %v", n, err)
	}
}
