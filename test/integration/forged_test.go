//go:build unix

package integration

import (
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// A service may only insert into its outbox. The relay keeps state, targets and delivery numbers in its own database, so fields of that
// name in an insert have no meaning: the event goes to the topic of its rules, as a first delivery. This holds while the relay runs
// and after it was stopped.
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
				{Key: "aggregateid", Value: id},
				{Key: "type", Value: "PaymentApproved"},
				{Key: "payload", Value: "FORGED"},
			}, fields...)
			if _, err := s.Outbox().InsertOne(t.Context(), doc); err != nil {
				t.Fatal(err)
			}
			s.Ledger.Add(kit.Entry{NS: ns, ID: id, Key: id, Topics: []string{s.TopicOf("order")}, Payload: []byte("FORGED")})
		}
		s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("real")), event.WithID(round+"real")))
	}

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
		if r.Topic == s.TopicOf("secret") || r.Header("outrelay-delivery") != "" {
			t.Errorf("topic %s has a record of key %s with delivery %q", r.Topic, r.Key, r.Header("outrelay-delivery"))
		}
	}
	if log := p.ReadLog(); strings.Contains(log, "grant this user") {
		t.Error("the log recommends permissions for the topic of a forged document")
	}
}
