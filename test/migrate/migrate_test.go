//go:build unix

package migrate

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/adopt"
	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// headerID returns the header id of a record.
func headerID(r *kgo.Record) string {
	for _, h := range r.Headers {
		if h.Key == "id" {
			return string(h.Value)
		}
	}
	return ""
}

// documentID returns the id of an event, from the header or from the document in the value.
func documentID(r *kgo.Record) string {
	if id := headerID(r); id != "" {
		return id
	}
	var doc struct {
		ID struct {
			OID string `json:"$oid"`
		} `json:"_id"`
	}
	_ = json.Unmarshal(r.Value, &doc)
	return doc.ID.OID
}

// adoptAfter checks and adopts a position while services go on writing, starts outrelay, and lets it run for a while. It returns the bound.
func (s *scene) adoptAfter(stopped time.Time, args ...string) adopt.Report {
	s.t.Helper()
	args = append([]string{"adopt", "--stopped-at", stopped.UTC().Format(time.RFC3339Nano)}, args...)
	var plan, r adopt.Report
	s.runOutrelay(&plan, append(args, "--dry-run")...)
	s.runOutrelay(&r, append(args, "--yes")...)
	// Events of the second of the stop are counted as long as it lasts.
	if plan.Done || !r.Done || plan.MaxRepeats > r.MaxRepeats || r.Token != plan.Token {
		s.t.Errorf("planned %+v, adopted %+v", plan, r)
	}
	s.startRelay()

	more := s.countWritten() + 500
	s.waitArrived("events after the switch", func(events, _ int) bool { return events >= more })
	s.stopWriting()
	return r
}

// TestRelayContinuesAtAPosition: a publisher other than outrelay, which stores resume tokens late, stops under load.
func TestRelayContinuesAtAPosition(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	s.followTopic(s.topic, headerID)
	cs, err := s.db.Collection("outbox").Watch(t.Context(), mongo.Pipeline{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cs.Close(context.WithoutCancel(t.Context())) }()
	s.writeEvents(s.insertEnvelope)

	// The publisher has sent 300 events, and stored the position of the 200th.
	client, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var token string
	for n := range 300 {
		if !cs.Next(t.Context()) {
			t.Fatal(cs.Err())
		}
		doc := cs.Current.Lookup("fullDocument").Document()
		r := kgo.KeySliceRecord([]byte(doc.Lookup("aggregateid").StringValue()), []byte(doc.Lookup("payload").StringValue()))
		r.Topic = s.topic
		r.Headers = []kgo.RecordHeader{{Key: "id", Value: []byte(doc.Lookup("_id").ObjectID().Hex())}, {Key: "type", Value: []byte("OrderPlaced")}}
		if err := client.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if n == 199 {
			token = cs.Current.Lookup("_id", "_data").StringValue()
		}
	}
	r := s.adoptAfter(time.Now(), "--token", token)
	if r.MaxRepeats < 100 || r.Checked != adopt.CheckedByEvent {
		t.Errorf("%+v", r)
	}
	if repeats := s.checkRecords(r.MaxRepeats, true); repeats != 100 {
		t.Errorf("%d repeats instead of 100", repeats)
	}
}

// sendBatch sends documents that are not marked as sent, as a poller does, and returns their ids.
func (s *scene) sendBatch(client *kgo.Client) bson.A {
	s.t.Helper()
	byID := options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}).SetLimit(50)
	cur, err := s.db.Collection("outbox").Find(s.t.Context(), bson.D{{Key: "sent", Value: false}}, byID)
	if err != nil {
		s.t.Fatal(err)
	}
	var docs []bson.Raw
	if err := cur.All(s.t.Context(), &docs); err != nil {
		s.t.Fatal(err)
	}

	ids := bson.A{}
	for _, doc := range docs {
		id := doc.Lookup("_id")
		ids = append(ids, id)
		r := kgo.KeySliceRecord([]byte(doc.Lookup("customer").StringValue()), []byte(doc.Lookup("body").StringValue()))
		r.Topic = s.topic
		r.Headers = []kgo.RecordHeader{{Key: "id", Value: []byte(id.ObjectID().Hex())}, {Key: "type", Value: []byte("OrderPlaced")}}
		if err := client.ProduceSync(s.t.Context(), r).FirstErr(); err != nil {
			s.t.Fatal(err)
		}
	}
	return ids
}

