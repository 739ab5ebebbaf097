//go:build unix

package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// An event with two topics is delivered to both, in order in each, also across a kill.
func TestFanOut(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order", "audit"}})

	both := []string{s.TopicOf("order"), s.TopicOf("audit")}
	s.SetConfig("topics.rules", []any{map[string]any{"match": map[string]any{"aggregatetype": "order"}, "to": both}})
	s.Route = func(string) []string { return both }

	topics := s.ReadTopics("order", "audit")
	p := s.StartRelay()
	p.WaitTookOver()

	load := s.StartLoad(kit.Load{Rate: 500})
	topics.WaitDistinct(400)

	p.Kill()
	s.StartRelay().WaitTookOver()
	topics.WaitDistinct(2*s.Ledger.CountCommitted() + 100)

	load.Stop()
	s.CheckDelivery(topics)
}

// Two tenants match one pattern and use equal ids in string form. A third collection has a similar name. A
// tenant that is created later is found.
func TestTwoTenantsWithEqualIDs(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	s.SetConfig("watch", []string{s.Prefix + "_t*.outbox"})
	topics := s.ReadTopics()
	tenant := func(name string) func(from, to int) {
		coll := s.Client.Database(s.Prefix + "_" + name).Collection("outbox")
		return func(from, to int) {
			for i := from; i < to; i++ {
				s.AppendEvents(coll,
					event.New(event.Aggregate{Type: "order", ID: "k"}, "Changed", event.Bytes("", []byte(name)), event.WithID(fmt.Sprintf("id-%d", i))),
					event.New(event.Aggregate{Type: "order", ID: "k"}, "Changed", event.Bytes("", []byte(name)), event.WithID(fmt.Sprintf("0190c0de-0000-7000-8000-%012d", i))))
			}
		}
	}

	one, two, late := tenant("t1"), tenant("t2"), tenant("t3")
	one(0, 10)
	two(0, 10)
	if _, err := s.Client.Database(s.Prefix+"_x").Collection("outbox").InsertOne(t.Context(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Foreign", event.Bytes("", []byte("not of the pattern")))); err != nil {
		t.Fatal(err)
	}

	p := s.StartRelay()
	p.WaitTookOver()
	one(10, 20)
	two(10, 20)
	late(0, 10)
	topics.WaitDistinct(2 * (20 + 20 + 10))
	p.Kill()
	one(20, 30)
	two(20, 30)
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
}

// Documents in the form of Debezium users: no timestamp, no headers, ids and aggregate ids of any type, a
// payload that is a document.
func TestDocumentsInDebeziumsShape(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	oid, owner := bson.NewObjectID(), bson.NewObjectID()
	ns := s.DB.Name() + ".outbox"
	for _, c := range []struct {
		id, aggregateID, payload any
		wantID, key, value       string
	}{
		{oid, int32(7), bson.D{{Key: "total", Value: 12.5}}, oid.Hex(), "7", `{"total":12.5}`},
		{"plain", int64(1) << 40, "text", "plain", "1099511627776", "text"},
		{bson.NewObjectID().Hex(), owner, bson.Binary{Data: []byte{0, 1}}, "", owner.Hex(), "\x00\x01"},
	} {
		doc := bson.D{{Key: "_id", Value: c.id}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: c.aggregateID}, {Key: "type", Value: "Placed"}, {Key: "payload", Value: c.payload}}
		if _, err := s.Outbox().InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
		if c.wantID == "" {
			c.wantID = c.id.(string)
		}
		s.Ledger.Add(kit.Entry{NS: ns, ID: c.wantID, Key: c.key, Topics: []string{s.TopicOf("order")}, Payload: []byte(c.value)})
	}

	s.CheckDelivery(topics)
	ambiguous := topics.WaitForRecord("a string id that looks like an ObjectId", func(r *kit.Record) bool { return string(r.Key) == owner.Hex() })
	if got := ambiguous.Header("outrelay-id-type"); got != "string" {
		t.Errorf("outrelay-id-type %q of an ambiguous id", got)
	}
}

