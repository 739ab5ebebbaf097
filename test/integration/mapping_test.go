//go:build unix

package integration

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outboxtest"
	"github.com/outrelay/outrelay/pkg/relay"
	"github.com/outrelay/outrelay/test/kit"
)

// shopMapping names the fields of shopDocument.
var shopMapping = map[string]any{
	"id": "eventId", "aggregatetype": "kind", "aggregateid": "orderId", "key": "customer", "type": "name", "payload": "body",
	"timestamp": "created", "headers": "meta", "topic": "-",
}

// shopEpoch is the time of the first shopDocument. Kafka deletes records whose timestamps are older than the retention of the topic.
var shopEpoch = time.Now().Add(-time.Hour).Truncate(time.Second)

// shopDocument is an event of a service that was written without outrelay.
func shopDocument(n int, kind string) bson.D {
	return bson.D{
		{Key: "_id", Value: bson.NewObjectID()},
		{Key: "eventId", Value: fmt.Sprintf("event-%d", n)},
		{Key: "kind", Value: kind},
		{Key: "orderId", Value: int32(n)},
		{Key: "customer", Value: int64(n % 3)},
		{Key: "name", Value: "OrderPlaced"},
		{Key: "body", Value: bson.D{{Key: "n", Value: int32(n)}}},
		{Key: "created", Value: shopEpoch.Add(time.Duration(n) * time.Millisecond)},
		{Key: "meta", Value: bson.D{{Key: "traceparent", Value: "00-ab"}}},
		{Key: "topic", Value: bson.D{{Key: "of", Value: "the service"}}}, // the mapping ignores it
	}
}

// Documents with other field names: they are delivered once and in order, wait if their topic is missing, survive a
// kill, and are found by key. A document that does not fit becomes a dead letter that names its field, and can be
// edited.
func TestMappedDocuments(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}})
	s.SetConfig("mapping", shopMapping)
	insert := func(from, to int, kind string) {
		for n := from; n < to; n++ {
			if _, err := s.Outbox().InsertOne(t.Context(), shopDocument(n, kind)); err != nil {
				t.Fatal(err)
			}
			s.Ledger.Add(kit.Entry{
				NS: s.DB.Name() + ".outbox", ID: fmt.Sprintf("event-%d", n), Key: fmt.Sprint(n % 3),
				Topics: []string{s.TopicOf(kind)}, Payload: fmt.Appendf(nil, `{"n":%d}`, n),
			})
		}
	}

	p := s.StartRelay()
	p.WaitTookOver()
	insert(0, 50, "order")
	insert(50, 60, "late")
	stacktest.Eventually(t, "the envelopes without a topic wait", func() bool { return s.CountHeld("parked", "blocked") == 10 })
	p.Kill()
	insert(60, 80, "order")
	p = s.StartRelay()
	p.WaitTookOver()

	code, out, errs := s.RunCommand("lookup", "--key", "2", "--json")
	if code != 0 || !strings.Contains(out, "OrderPlaced") || !strings.Contains(out, "parked") {
		t.Errorf("lookup by the mapped key: %d %s %s", code, out, errs)
	}
	s.CreateTopic("late", 3, 1)
	s.WaitNoneHeld()
	topics := s.ReadTopics("order", "late")
	s.CheckDelivery(topics)
	r := topics.WaitForRecord("event-52", func(r *kit.Record) bool { return r.Header("id") == "event-52" })
	if r.Header("type") != "OrderPlaced" || r.Header("traceparent") != "00-ab" || len(r.Header("outrelay-id")) != 24 || !r.Time.Equal(shopEpoch.Add(52*time.Millisecond)) {
		t.Errorf("the record has headers %v and time %s", r.Headers, r.Time)
	}

	// A document that does not fit.
	bad := shopDocument(99, "order")
	bad[2].Value = bson.A{}
	if _, err := s.Outbox().InsertOne(t.Context(), bad); err != nil {
		t.Fatal(err)
	}
	var letter letters.Dead
	// The command reads what is majority-committed.
	stacktest.Eventually(t, "the document becomes a dead letter", func() bool {
		return mongodb.Majority(s.State.Collection("letters")).FindOne(t.Context(), bson.D{{Key: "id", Value: bad[0].Value}}).Decode(&letter) == nil
	})
	if letter.Class != "malformed" || !strings.Contains(letter.Reason, "kind") || letter.Type != "OrderPlaced" || letter.Key != "0" {
		t.Errorf("dead letter %+v", letter)
	}
	id := bad[0].Value.(bson.ObjectID).Hex()
	if code, out, errs := s.RunCommand("dead", "edit", id, "--version", "0", "--field", "aggregatetype=order", "--yes"); code != 0 {
		t.Fatalf("dead edit: %d %s %s", code, out, errs)
	}
	topics.WaitForRecord("the edited event", func(r *kit.Record) bool { return r.Header("id") == "event-99" })
}