// markBatch marks documents as sent.
func (s *scene) markBatch(ids bson.A) {
	s.t.Helper()
	mark := bson.D{{Key: "$set", Value: bson.D{{Key: "sent", Value: true}}}}
	if _, err := s.db.Collection("outbox").UpdateMany(s.t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, mark); err != nil {
		s.t.Fatal(err)
	}
}

// pollerMargin is the longest time from the creation of an id to its commit, on a busy machine.
const pollerMargin = 5 * time.Second

// TestMoveFromPoller: a poller that marks sent documents stops before it marks a batch. outrelay reads the same documents, and begins at
// the oldest document without the mark.
func TestMoveFromPoller(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	s.env = append(s.env, "OUTRELAY_MAPPING_AGGREGATETYPE=kind", "OUTRELAY_MAPPING_AGGREGATEID=customer", "OUTRELAY_MAPPING_TYPE=name",
		"OUTRELAY_MAPPING_PAYLOAD=body", "OUTRELAY_PURGE_INTERVAL=100ms")
	// The poller has sent and marked it. Business data may refer to it.
	sent := bson.D{{Key: "_id", Value: bson.NewObjectIDFromTimestamp(time.Now().Add(-48 * time.Hour))}, {Key: "kind", Value: "order"}, {Key: "sent", Value: true}}
	if _, err := s.db.Collection("outbox").InsertOne(t.Context(), sent); err != nil {
		t.Fatal(err)
	}
	s.followTopic(s.topic, headerID)
	client, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	insert := func(ctx context.Context, key string, n int) (string, error) {
		id := bson.NewObjectID()
		_, err := s.db.Collection("outbox").InsertOne(ctx, bson.D{
			{Key: "_id", Value: id},
			{Key: "kind", Value: "order"},
			{Key: "customer", Value: key},
			{Key: "name", Value: "OrderPlaced"},
			{Key: "body", Value: fmt.Sprintf(`{"number":%d}`, n)},
			{Key: "sent", Value: false},
		})
		return id.Hex(), err
	}
	// The server may have just been started, and the position has to be in its oplog.
	inOplog := time.Now().Add(pollerMargin + 2*time.Second)
	s.writeEvents(insert)
	for s.countWritten() <= 500 || time.Now().Before(inOplog) {
		s.markBatch(s.sendBatch(client))
	}
	// The last batch stays without its mark, as if the poller was killed.
	for len(s.sendBatch(client)) == 0 {
	}
	stopped := time.Now()

	var oldest struct {
		ID bson.ObjectID `bson:"_id"`
	}
	byID := options.FindOne().SetSort(bson.D{{Key: "_id", Value: 1}})
	if err := s.db.Collection("outbox").FindOne(t.Context(), bson.D{{Key: "sent", Value: false}}, byID).Decode(&oldest); err != nil {
		t.Fatal(err)
	}
	at := oldest.ID.Timestamp().Add(-pollerMargin)
	r := s.adoptAfter(stopped, "--at", at.UTC().Format(time.RFC3339))
	repeats := s.checkRecords(r.MaxRepeats, false)
	if repeats == 0 {
		t.Error("the batch without the mark was not sent again")
	}
	t.Logf("%d events, %d repeats, announced were at most %d", s.countWritten(), repeats, r.MaxRepeats)

	s.writeEvents(insert)
	more := s.countWritten() + 500
	s.waitArrived("events before the way back", func(events, _ int) bool { return events >= more })
	s.waitForLateTopic(func() bson.ObjectID {
		id := bson.NewObjectID()
		_, err := s.db.Collection("outbox").InsertOne(t.Context(), bson.D{
			{Key: "_id", Value: id},
			{Key: "kind", Value: "late"},
			{Key: "customer", Value: "late"},
			{Key: "name", Value: "OrderPlaced"},
			{Key: "body", Value: "{}"},
			{Key: "sent", Value: false},
		})
		if err != nil {
			t.Fatal(err)
		}
		return id
	})
	if n, err := s.db.Collection("outbox").CountDocuments(t.Context(), sent); n != 1 || err != nil {
		t.Errorf("the document that the poller had sent is gone: %d, %v", n, err)
	}
	margin := s.markSent()
	more = s.countWritten() + 500
	for s.countWritten() < more {
		s.markBatch(s.sendBatch(client))
	}
	s.stopWriting()
	for ids := s.sendBatch(client); len(ids) > 0; ids = s.sendBatch(client) {
		s.markBatch(ids)
	}
	again := s.checkRecords(repeats+margin, false) - repeats
	if again == 0 {
		t.Error("the events within the margin were not repeated")
	}
	t.Logf("the way back: %d events in all, %d repeats more, at most %d", s.countWritten(), again, margin)
}