// N17: each class of error that makes an envelope a dead letter at once leaves a letter, and the other events
// of the key are delivered in order.
func TestDeadAtOnce(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order", "narrow"}, Partitions: 1, Topic: []kafka.ConfigEntry{{ConfigName: "max.message.bytes", ConfigValue: "20000"}}})
	s.SetConfig("topics.allow", []string{s.Prefix + ".*"})
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	ns := s.DB.Name() + ".outbox"
	big := make([]byte, 100_000)
	huge := make([]byte, 2<<20)
	for i, c := range []struct {
		class record.Class
		ev    event.Event
		doc   bson.D
	}{
		{class: record.Malformed, doc: bson.D{{Key: "_id", Value: "no-type"}, {Key: "aggregateid", Value: "k"}, {Key: "payload", Value: "x"}}},
		{class: record.Malformed, doc: bson.D{
			{Key: "_id", Value: "bad-header"},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "k"},
			{Key: "type", Value: "x"},
			{Key: "payload", Value: "x"},
			{Key: "headers", Value: bson.A{bson.D{{Key: "k", Value: "id"}, {Key: "v", Value: bson.Binary{Data: []byte("mine")}}}}},
		}},
		{class: record.NotAllowed, ev: event.New(event.Aggregate{Type: "order", ID: "k"}, "x", event.Bytes("", []byte("p")), event.WithID("not-allowed"), event.WithTopic("somewhere-else"))},
		{class: record.PartitionOutOfRange, ev: event.New(event.Aggregate{Type: "order", ID: "k"}, "x", event.Bytes("", []byte("p")), event.WithID("partition"), event.WithPartition(99))},
		{class: record.Expired, ev: event.New(event.Aggregate{Type: "order", ID: "k"}, "x", event.Bytes("", []byte("p")), event.WithID("expired"), event.WithExpiry(time.Now().Add(-time.Hour)))},
		{class: record.MessageTooLarge, ev: event.New(event.Aggregate{Type: "order", ID: "k"}, "x", event.Bytes("", big), event.WithID("too-large-for-the-topic"))},
		{class: record.MessageTooLarge, ev: event.New(event.Aggregate{Type: "order", ID: "k"}, "x", event.Bytes("", huge), event.WithID("too-large-for-any"))},
	} {
		s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 2*i, 50))
		raw, err := bson.Marshal(c.doc)
		id := ""
		if c.doc == nil {
			raw, err = c.ev.MarshalBSON()
			id = c.ev.ID().String()
		} else {
			id = c.doc[0].Value.(string)
		}
		if err == nil {
			_, err = s.Outbox().InsertOne(t.Context(), bson.Raw(raw))
		}
		if err != nil {
			t.Fatal(err)
		}

		s.Ledger.Add(kit.Entry{NS: ns, ID: id, Key: "k", Topics: []string{s.TopicOf("order")}})
		s.Ledger.MarkDead(ns, id)
		s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 2*i+1, 50))
		s.CheckDelivery(topics)
		s.CheckDead()
		var letter letters.Dead
		if err := s.State.Collection("letters").FindOne(t.Context(), bson.D{{Key: "id", Value: id}}).Decode(&letter); err != nil {
			t.Fatalf("%s: %v", id, err)
		}

		switch {
		case letter.Class != c.class, letter.Reason == "", letter.NS != ns, letter.Delivery != 0, letter.Source.Kind != "relay", letter.MovedAt.IsZero(), len(letter.Attempts) != 1, letter.Pos == "":
			t.Errorf("%s: dead letter %+v", id, letter)
		case strings.Contains(letter.Reason, "mine"):
			t.Errorf("%s: the reason quotes the envelope: %s", id, letter.Reason)
		}

		if c.doc != nil && string(letter.Envelope) != string(raw) {
			t.Errorf("%s: the envelope of the dead letter differs from the inserted one", id)
		}
		if got, err := letter.Envelope.LookupErr("payload"); err == nil && c.doc == nil {
			if want := bson.Raw(raw).Lookup("payload"); !got.Equal(want) {
				t.Errorf("%s: the payload of the dead letter differs from the inserted one", id)
			}
		}
	}
}

