package doctor

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestMain(m *testing.M) {
	stacktest.Wide(8)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

const planted = "hunter2hunter2"

// loadConfig returns a configuration, as the command line would load it.
func loadConfig(t *testing.T, uri string, brokers []string, set ...string) config.Config {
	t.Helper()
	env := []string{"OUTRELAY_MONGODB_URI=" + uri, "OUTRELAY_KAFKA_BROKERS=" + strings.Join(brokers, ",")}
	cfg, _, err := config.Load("", env, set)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// examine runs the doctor and checks the properties of every report. A slow machine gets the time that the checks
// need.
func examine(t *testing.T, cfg config.Config) Report {
	t.Helper()
	return examineWithin(t, cfg, 4*Limit)
}

func examineWithin(t *testing.T, cfg config.Config, limit time.Duration) Report {
	t.Helper()
	r, err := runChecks(t.Context(), cfg, limit)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Checks) != len(mongoSteps(nil))+len(kafkaSteps(nil)) {
		t.Errorf("%d checks", len(r.Checks))
	}

	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}

	var text bytes.Buffer
	if err := r.Print(&text); err != nil {
		t.Fatal(err)
	}

	for _, out := range []string{string(raw), text.String()} {
		if i := strings.Index(out, planted); i >= 0 {
			t.Errorf("a secret is printed: …%s", out[max(0, i-200):i])
		}
	}

	for _, c := range r.Checks {
		if c.ID == "" || c.Detail == "" || c.Why == "" || c.Status != OK && c.Status != Warn && c.Status != Fail {
			t.Errorf("incomplete: %+v", c)
		}
		if c.Status == Fail && c.Fix == "" {
			t.Errorf("%s fails without a fix: %s", c.ID, c.Detail)
		}
	}

	return r
}

func findCheck(t *testing.T, r Report, id string) Check {
	t.Helper()
	i := slices.IndexFunc(r.Checks, func(c Check) bool { return c.ID == id })
	if i < 0 {
		t.Fatalf("no check %s", id)
	}
	return r.Checks[i]
}

// expectCheck compares the outcome of a check. The detail or the fix must contain the words.
func expectCheck(t *testing.T, r Report, id string, status Status, words ...string) {
	t.Helper()
	c := findCheck(t, r, id)
	if c.Status != status {
		t.Errorf("%s: %s, want %s: %s", id, c.Status, status, c.Detail)
	}
	for _, w := range words {
		if !strings.Contains(c.Detail+"\n"+c.Fix, w) {
			t.Errorf("%s: no %q in %q, fix %q", id, w, c.Detail, c.Fix)
		}
	}
}

// newShop returns a database with an outbox. The only event of the outbox goes to topic.
func newShop(t *testing.T, topic string) (*mongo.Client, *mongo.Database) {
	t.Helper()
	client := stacktest.Client(t)
	db := stacktest.Database(t, client)
	appendTo(t, db, topic)
	return client, db
}

func appendTo(t *testing.T, db *mongo.Database, aggregateType string) {
	t.Helper()
	box, err := outbox.New(db, outbox.WithoutTransaction())
	if err == nil {
		err = box.Append(t.Context(), event.New(event.Aggregate{Type: aggregateType, ID: "1"}, "Placed", event.Document(bson.D{{Key: "secret", Value: planted}})))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// newSettings returns the configuration of the watcher of one test.
func newSettings(t *testing.T, db *mongo.Database, more ...string) []string {
	t.Helper()
	state := state.Of(stacktest.Database(t, db.Client()))
	return append([]string{"watch=" + db.Name() + ".outbox", "state.database=" + state.Name(), "watcher=" + state.Name(), "topics.template={aggregatetype}"}, more...)
}

func TestHealthy(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	_, db := newShop(t, topic)
	if err := outboxes.EnsureIndexes(t.Context(), db.Collection("outbox")); err != nil {
		t.Fatal(err)
	}

	// Others write to this server, too: its oplog may hold minutes only.
	r := examine(t, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), newSettings(t, db, "retention=1m", "topics.allow="+topic)...))
	for _, c := range r.Checks {
		// A deployment of single members warns about that, and this server also has the outboxes of other tests.
		single := slices.Contains([]string{"outbox.unwatched", "mongodb.replica_set", "kafka.brokers", "topics.replication", "topics.min_insync_replicas"}, c.ID)
		if c.Status == Fail || c.Status == Warn && !single {
			t.Errorf("%s %s: %s", c.ID, c.Status, c.Detail)
		}
	}

	expectCheck(t, r, "topics.exist", OK, topic)
	expectCheck(t, r, "outbox.collections", OK, db.Name()+".outbox")
	expectCheck(t, r, "mongodb.access", OK, "access control is off")
	expectCheck(t, r, "topics.min_insync_replicas", Warn, "min.insync.replicas is 1", "first give the topics more than one replica")
	if r.Failed() {
		t.Error("failed")
	}
}