// A watcher over many databases names the tenant in topics and headers. A rule drops events, and a counter shows it.
func TestTenantsInTopics(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{}})
	s.SetConfig("watch", []string{s.Prefix + "_t*.outbox"})
	s.SetConfig("topics.template", s.Prefix+".{database}.{field:meta.region}")
	s.SetConfig("topics.rules", []any{
		map[string]any{"match": map[string]any{"headers": map[string]any{"env": "test*"}}, "drop": true},
		map[string]any{"match": map[string]any{"database": s.Prefix + "_t2", "fields": map[string]any{"vip": "true"}}, "to": []string{s.Prefix + ".vip"}},
	})
	s.SetConfig("record.headers", map[string]any{"tenant": "{database}/{collection}"})
	one, two := s.Prefix+"_t1", s.Prefix+"_t2"
	s.CreateTopic(one+".eu", 1, 1)
	s.CreateTopic(two+".eu", 1, 1)
	s.CreateTopic("vip", 1, 1)
	topics := s.ReadTopics(one+".eu", two+".eu", "vip")
	p := s.StartRelay()
	p.WaitTookOver()

	insert := func(db, id string, region any, more ...bson.E) {
		doc := append(bson.D{
			{Key: "_id", Value: id},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "o"},
			{Key: "type", Value: "Placed"},
			{Key: "payload", Value: "x"},
			{Key: "meta", Value: bson.D{{Key: "region", Value: region}}},
		}, more...)
		if _, err := s.Client.Database(db).Collection("outbox").InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
	}
	insert(one, "a", "eu")
	insert(one, "dropped", "eu", bson.E{Key: "headers", Value: bson.D{{Key: "env", Value: "test-7"}}})
	insert(two, "b", "eu", bson.E{Key: "vip", Value: false})
	insert(two, "c", "eu", bson.E{Key: "vip", Value: true})
	insert(two, "no-region", nil)
	for id, topic := range map[string]string{"a": one + ".eu", "b": two + ".eu", "c": "vip"} {
		r := topics.WaitForRecord(id, func(r *kit.Record) bool { return r.Header("id") == id })
		if r.Topic != s.TopicOf(topic) || r.Header("tenant") == "" || !strings.HasSuffix(r.Header("tenant"), "/outbox") {
			t.Errorf("%s is in %s with headers %v", id, r.Topic, r.Headers)
		}
	}
	stacktest.Eventually(t, "the counter shows the dropped event", func() bool {
		code, body := p.Get("/metrics")
		return code == http.StatusOK && strings.Contains(body, `outrelay_dropped_total{class="dropped"`)
	})
	for _, r := range topics.AllRecords() {
		if r.Header("id") == "dropped" {
			t.Error("the dropped event was sent")
		}
	}

	var letter letters.Dead
	stacktest.Eventually(t, "the event without a region becomes a dead letter", func() bool {
		return s.State.Collection("letters").FindOne(t.Context(), bson.D{{Key: "id", Value: "no-region"}}).Decode(&letter) == nil
	})
	if letter.Class != "malformed" || !strings.Contains(letter.Reason, "field meta.region is missing") {
		t.Errorf("dead letter %+v", letter)
	}
}

// The preset kafka-connector publishes a document of any shape with the key and the bytes of the MongoDB Kafka connector.
// An envelope that had to wait has the same bytes.
func TestConnectorPreset(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{}, Set: map[string]any{"record.preset": "kafka-connector"}})
	s.SetConfig("topics.template", s.Prefix+".{collection}")
	p := s.StartRelay()
	p.WaitTookOver()
	id := bson.NewObjectID()
	doc := bson.D{
		{Key: "_id", Value: id},
		{Key: "total", Value: int64(42)},
		{Key: "at", Value: time.UnixMilli(1700000000123)},
		{Key: "type", Value: bson.A{int32(1), "x"}},
		{Key: "nested", Value: bson.D{{Key: "f", Value: 1e21}, {Key: "none", Value: nil}}},
	}
	if _, err := s.Outbox().InsertOne(t.Context(), doc); err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "the document waits for its topic", func() bool { return s.CountHeld("parked") == 1 })
	s.CreateTopic("outbox", 1, 1)
	topics := s.ReadTopics("outbox")
	later := append(bson.D{{Key: "_id", Value: "later"}}, doc[1:]...)
	if _, err := s.Outbox().InsertOne(t.Context(), later); err != nil {
		t.Fatal(err)
	}
	const rest = `, "total": {"$numberLong": "42"}, "at": {"$date": 1700000000123}, "type": [1, "x"], "nested": {"f": 1.0E21, "none": null}}`
	for key, value := range map[string]string{
		`{"_id": {"$oid": "` + id.Hex() + `"}}`: `{"_id": {"$oid": "` + id.Hex() + `"}` + rest,
		`{"_id": "later"}`:                      `{"_id": "later"` + rest,
	} {
		r := topics.WaitForRecord(key, func(r *kit.Record) bool { return string(r.Key) == key })
		// The envelope that had to wait also has its position.
		own := slices.DeleteFunc(slices.Clone(r.Headers), func(h kgo.RecordHeader) bool { return h.Key == record.HeaderPosition })
		if string(r.Value) != value || len(own) != 2 {
			t.Errorf("value %s, want %s; headers %v", r.Value, value, r.Headers)
		}
	}
}