func TestPresets(t *testing.T) {
	t.Parallel()
	for preset, c := range map[string]struct {
		set  map[string]any
		want map[string]string
	}{
		"default":     {nil, map[string]string{"type": "Placed", "aggregatetype": ""}},
		"debezium":    {nil, map[string]string{}},
		"plain":       {nil, map[string]string{"type": "Placed", "aggregatetype": "order", "aggregateid": "42", "subject": "sub"}},
		"cloudevents": {map[string]any{"record.source": "https://shop.example/orders"}, map[string]string{"ce_specversion": "1.0", "ce_type": "Placed", "ce_source": "https://shop.example/orders", "ce_subject": "sub", "content-type": "application/json"}},
		"structured":  {map[string]any{"record.preset": "cloudevents", "record.structured": true}, map[string]string{"content-type": "application/cloudevents+json; charset=UTF-8"}},
	} {
		t.Run(preset, func(t *testing.T) {
			t.Parallel()
			s := kit.New(t, kit.Options{Set: c.set})
			if preset != "structured" && preset != "default" {
				s.SetConfig("record.preset", preset)
			}

			topics := s.ReadTopics()
			s.StartRelay().WaitTookOver()
			ev := event.New(event.Aggregate{Type: "order", ID: "42"}, "Placed", event.Bytes("application/json", []byte(`{"total":1}`)), event.WithSubject("sub"), event.WithHeader("own", []byte("h")))
			s.AppendEvents(s.Outbox(), ev)
			r := topics.WaitForRecord("the event", func(r *kit.Record) bool { return true })
			first, own := "id", "h"
			if preset == "debezium" {
				first, own = "__debezium.context.connectorLogicalName", ""
			}
			if r.Headers[0].Key != first || event.ParseID(r.Header("id")) != ev.ID() || r.Header("own") != own || string(r.Key) != "42" {
				t.Errorf("headers %v, key %q", r.Headers, r.Key)
			}

			for name, want := range c.want {
				if got := r.Header(name); got != want {
					t.Errorf("header %s is %q, want %q", name, got, want)
				}
			}

			if ns := routing.NamespaceHash(s.DB.Name() + "." + s.Outbox().Name()); r.Header(record.HeaderNamespace) != string(ns[:]) {
				t.Errorf("the namespace is %x, want %x", r.Header(record.HeaderNamespace), ns)
			}
			if preset == "debezium" && len(r.Headers) != 6 {
				t.Errorf("headers %v, want only the headers of Debezium, four of its context and the id, and the namespace", r.Headers)
			}
			if preset != "structured" {
				if string(r.Value) != `{"total":1}` {
					t.Errorf("value %s", r.Value)
				}
				return
			}

			var ce struct {
				ID, Type, Source, Subject string
				Data                      struct{ Total int }
			}
			if err := json.Unmarshal(r.Value, &ce); err != nil || ce.ID != ev.ID().String() || ce.Type != "Placed" || ce.Subject != "sub" || ce.Source == "" || ce.Data.Total != 1 {
				t.Errorf("value %s: %v", r.Value, err)
			}
		})
	}
}

// TestN07_RejectedRecordsOfDebezium: a record has the base64 of a UUID as its id. The relay finds the envelope by this id, and also an
// envelope with this text as its id.
func TestN07_RejectedRecordsOfDebezium(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{
		Partitions: 1, Topic: []kafka.ConfigEntry{{ConfigName: "max.message.bytes", ConfigValue: "20000"}},
		Set: map[string]any{"record.preset": "debezium"},
	})
	s.StartRelay().WaitTookOver()

	id := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xff}}
	for i, id := range []any{id, "AQIDBAUGBwgJCgsMDQ4P/w=="} {
		doc := bson.D{
			{Key: "_id", Value: id},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: fmt.Sprint(i)},
			{Key: "payload", Value: bson.Binary{Data: make([]byte, 100_000)}},
		}
		if _, err := s.Outbox().InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}

		stacktest.Eventually(t, "the dead letter has the envelope", func() bool {
			letters := s.State.Collection("letters")
			n, err := letters.CountDocuments(t.Context(), bson.D{{Key: "id", Value: id}, {Key: "envelope.aggregateid", Value: fmt.Sprint(i)}})
			return err == nil && n == 1
		})
	}
}

func TestTopicsAreCreatedOnDemand(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{}, Set: map[string]any{"topics.create": map[string]any{"partitions": 3, "replication": 1, "configs": map[string]any{"retention.ms": 3600000}}}})
	s.StartRelay().WaitTookOver()
	s.StartLoad(kit.Load{Events: 50, Type: "fresh"}).WaitDone()
	topics := s.ReadTopics("fresh")
	s.CheckDelivery(topics)
	cl, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers...))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	admin := kadm.NewClient(cl)
	t.Cleanup(func() { deleteTopics(t, s.Brokers, s.TopicOf("fresh")) })
	list, err := admin.ListTopics(t.Context(), s.TopicOf("fresh"))
	if err != nil || len(list[s.TopicOf("fresh")].Partitions) != 3 {
		t.Errorf("%v: %v", err, list)
	}

	configs, err := admin.DescribeTopicConfigs(t.Context(), s.TopicOf("fresh"))
	if err != nil || len(configs) != 1 {
		t.Fatal(err)
	}

	for _, c := range configs[0].Configs {
		if c.Key == "retention.ms" && c.MaybeValue() != "3600000" {
			t.Errorf("retention.ms %s", c.MaybeValue())
		}
	}
}