// The relay only reads an outbox, so the rules of its services are no finding: it delivers documents that a TTL index deletes, and
// writes none that a unique index or a validator could reject.
func TestRulesOfServicesAreNoFinding(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	_, db := newShop(t, topic)
	outbox := db.Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), outbox); err != nil {
		t.Fatal(err)
	}
	cfg := loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), newSettings(t, db, "topics.allow="+topic)...)
	before := examine(t, cfg)

	if _, err := outbox.Indexes().CreateMany(t.Context(), []mongo.IndexModel{
		{Keys: bson.D{{Key: "createdAt", Value: 1}}, Options: options.Index().SetExpireAfterSeconds(3600)},
		{Keys: bson.D{{Key: "aggregateid", Value: 1}, {Key: "type", Value: 1}}, Options: options.Index().SetUnique(true)},
	}); err != nil {
		t.Fatal(err)
	}
	validator := bson.D{{Key: "collMod", Value: "outbox"}, {Key: "validationLevel", Value: "strict"}, {Key: "validator", Value: bson.D{{Key: "$jsonSchema", Value: bson.D{
		{Key: "required", Value: bson.A{"aggregatetype", "payload"}},
	}}}}}
	if err := db.RunCommand(t.Context(), validator).Err(); err != nil {
		t.Fatal(err)
	}

	after := examine(t, cfg)
	for i, c := range after.Checks {
		// The outboxes of other tests come and go.
		if c.ID == "outbox.unwatched" {
			continue
		}
		if c.Status != before.Checks[i].Status || strings.HasPrefix(c.ID, "outbox.") && c.Status != OK {
			t.Errorf("%s was %s, and with the rules of the services it is %s: %s", c.ID, before.Checks[i].Status, c.Status, c.Detail)
		}
	}
}

func TestTopics(t *testing.T) {
	t.Parallel()
	good, missing := stacktest.Topic(t, 1), stacktest.Name(t)
	odd, stuck := stacktest.Name(t), stacktest.Name(t)
	stacktest.CreateTopic(t, odd, 1,
		kafka.ConfigEntry{ConfigName: "cleanup.policy", ConfigValue: "compact"},
		kafka.ConfigEntry{ConfigName: "max.message.bytes", ConfigValue: "10000"},
		kafka.ConfigEntry{ConfigName: "unclean.leader.election.enable", ConfigValue: "true"})
	stacktest.CreateTopic(t, stuck, 1, kafka.ConfigEntry{ConfigName: "min.insync.replicas", ConfigValue: "2"})
	_, db := newShop(t, good)
	for _, name := range []string{missing, odd, stuck, "not-allowed"} {
		appendTo(t, db, name)
	}
	set := newSettings(t, db, "topics.allow="+strings.Join([]string{good, missing, odd, stuck}, ","))
	r := examine(t, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), set...))
	expectCheck(t, r, "topics", Warn, `"not-allowed" matches nothing in topics.allow`)
	if c := findCheck(t, r, "topics"); strings.Contains(c.Fix, "validator") {
		t.Errorf("a validator does not know the allowed topics: %+v", c)
	}
	expectCheck(t, r, "topics.exist", Fail, missing, "kafka-topics.sh --bootstrap-server", "--create --topic "+missing, "topics.create")
	if c := findCheck(t, r, "topics.exist"); strings.Contains(c.Detail, good) {
		t.Errorf("%q names %s", c.Detail, good)
	}
	expectCheck(t, r, "topics.cleanup_policy", Warn, odd+": cleanup.policy is compact")
	expectCheck(t, r, "topics.max_message_bytes", Warn, odd+": max.message.bytes is 10000", "--add-config max.message.bytes=")
	expectCheck(t, r, "topics.unclean_election", Warn, odd, "unclean.leader.election.enable=false")
	expectCheck(t, r, "topics.min_insync_replicas", Fail, stuck, "writes fail")

	r = examine(t, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), append(set, "topics.create.partitions=2")...))
	expectCheck(t, r, "topics.exist", OK, "will be created: "+missing)
	r = examine(t, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), append(set, "topics.create.replication=9")...))
	expectCheck(t, r, "topics.exist", Fail, missing, "fewer brokers")
	l := kafkaLayout(t, missing)
	if l.Error == nil {
		t.Error("the doctor made the topic")
	}
}