// The program, the demo, the relay in another program, and the relay of tests without servers make the same record of an event with
// their defaults.
func TestOneDefaultRecord(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order", "embedded"}})
	s.StartRelay().WaitTookOver()
	other := s.Client.Database(s.Prefix + "_embedded").Collection("outbox")
	cfg := relay.Default()
	cfg.Watcher = "embedded"
	cfg.MongoDB.URI = relay.NewURI(stacktest.MongoURI(t))
	cfg.State.Database = s.State.Name()
	cfg.Kafka.Brokers = s.Brokers
	cfg.Watch = []string{other.Database().Name() + ".outbox"}
	cfg.Topics.Template = s.TopicOf("embedded")
	embedded, err := relay.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- embedded.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	ofDev, devTopic := startDevOutbox(t, s.Client)
	devTopics := kit.ReadTopics(t, s.Brokers, devTopic)
	topics := s.ReadTopics("order", "embedded")
	env := outboxtest.New(t, outboxtest.WithTopics("order"))
	order := event.Aggregate{Type: "order", ID: "o-1"}
	for i, ev := range []event.Event{
		event.New(order, "Placed", event.Bytes("application/json", []byte(`{"a":1}`)), event.WithHeader("own", []byte("h"))),
		event.New(order, "Placed", event.JSON(map[string]any{"a": 1}), event.WithKey("k"), event.WithSubject("s")),
		event.New(order, "Removed", event.Payload{}, event.WithExpiry(time.Now().Add(time.Hour))),
		event.New(order, "Empty", event.Bytes("", []byte{}), event.WithID(bson.NewObjectID().Hex())),
	} {
		s.AppendEvents(s.Outbox(), ev)
		s.AppendEvents(other, ev)
		s.AppendEvents(ofDev, ev)
		env.Publish(ev)
		env.Settle()
		have := func(topic string) *kit.Record {
			return topics.WaitForRecord(topic, func(r *kit.Record) bool { return r.Topic == s.TopicOf(topic) && r.Header("id") == ev.ID().String() })
		}
		program, inside, memory := describeRecord(have("order")), describeRecord(have("embedded")), env.Published("order")[i]
		demo := describeRecord(devTopics.WaitForRecord("the record of dev", func(r *kit.Record) bool { return r.Header("id") == ev.ID().String() }))
		var headers []string
		for _, h := range memory.Headers {
			headers = append(headers, h.Key+"="+hideNamespace(h.Key, string(h.Value)))
		}
		want := fmt.Sprintf("%q %q %v %q", memory.Key, memory.Value, memory.Value == nil, headers)
		if program != want || inside != want || demo != want {
			t.Errorf("records of %s:\nprogram  %s\nembedded %s\ndev      %s\nmemory   %s", ev.Name(), program, inside, demo, want)
		}
	}
}

// startDevOutbox starts `outrelay dev` on the shared servers, and returns its outbox and the topic of orders. Both are in the
// configuration of its relays.
func startDevOutbox(t *testing.T, client *mongo.Client) (outbox *mongo.Collection, topic string) {
	t.Helper()
	dev := kit.Launch(t, "dev", kit.Binary(t), sharedServersEnv(t), "dev", "--rate", "0")
	dev.WaitForLog("  all ready  ")
	t.Cleanup(func() {
		dev.Terminate()
		if code := dev.WaitExit(); code != 0 {
			t.Errorf("exit code %d of dev", code)
		}
	})

	fields := strings.Fields(dev.WaitForLog(" status --config "))
	text, err := os.ReadFile(fields[len(fields)-1])
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Watch  []string `yaml:"watch"`
		Topics struct {
			Template string `yaml:"template"`
		} `yaml:"topics"`
	}
	if err := yaml.Unmarshal(text, &config); err != nil || len(config.Watch) != 1 {
		t.Fatalf("%v in %s", err, text)
	}
	database, name, _ := strings.Cut(config.Watch[0], ".")
	return client.Database(database).Collection(name), strings.ReplaceAll(config.Topics.Template, "{aggregatetype}", "order")
}

// describeRecord returns the content of a record.
// hideNamespace replaces the namespace of an outbox: each outbox has another one.
func hideNamespace(header, value string) string {
	if header == "outrelay-ns" {
		return "…"
	}
	return value
}

func describeRecord(r *kit.Record) string {
	var headers []string
	for _, h := range r.Headers {
		headers = append(headers, h.Key+"="+hideNamespace(h.Key, string(h.Value)))
	}
	return fmt.Sprintf("%q %q %v %q", r.Key, r.Value, r.Value == nil, headers)
}