// waitForLateTopic inserts an event for the topic late, which is created later. It waits until the event waits, and then, as the guides
// describe, until no event does: the former publisher would not send it.
func (s *scene) waitForLateTopic(insert func() bson.ObjectID) {
	s.t.Helper()
	id := insert()
	s.mu.Lock()
	s.written[id.Hex()] = written{key: "late"}
	s.mu.Unlock()

	waits := func() bool {
		var summary struct {
			Groups []struct{} `json:"groups"`
		}
		s.runOutrelay(&summary, "waiting", "summary")
		return len(summary.Groups) > 0
	}
	stacktest.Eventually(s.t, "the event without a topic waits", waits)
	s.followTopic(s.topics.Create("late", 1), headerID)
	stacktest.Eventually(s.t, "no event waits", func() bool { return !waits() })
}

// markSent stops outrelay and marks its events as sent, as the guide describes. It returns the number of events within the margin, which
// stay without the mark although outrelay has sent some of them.
func (s *scene) markSent() (margin int64) {
	s.t.Helper()
	_, clusterTime := s.stopRelay()

	at := bson.NewObjectIDFromTimestamp(time.Unix(int64(clusterTime.T), 0).Add(-pollerMargin))
	// ObjectId.createFromTime of the shell makes such ids.
	copy(at[4:], make([]byte, 8))

	outbox, unsent := s.db.Collection("outbox"), bson.E{Key: "sent", Value: false}
	filter := bson.D{unsent, {Key: "_id", Value: bson.D{{Key: "$lt", Value: at}}}}
	if _, err := outbox.UpdateMany(s.t.Context(), filter, bson.D{{Key: "$set", Value: bson.D{{Key: "sent", Value: true}}}}); err != nil {
		s.t.Fatal(err)
	}

	margin, err := outbox.CountDocuments(s.t.Context(), bson.D{unsent, {Key: "_id", Value: bson.D{{Key: "$gte", Value: at}}}})
	if err != nil {
		s.t.Fatal(err)
	}
	return margin
}