// An envelope without an aggregate type becomes a dead letter before the relay looks for a topic. So doctor reports the envelope,
// and no topic.
func TestNoTopicOfAnEnvelopeWithoutAnAggregateType(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	_, db := newShop(t, topic)
	for _, wrong := range []any{nil, "", 7} {
		raw := bson.D{{Key: "aggregatetype", Value: wrong}, {Key: "aggregateid", Value: "1"}, {Key: "type", Value: "Placed"}, {Key: "payload", Value: "x"}}
		if _, err := db.Collection("outbox").InsertOne(t.Context(), raw); err != nil {
			t.Fatal(err)
		}
	}

	set := newSettings(t, db, "topics.template="+topic+"{aggregatetype}")
	for _, more := range [][]string{nil, {"topics.rules=[{match: {headers: {env: 'test*'}}, drop: true}]"}} {
		r := examine(t, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), append(set, more...)...))
		expectCheck(t, r, "topics", Warn, db.Name()+".outbox: the relay would reject an envelope", "aggregatetype", "correct the service", "outrelay schema validator")
		expectCheck(t, r, "topics.exist", Fail, "missing: "+topic+topic)
		if c := findCheck(t, r, "topics.exist"); strings.Contains(c.Fix, "--topic "+topic+" ") {
			t.Errorf("a topic of no envelope is missing: %+v", c)
		}
	}
}

func kafkaLayout(t *testing.T, topic string) kafka.Topic {
	t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	m, err := (&kafka.Client{Addr: kafka.TCP(stacktest.Brokers(t)...), Transport: tr}).Metadata(t.Context(), &kafka.MetadataRequest{Topics: []string{topic}})
	if err != nil || len(m.Topics) != 1 {
		t.Fatal(err, m)
	}
	return m.Topics[0]
}

func TestOutboxes(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	db := stacktest.Database(t, client)
	set := newSettings(t, db)
	cfg := loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), set...)
	r := examine(t, cfg)
	expectCheck(t, r, "outbox.collections", Warn, db.Name()+".outbox: it does not exist yet", "check the name in watch")
	expectCheck(t, r, "topics.exist", OK, "no topic is known yet")

	appendTo(t, db, "x y")
	r = examine(t, cfg)
	expectCheck(t, r, "outbox.indexes", Warn, "without the index of the purge or of purge.ttl: each purge reads the whole collection; `outrelay run` creates it", `getCollection("outbox").createIndex({"ts":1})`)
	expectCheck(t, r, "topics", Warn, "would reject")
	expectCheck(t, r, "outbox.fields", OK)
	misspelled := bson.D{
		{Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "1"}, {Key: "type", Value: "Placed"}, {Key: "payload", Value: "x"}, {Key: "dueat", Value: time.Now()},
	}
	if _, err := db.Collection("outbox").InsertOne(t.Context(), misspelled); err != nil {
		t.Fatal(err)
	}
	expectCheck(t, examine(t, cfg), "outbox.fields", Warn, db.Name()+".outbox has dueat for dueAt", "correct the names")
	r = examine(t, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), append(set, "mongodb.indexes=false")...))
	if c := findCheck(t, r, "outbox.indexes"); c.Status != Warn || strings.Contains(c.Detail, "creates it") {
		t.Errorf("%+v", c)
	}

	list, err := outboxes.ListOutboxes(t.Context(), client, func(_, coll []byte) bool { return string(coll) == "outbox" }, db.Name())
	if err != nil || len(list) != 1 {
		t.Fatal(err, list)
	}
	state := state.Open(client, cfg.State)
	registry := outboxes.NewRegistry(state.Collection("collections"))
	if _, err := registry.Register(t.Context(), list[0].UUID, list[0].NS(), "another", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}
	expectCheck(t, examine(t, cfg), "outbox.claims", Fail, `belongs to watcher "another"`, "recover --release")
	if err := registry.Release(t.Context(), list[0].UUID, "another"); err != nil {
		t.Fatal(err)
	}

	expectCheck(t, examine(t, cfg), "watcher", OK, "has never run; it will start with backlog")
	if _, err := registry.Register(t.Context(), list[0].UUID, list[0].NS(), cfg.Watcher, bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}
	expectCheck(t, examine(t, cfg), "watcher", Fail, "is missing", "outrelay recover")
	doc := bson.D{
		{Key: "_id", Value: cfg.Watcher + "/0of1"},
		{Key: "owner", Value: "n1 x"},
		{Key: "node", Value: "n1"},
		{Key: "epoch", Value: int64(4)},
		{Key: "expiresAt", Value: time.Now().Add(time.Hour)},
		{Key: "replicaSetId", Value: "ffffffffffffffffffffffff"},
	}
	if _, err := state.Collection("watchers").InsertOne(t.Context(), doc); err != nil {
		t.Fatal(err)
	}
	expectCheck(t, examine(t, cfg), "watcher", Fail, "copied from another replica set", "recover --accept-copy")
	if _, err := state.Collection("watchers").UpdateByID(t.Context(), cfg.Watcher+"/0of1", bson.D{{Key: "$unset", Value: bson.D{{Key: "replicaSetId", Value: 1}}}}); err != nil {
		t.Fatal(err)
	}
	expectCheck(t, examine(t, cfg), "watcher", OK, "n1 owns the watcher, epoch 4")
}