func deleteTopics(t *testing.T, brokers []string, names ...string) {
	cl := &kafka.Client{Addr: kafka.TCP(brokers...), Transport: &kafka.Transport{}, Timeout: 10 * time.Second}
	_, _ = cl.DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: names})
	cl.Transport.(*kafka.Transport).CloseIdleConnections()
}

// Events for a missing topic wait, status shows them, and they are delivered in order when the topic exists.
// Other events are delivered in the meantime.
func TestMissingTopic(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	p := s.StartRelay()
	p.WaitTookOver()
	missing := make([]event.Event, 30)
	for i := range missing {
		missing[i] = kit.NewEvent("missing", "k", i, 50)
	}

	s.AppendEvents(s.Outbox(), missing[:10]...)
	s.WaitForStatus("the missing topic", func(st kit.Status) bool {
		b := st.Unwritable
		return len(b) == 1 && b[0].Topic == s.TopicOf("missing") && b[0].Reason != "" && b[0].Count == 10
	})

	orders := s.ReadTopics()
	for i := range 50 {
		s.AppendEvents(s.Outbox(), kit.NewEvent("order", "other", i, 50))
	}

	orders.WaitDistinct(50)
	s.AppendEvents(s.Outbox(), missing[10:20]...)
	// A takeover in between finds the same state.
	p.Kill()
	p = s.StartRelay()
	p.WaitTookOver()
	s.AppendEvents(s.Outbox(), missing[20:]...)
	stacktest.CreateTopic(t, s.TopicOf("missing"), 3)
	s.CheckDelivery(s.ReadTopics("order", "missing"))
	s.WaitForStatus("nothing blocked", func(st kit.Status) bool { return len(st.Unwritable) == 0 && st.State == "live" })
}

// The first start: with the backlog, without it, or from a time on.
func TestFirstStart(t *testing.T) {
	t.Parallel()
	for _, start := range []string{"backlog", "now", "time"} {
		t.Run(start, func(t *testing.T) {
			t.Parallel()
			s := kit.New(t, kit.Options{})
			ns := s.DB.Name() + ".outbox"
			early := make([]event.Event, 20)
			for i := range early {
				early[i] = kit.NewEvent("order", "early", i, 30)
			}

			s.AppendEvents(s.Outbox(), early...)
			// Start times have whole seconds.
			began := clusterTime(t, s)
			stacktest.Eventually(t, "the next second of the server", func() bool {
				_, _ = s.DB.Collection("clock").InsertOne(t.Context(), bson.D{})
				return clusterTime(t, s) > began
			})

			switch start {
			case "now":
				s.SetConfig("start", "now")
			case "time":
				s.SetConfig("start", time.Unix(int64(began)+1, 0).UTC().Format(time.RFC3339))
				s.AppendEvents(s.Outbox(), kit.NewEvent("order", "late", 0, 30))
			}

			if start != "backlog" {
				for _, e := range early {
					s.Ledger.MarkDead(ns, e.ID().String()) // must not be delivered
				}
			}

			topics := s.ReadTopics()
			p := s.StartRelay()
			p.WaitTookOver()
			s.AppendEvents(s.Outbox(), kit.NewEvent("order", "late", 1, 30))
			s.CheckDelivery(topics)
			if bad := problemsAtStart(p.ReadLines(0)); len(bad) > 0 {
				t.Errorf("a healthy first start logs problems: %q", bad)
			}
			// A second start ignores the setting, because there is a position.
			p.Kill()
			s.AppendEvents(s.Outbox(), kit.NewEvent("order", "late", 2, 30))
			s.StartRelay().WaitTookOver()
			s.CheckDelivery(topics)
		})
	}
}

func clusterTime(t *testing.T, s *kit.Scene) uint32 {
	t.Helper()
	var now struct{ OperationTime bson.Timestamp }
	if err := s.DB.RunCommand(t.Context(), bson.D{{Key: "ping", Value: 1}}).Decode(&now); err != nil {
		t.Fatal(err)
	}
	return now.OperationTime.T
}