// TestMoveFromDebezium kills Debezium with its outbox router under load, and adopts its position from the topic of offsets.
func TestMoveFromDebezium(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches Kafka Connect and Debezium with Maven", "migrate.peers")
	s := newScene(t)
	s.payloads = append(variedPayloads(t), nil, bson.A{"a", "b, c"}, bson.A{bson.D{{Key: "n", Value: 1.0}, {Key: "none", Value: nil}}}, int64(7))
	// The router ignores these fields, and needs no type.
	s.more = bson.D{{Key: "headers", Value: bson.D{{Key: "a", Value: "b"}}}, {Key: "topic", Value: "elsewhere"}, {Key: "key", Value: "other"}}
	s.newID = variedID
	// Debezium writes another value of this header after each start.
	s.ignoredHeaders = []string{"__debezium.context.runId"}
	prefix := s.topics.Prefix + "dbz"
	s.writeConfig("record:", "  preset: debezium", "  headers:", "    __debezium.context.connectorLogicalName: "+prefix)
	s.followTopic(s.topic, headerID)
	c := s.startConnect(kafkaconnect.Debezium, true, debeziumConfig(t, s, prefix))
	s.warmUp()
	s.writeEvents(s.insertVaried)
	s.waitArrived("records of Debezium", func(events, _ int) bool { return events >= 3000 })

	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	r := s.adoptAfter(stopped, "--offsets-topic", c.OffsetsTopic)
	if r.Kind != adopt.Debezium || r.Connector != "orders" {
		t.Errorf("%+v", r)
	}
	repeats := s.checkRecords(r.MaxRepeats, true)
	t.Logf("%d events, %d repeats, announced were at most %d", s.countWritten(), repeats, r.MaxRepeats)

	s.goBack(c, true, map[string]any{"server_id": prefix}, func(token string, at bson.Timestamp) map[string]any {
		return map[string]any{"sec": at.T, "ord": at.I, "resume_token": token}
	})
	if again := s.checkRecords(repeats, true); again != repeats {
		t.Errorf("the way back: %d repeats more", again-repeats)
	}
	t.Logf("after the way back: %d events, no further repeats", s.countWritten())
}

// variedID returns the n-th id, which is an ObjectId, a UUID or a text, and its text in a record of Debezium.
func variedID(n int) (id any, text string) {
	switch u := uuid.New(); n % 3 {
	case 0:
		return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u[:]}, base64.StdEncoding.EncodeToString(u[:])
	case 1:
		return "event/" + u.String(), "event/" + u.String()
	default:
		oid := bson.NewObjectID()
		return oid, oid.Hex()
	}
}

// addressInJava is Java's text of bytes, which is another one each time.
var addressInJava = regexp.MustCompile(`\[B@[0-9a-f]+`)

// TestRecordsOfDebezium: the records in the data of the preset's test equal the records that the real Debezium makes of the same documents.
func TestRecordsOfDebezium(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches Kafka Connect and Debezium with Maven", "migrate.peers")
	text, err := os.ReadFile("../../internal/contract/routing/testdata/debezium.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name     string
		Document json.RawMessage
		Debezium struct {
			Key, Value *string
			ID         string
		}
	}
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}

	s := newScene(t)
	s.payloads = []any{"x"}
	// Several documents have ids of the same text. Key and value together are unique.
	orNull := func(b []byte) string {
		if b == nil {
			return "null"
		}
		return "'" + addressInJava.ReplaceAllString(string(b), "[B@…") + "'"
	}
	place := func(key, value string) string { return key + " " + value }
	s.followTopic(s.topic, func(r *kgo.Record) string {
		if string(r.Key) == "warm-up" {
			return headerID(r)
		}
		return place(orNull(r.Key), orNull(r.Value))
	})
	s.startConnect(kafkaconnect.Debezium, true, debeziumConfig(t, s, "shop"))
	s.warmUp()
	var docs []any
	for _, c := range cases {
		var doc bson.D
		if err := bson.UnmarshalExtJSON(c.Document, true, &doc); err != nil {
			t.Fatal(err)
		}
		docs = append(docs, doc)
	}
	if _, err := s.db.Collection("outbox").InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	warm := s.countWritten()
	s.waitArrived("records of all documents", func(events, _ int) bool { return events >= warm+len(cases) })
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range cases {
		texts := [2]string{"null", "null"}
		for i, text := range []*string{c.Debezium.Key, c.Debezium.Value} {
			if text != nil {
				texts[i] = "'" + *text + "'"
			}
		}
		list := s.arrived[place(texts[0], texts[1])]
		if len(list) != 1 {
			t.Errorf("%s: %d records with this key and value", c.Name, len(list))
			continue
		}
		var headers []string
		for _, h := range list[0].Headers {
			if h.Key == "outrelay-ns" { // outrelay adds it
				continue
			}
			if h.Key == "__debezium.context.runId" {
				h.Value = nil
			}
			headers = append(headers, h.Key+"="+string(h.Value))
		}
		want := []string{
			"__debezium.context.connectorLogicalName=shop", "__debezium.context.taskId=0", "__debezium.context.connectorName=mongodb",
			"__debezium.context.runId=", "id=" + c.Debezium.ID,
		}
		if !slices.Equal(headers, want) {
			t.Errorf("%s: headers %q, recorded were %q", c.Name, headers, want)
		}
	}
}

