//go:build unix

package integration

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// nullable lists all optional fields of an envelope: the fields of the writer and the fields of the relay.
var nullable = []string{
	"key", "topic", "partition", "headers", "contenttype", "schemaversion", "source", "subject", "time", "expiresAt", "slot", "ts",
	"dueAt", "scheduledFor", "sentAt", "sent",
}

// If a writer stores null in each field that it does not set, its events are delivered as if the fields were
// missing. This includes swept events, events without a topic, events that Kafka rejects for some time, and
// scheduled events. They stay in order across a takeover.
func TestNullFieldsAreAbsent(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order", "strict"}, Set: map[string]any{
		"retry.base": "2s", "retry.cap": "2s", "retry.max_attempts": 1000,
	}})
	// If the limit is below the time that an event needs on its way, Kafka rejects each record.
	const age = "message.timestamp.before.max.ms"
	s.SetTopicConfig("strict", age, "1")
	topics := s.ReadTopics("order", "strict", "late")

	insertNulls(t, s, "swept", "order")
	p := s.StartRelay()
	p.WaitTookOver()
	// Envelopes that are inserted during the sweep may be delivered again after a crash, so wait for its end.
	p.WaitForLog("the gap is closed")
	waiting := func(field string, v any) int { return s.CountState("waiting", bson.D{{Key: field, Value: v}}) }
	scheduled := func() int { return s.CountOutbox(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$ne", Value: nil}}}}) }
	insertNulls(t, s, "rejected", "strict")
	stacktest.Eventually(t, "a rejected envelope is written down", func() bool { return waiting("error.topic", s.TopicOf("strict")) > 0 })
	n := insertNulls(t, s, "parked", "late")
	insertNulls(t, s, "scheduled", "order", bson.E{Key: "dueAt", Value: time.Now().Add(time.Second)})
	stacktest.Eventually(t, "the waiting envelopes are stored", func() bool {
		return waiting("topics", s.TopicOf("late")) == n && scheduled() == 0
	})

	p.Kill()
	s.SetTopicConfig("strict", age, "9223372036854775807")
	s.CreateTopic("late", 6, 1)
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
	stacktest.Eventually(t, "nothing waits any more", func() bool {
		return s.CountHeld() == 0 && scheduled() == 0
	})
}

// Envelopes without a timestamp that a sweep finds, and that Kafka rejects for some time, are delivered in the
// order of their inserts.
func TestN15_UnstampedEnvelopesOfASweepKeepTheirOrder(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"strict"}, Partitions: 1, Set: map[string]any{
		"retry.base": "300ms", "retry.cap": "300ms", "retry.max_attempts": 1000,
	}})

	const age = "message.timestamp.before.max.ms"
	s.SetTopicConfig("strict", age, "1")
	topics := s.ReadTopics("strict")
	var docs []any
	for i := range 200 {
		id, key := fmt.Sprintf("id-%03d", i), fmt.Sprint(i%10)
		docs = append(docs, bson.D{
			{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "strict"}, {Key: "aggregateid", Value: key}, {Key: "type", Value: "Changed"}, {Key: "payload", Value: id},
		})
		s.Ledger.Add(kit.Entry{NS: s.DB.Name() + ".outbox", ID: id, Key: key, Topics: []string{s.TopicOf("strict")}, Payload: []byte(id)})
	}

	if _, err := s.Outbox().InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	s.StartRelay().WaitTookOver()
	// Kafka accepts records that are quick enough, and in the worst case all of them, some by retries.
	stacktest.Eventually(t, "all that waits after a rejected one is written down, or delivered", func() bool {
		return s.CountHeld() > 100 || len(topics.AllRecords()) == len(docs)
	})
	s.SetTopicConfig("strict", age, "9223372036854775807")
	s.CheckDelivery(topics)
}

// insertNulls inserts two envelopes of one key for each nullable field, and two for all fields together. In the
// second envelope the field is null. It returns the number of envelopes.
func insertNulls(t *testing.T, s *kit.Scene, name, aggregateType string, set ...bson.E) (n int) {
	t.Helper()
	var docs []any
	add := func(key string, nulls ...string) {
		id := fmt.Sprintf("%s-%s-%d", name, key, len(docs))
		doc := append(bson.D{
			{Key: "_id", Value: id},
			{Key: "aggregatetype", Value: aggregateType},
			{Key: "aggregateid", Value: name + key},
			{Key: "type", Value: "Changed"},
			{Key: "payload", Value: id},
		}, set...)
		for _, f := range nulls {
			if !slices.ContainsFunc(doc, func(e bson.E) bool { return e.Key == f }) {
				doc = append(doc, bson.E{Key: f, Value: nil})
			}
		}
		docs = append(docs, doc)
		s.Ledger.Add(kit.Entry{
			NS: s.DB.Name() + ".outbox", ID: id, Key: name + key, Topics: []string{s.TopicOf(aggregateType)}, Payload: []byte(id), Unordered: len(set) > 0,
		})
	}

	for _, field := range nullable {
		add(field)
		add(field, field)
	}
	add("all", nullable...)
	add("all", nullable...)
	if _, err := s.Outbox().InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
	return len(docs)
}