func TestJudgeWatcher(t *testing.T) {
	t.Parallel()

	for _, c := range []struct {
		w    admin.SlotStatus
		gap  *lease.Gap
		want Status
		word string
	}{
		{admin.SlotStatus{Node: "n", State: "live"}, nil, OK, "n owns the watcher"},
		{admin.SlotStatus{Node: "n", State: "paused", Paused: true}, nil, Warn, "paused"},
		{admin.SlotStatus{Node: "n", State: "pausing", Paused: true, Reason: "draining"}, nil, Warn, "paused"},
		{admin.SlotStatus{Node: "n", State: "no-owner"}, nil, OK, "no process"},
		{admin.SlotStatus{Node: "n", State: "halted", Reason: "because"}, nil, Fail, "because"},
		{admin.SlotStatus{Node: "n", State: "unwritable", Unwritable: []admin.UnwritableTopic{{Topic: "t", Count: 3, Reason: "away"}}}, nil, Warn, "such as t with 3"},
		{admin.SlotStatus{Node: "n", State: "waiting", Reason: "MongoDB is away"}, nil, Warn, "MongoDB is away"},
		{admin.SlotStatus{Node: "n", State: "live"}, &lease.Gap{Reason: "history_lost"}, Warn, "history_lost"},
	} {
		if f := judgeWatcher(c.w, c.gap); f.status != c.want || !strings.Contains(f.detail, c.word) || f.status == Fail && f.fix == "" {
			t.Errorf("%+v: %+v", c.w, f)
		}
	}
}

func TestJudgeOplog(t *testing.T) {
	t.Parallel()
	day := 24 * time.Hour

	for _, c := range []struct {
		window, wanted time.Duration
		whole          bool
		want           Status
	}{
		{30 * time.Hour, day, false, OK},
		{day, day, false, OK},
		{23 * time.Hour, day, false, Warn},
		{time.Hour, day, false, Warn},
		{59 * time.Minute, day, false, Fail},
		// A young replica set has not truncated its oplog yet.
		{time.Minute, day, true, OK},
		{30 * time.Minute, 20 * time.Minute, false, OK},
	} {
		f := judgeOplog(c.window, c.wanted, c.whole)
		if f.status != c.want || (f.status != OK) != strings.Contains(f.fix, "replSetResizeOplog") {
			t.Errorf("%+v: %+v", c, f)
		}
	}
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	cfg := loadConfig(t, "mongodb://user:"+planted+"@127.0.0.1:1/?replicaSet=rs0", []string{"127.0.0.1:2"},
		"kafka.sasl.mechanism=plain", "kafka.sasl.username=u", "kafka.sasl.password="+planted)
	r := examine(t, cfg)
	expectCheck(t, r, "mongodb", Fail, "127.0.0.1:1", "connection refused", "start the server")
	expectCheck(t, r, "kafka", Fail, "127.0.0.1:2", "connection is refused")
	expectCheck(t, r, "config.sizes", OK)
	expectCheck(t, r, "config.topics", Warn, "topics.allow is not set", `topics.template and topics.rules use: ["outbox.event.*"]`)
	cfg.Topics.Create = &config.Create{}
	expectCheck(t, examine(t, cfg), "config.topics", Fail, "topics.allow is not set", "because of topics.create", `["outbox.event.*"]`)
	cfg.Topics.Allow = []string{"orders", "audit.*"}
	expectCheck(t, examine(t, cfg), "config.topics", OK, "orders, audit.*")
	for _, c := range r.Checks {
		if c.ID != "mongodb" && c.ID != "kafka" && !strings.HasPrefix(c.ID, "config.") && (c.Status != Warn || !strings.HasPrefix(c.Detail, "not checked because ")) {
			t.Errorf("%+v", c)
		}
	}

	if !r.Failed() || r.Count(Fail) != 2 {
		t.Errorf("%d failed", r.Count(Fail))
	}
}