// debeziumConfig returns the configuration of Debezium for the outbox, with default options.
func debeziumConfig(t *testing.T, s *scene, prefix string) map[string]string {
	return map[string]string{
		"connector.class":                           "io.debezium.connector.mongodb.MongoDbConnector",
		"mongodb.connection.string":                 stacktest.MongoURI(t),
		"topic.prefix":                              prefix,
		"collection.include.list":                   s.db.Name() + ".outbox",
		"snapshot.mode":                             "no_data",
		"transforms":                                "outbox",
		"transforms.outbox.type":                    "io.debezium.connector.mongodb.transforms.outbox.MongoEventRouter",
		"transforms.outbox.route.topic.replacement": s.topics.Prefix + "${routedByValue}",
	}
}

// stopRelay stops outrelay regularly and returns its position.
func (s *scene) stopRelay() (token string, clusterTime bson.Timestamp) {
	s.t.Helper()
	s.endProgram(s.relay, syscall.SIGTERM)
	var doc struct {
		Token struct {
			Data string `bson:"_data"`
		} `bson:"token"`
		ClusterTime bson.Timestamp `bson:"clusterTime"`
	}
	if err := s.state.Collection("watchers").FindOne(s.t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}).Decode(&doc); err != nil {
		s.t.Fatal(err)
	}
	return doc.Token.Data, doc.ClusterTime
}

// goBack stops outrelay and gives its position to the connector, while services go on writing.
func (s *scene) goBack(c *kafkaconnect.Worker, distributed bool, partition map[string]any, offset func(token string, at bson.Timestamp) map[string]any) {
	s.t.Helper()
	s.writeEvents(s.insertVaried)
	token, clusterTime := s.stopRelay()

	ctx, release := s.t.Context(), c.Stop
	if !distributed {
		// A worker in standalone mode does not store the connector.
		release = c.CreateStopped
	}
	err := c.Launch()
	for _, step := range []func(context.Context) error{
		release,
		func(ctx context.Context) error {
			return c.SetOffset(ctx, partition, offset(token, clusterTime))
		},
		c.Resume,
	} {
		if err == nil {
			err = step(ctx)
		}
	}
	if err != nil {
		s.t.Fatal(err)
	}
	more := s.countWritten() + 500
	s.waitArrived("events after the way back", func(events, _ int) bool { return events >= more })
	s.stopWriting()
}

// warmUp writes single events until the first one arrives: a connector without a position begins at the present.
func (s *scene) warmUp() {
	s.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for n := 0; ; n++ {
		id, err := s.insertVaried(s.t.Context(), "warm-up", n)
		if err != nil {
			s.t.Fatal(err)
		}

		seen := func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.written[id] = written{"warm-up", n}
			return len(s.arrived[id]) > 0
		}

		for end := time.Now().Add(time.Second); time.Now().Before(end); {
			if seen() {
				s.forgetSkipped()
				return
			}
			<-time.After(20 * time.Millisecond)
		}

		if time.Now().After(deadline) {
			s.t.Fatal("the connector sends nothing")
		}
	}
}

