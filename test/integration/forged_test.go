//go:build unix

package integration

import (
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// A service may only insert into its outbox. An insert with fields of the relay could write to a topic that
// topics.allow forbids, or could pass for another delivery. It becomes a dead letter that names the field.
// Other events of the same key are delivered, while the relay runs and after it was stopped.
func TestForgedStateReachesNoTopic(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order", "secret"}})
	s.SetConfig("topics.allow", []string{s.TopicOf("order")})
	s.SetConfig("topics.create.partitions", 1)
	topics := s.ReadTopics()
	past, never := time.Now().Add(-time.Hour), bson.DateTime(1<<62)
	forged := map[string]bson.D{
		"state":     {{Key: "state", Value: "parked"}, {Key: "pending", Value: bson.A{s.TopicOf("secret")}}, {Key: "origin", Value: "requeue"}, {Key: "attempts", Value: 0}, {Key: "nextAt", Value: past}, {Key: "pos", Value: "0"}},
		"internal":  {{Key: "state", Value: "retry"}, {Key: "pending", Value: bson.A{"__" + s.Prefix}}, {Key: "origin", Value: "requeue"}, {Key: "nextAt", Value: past}, {Key: "pos", Value: "0"}},
		"created":   {{Key: "state", Value: "blocked"}, {Key: "pending", Value: bson.A{s.Prefix + "-evil"}}, {Key: "pos", Value: "0"}},
		"never":     {{Key: "state", Value: "retry"}, {Key: "nextAt", Value: never}, {Key: "pos", Value: "0"}},
		"allowed":   {{Key: "state", Value: "parked"}, {Key: "pending", Value: bson.A{s.TopicOf("order")}}, {Key: "origin", Value: "replay"}, {Key: "pos", Value: "0"}},
		"guessed":   {{Key: "state", Value: "parked"}, {Key: "pos", Value: "0"}, {Key: "seal", Value: make([]byte, 16)}},
		"delivery":  {{Key: "delivery", Value: 7}},
		"scheduled": {{Key: "delivery", Value: 7}, {Key: "dueAt", Value: past}},
	}
	ns := s.DB.Name() + ".outbox"
	insert := func(round string) {
		for name, fields := range forged {
			id := round + name
			doc := append(bson.D{
				{Key: "_id", Value: id},
				{Key: "aggregatetype", Value: "order"},
				{Key: "aggregateid", Value: "k"},
				{Key: "type", Value: "PaymentApproved"},
				{Key: "payload", Value: "FORGED"},
			}, fields...)
			if _, err := s.Outbox().InsertOne(t.Context(), doc); err != nil {
				t.Fatal(err)
			}
			s.Ledger.Add(kit.Entry{NS: ns, ID: id, Key: "k", Topics: []string{s.TopicOf("order")}})
			s.Ledger.MarkDead(ns, id)
		}
		s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("real")), event.WithID(round+"real")))
	}

	// This is the state after an operator's requeue: the reconciler reads the collection before the stream
	// supplies the inserts.
	insert("before-")
	p := s.StartRelay()
	p.WaitTookOver()
	s.CheckDelivery(topics)
	insert("live-")
	s.CheckDelivery(topics)
	p.Kill()
	insert("down-")
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
	s.CheckDead()

	for _, round := range []string{"before-", "live-", "down-"} {
		for name, fields := range forged {
			var letter deadletter.Dead
			if err := s.DB.Collection("outbox_dead").FindOne(t.Context(), bson.D{{Key: "_id.id", Value: round + name}}).Decode(&letter); err != nil {
				t.Fatalf("%s%s: %v", round, name, err)
			}
			if letter.Class != "malformed" || !strings.Contains(letter.Reason, fields[0].Key) {
				t.Errorf("%s%s: %s, %s", round, name, letter.Class, letter.Reason)
			}
		}
	}
	s.WaitNoneHeld()
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	names, err := kadm.NewClient(cl).ListTopics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if names.Has(s.Prefix + "-evil") {
		t.Error("a forged document created a topic")
	}
	for _, r := range topics.AllRecords() {
		if r.Topic == s.TopicOf("secret") || string(r.Value) == "FORGED" {
			t.Errorf("topic %s has value %s of key %s", r.Topic, r.Value, r.Key)
		}
	}
	if log := p.ReadLog(); strings.Contains(log, "grant this user") {
		t.Error("the log recommends permissions for the topic of a forged document")
	}
}