// TestMongoDBWords: the doctor distinguishes the causes of a failed connection.
func TestMongoDBWords(t *testing.T) {
	t.Parallel()
	silent := serve(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	hangsUp := serve(t, func(net.Conn) {})
	for _, c := range []struct {
		name, uri string
		words     []string
	}{
		{"DNS", "mongodb://no-such-host.invalid:27017/", []string{"no-such-host.invalid", "cannot be resolved"}},
		{"DNS of a service record", "mongodb+srv://user:" + planted + "@no-such-host.invalid/", []string{"no-such-host.invalid"}},
		{"hangs up", "mongodb://" + hangsUp + "/", []string{"closes the connection", "mongodb.tls"}},
		{"no response", "mongodb://" + silent + "/", []string{"does not respond in time"}},
		{"no TLS there", strings.Replace(stacktest.MongoURI(t), "/?", "/?tls=true&", 1), []string{"TLS"}},
		{"another set", strings.Replace(stacktest.MongoURI(t), "replicaSet=rs0", "replicaSet=other", 1), []string{"names replica set other", "belongs to rs0", "replicaSet=rs0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			expectCheck(t, examine(t, loadConfig(t, c.uri, []string{"127.0.0.1:2"})), "mongodb", Fail, c.words...)
		})
	}

	t.Run("unknown authority", func(t *testing.T) {
		t.Parallel()
		cert := selfSigned(t)
		addr := serve(t, func(c net.Conn) {
			_ = tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}}).HandshakeContext(context.Background())
		})
		expectCheck(t, examine(t, loadConfig(t, "mongodb://"+addr+"/?tls=true", []string{"127.0.0.1:2"})), "mongodb", Fail, "authority", "mongodb.tls.ca")
	})
}

// serve hands each connection to f and closes it after.
func serve(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		var all []chan struct{}
		for {
			c, err := l.Accept()
			if err != nil {
				for _, one := range all {
					<-one
				}
				return
			}
			one := make(chan struct{})
			all = append(all, one)
			go func() { defer close(one); defer c.Close(); f(c) }()
		}
	}()

	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String()
}

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestCancelled(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t))); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestPrint(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	r := Report{[]Check{
		{ID: "a", Status: OK, Detail: "fine", Why: "x"},
		{ID: "a.long", Status: Fail, Detail: "broken", Fix: "one\ntwo", Why: "because"},
	}}
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}

	want := "ok    a       fine\n" +
		"fail  a.long  broken\n" +
		"              why  because\n" +
		"              fix  one\n" +
		"                   two\n" +
		"1 ok, 0 warnings, 1 failed\n"
	if b.String() != want {
		t.Errorf("\n%s\nwant\n%s", b.String(), want)
	}

	// One failure, and the checks that it prevents.
	b.Reset()
	r = Report{[]Check{
		{ID: "mongodb", Status: Fail, Detail: "away", Fix: "start it", Why: "because"},
		{ID: "mongodb.version", Status: Warn, Detail: "not checked because of mongodb", root: "mongodb"},
		{ID: "kafka", Status: OK, Detail: "responds"},
		{ID: "topics", Status: Warn, Detail: "not checked because of mongodb", root: "mongodb"},
	}}
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}
	want = "fail  mongodb          away\n" +
		"                       why  because\n" +
		"                       fix  start it\n" +
		"                       not checked: mongodb.version, topics\n" +
		"ok    kafka            responds\n" +
		"1 ok, 0 warnings, 1 failed, 2 not checked\n"
	if b.String() != want {
		t.Errorf("\n%s\nwant\n%s", b.String(), want)
	}

	r = Report{[]Check{{ID: "a", Status: OK, Detail: "fine"}, {ID: "a.long", Status: Fail, Detail: "broken", Fix: "one\ntwo"}}}
	raw, err := json.Marshal(r)
	if err != nil || string(raw) != `{"checks":[{"id":"a","status":"ok","detail":"fine","fix":""},{"id":"a.long","status":"fail","detail":"broken","fix":"one\ntwo"}]}` {
		t.Errorf("%s %v", raw, err)
	}
	if raw, _ := json.Marshal(Report{}); string(raw) != `{"checks":[]}` {
		t.Errorf("%s", raw)
	}
}