// forgetSkipped removes the events that were inserted before the connector began.
func (s *scene) forgetSkipped() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.written {
		if len(s.arrived[id]) == 0 {
			delete(s.written, id)
		}
	}
}

// TestMoveFromMongoKafka kills the MongoDB Kafka connector under load, and adopts its position from its offset file.
func TestMoveFromMongoKafka(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches Kafka Connect and the MongoDB Kafka connector with Maven", "migrate.peers")
	s := newScene(t)
	// The connector writes no headers.
	s.payloads, s.ignoredHeaders = variedPayloads(t), []string{"id"}
	topic := s.topics.Create(s.db.Name()+".outbox", 4)
	s.env = append(s.env, "OUTRELAY_RECORD_PRESET=kafka-connector", "OUTRELAY_TOPICS_TEMPLATE="+topic)
	s.followTopic(topic, documentID)
	c := s.startConnect(kafkaconnect.MongoKafka, false, map[string]string{
		"connector.class":            "com.mongodb.kafka.connect.MongoSourceConnector",
		"connection.uri":             stacktest.MongoURI(t),
		"database":                   s.db.Name(),
		"collection":                 "outbox",
		"topic.prefix":               strings.TrimSuffix(s.topics.Prefix, "."),
		"publish.full.document.only": "true",
	})
	s.warmUp()
	s.writeEvents(s.insertVaried)
	s.waitArrived("records of the connector", func(events, _ int) bool { return events >= 3000 })

	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	r := s.adoptAfter(stopped, "--offsets-file", c.OffsetsFile)
	repeats := s.checkRecords(r.MaxRepeats, false)
	t.Logf("%d events, %d repeats, announced were at most %d", s.countWritten(), repeats, r.MaxRepeats)

	s.goBack(c, false, map[string]any{"ns": r.Partition}, func(token string, _ bson.Timestamp) map[string]any {
		return map[string]any{"_id": fmt.Sprintf(`{"_data": "%s"}`, token)}
	})
	if again := s.checkRecords(repeats, false); again != repeats {
		t.Errorf("the way back: %d repeats more", again-repeats)
	}
	t.Logf("after the way back: %d events, no further repeats", s.countWritten())
}

// TestConfigurationsOfTheGuides: each configuration in docs/migrate is valid.
func TestConfigurationsOfTheGuides(t *testing.T) {
	t.Parallel()

	files, err := filepath.Glob("../../docs/migrate/*.md")
	if err != nil || len(files) != 7 {
		t.Fatalf("%d guides, %v", len(files), err)
	}
	s := newScene(t)
	s.env = nil

	found := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(text, -1) {
			path := filepath.Join(t.TempDir(), "outrelay.yaml")
			if err := os.WriteFile(path, m[1], 0o600); err != nil {
				t.Fatal(err)
			}

			var v struct {
				OK       bool  `json:"ok"`
				Warnings []any `json:"warnings"`
			}
			s.runOutrelay(&v, "validate", "--config", path)
			if !v.OK || len(v.Warnings) != 0 {
				t.Errorf("%s: %+v", file, v)
			}
			found++
		}
	}

	if found != 5 {
		t.Errorf("%d configurations in the guides", found)
	}
}

// TestOptionsOfTheRouter: docs/mapping.md has a row for each option of MongoEventRouter, and for no other. The list is that of
// config().names() of Debezium 3.6.1.
func TestOptionsOfTheRouter(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/router-options.txt")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/mapping.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "| option of the router |")
	rows, _, _ := strings.Cut(rest, "Differences that remain")

	var documented []string
	for _, row := range strings.Split(rows, "\n") {
		option, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " | ")
		if strings.Contains(option, "of Kafka Connect") {
			continue
		}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(option, -1) {
			documented = append(documented, m[1])
		}
	}
	slices.Sort(documented)
	if want := strings.Fields(string(text)); !slices.Equal(documented, want) {
		t.Errorf("documented are %v, the router has %v", documented, want)
	}
}
