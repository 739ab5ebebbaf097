package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// base is an environment with the required keys.
var base = []string{"OUTRELAY_MONGODB_URI=mongodb://m1:27017/shop?replicaSet=rs0", "OUTRELAY_KAFKA_BROKERS=k1:9092, k2:9092"}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "outrelay.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func mustLoad(t *testing.T, text string, env, set []string) Config {
	t.Helper()
	path := ""
	if text != "" {
		path = writeConfig(t, text)
	}
	c, _, err := Load(path, env, set)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func loadProblems(t *testing.T, text string, env, set []string) []string {
	t.Helper()
	_, _, err := Load(writeConfig(t, text), env, set)
	p, ok := errors.AsType[*Problems](err)
	if !ok {
		t.Fatalf("error is %T: %v", err, err)
	}
	lines := make([]string, len(p.List))
	for i, one := range p.List {
		one.Line = 0 // TestMappingProblemsHaveLines
		lines[i] = one.String()
	}
	return lines
}

func TestNoFileAtAll(t *testing.T) {
	t.Parallel()
	c := mustLoad(t, "", base, nil)
	if got := c.MongoDB.URI.Reveal(); got != "mongodb://m1:27017/shop?replicaSet=rs0" {
		t.Errorf("uri = %s", got)
	}
	if !slices.Equal(c.Kafka.Brokers, []string{"k1:9092", "k2:9092"}) || !slices.Equal(c.Watch, []string{"shop.outbox"}) {
		t.Errorf("brokers %v, watch %v", c.Kafka.Brokers, c.Watch)
	}
	if c.Lease.Checkpoint != 250*time.Millisecond || c.HTTP.Readiness != 30*time.Second || c.Limits.Memory != 32*MiB || c.HTTP.Listen != "127.0.0.1:9464" || !c.MongoDB.Indexes {
		t.Errorf("defaults: %+v", c)
	}

	host, _ := os.Hostname()
	if rest, ok := strings.CutPrefix(c.Node, host+"-"); !ok || len(rest) != 4 {
		t.Errorf("node = %s", c.Node)
	}
	if again := mustLoad(t, "", base, nil); again.Node == c.Node {
		t.Error("two nodes have one name")
	}
	if c := mustLoad(t, "", append(slices.Clone(base), "OUTRELAY_WATCH=a.outbox, b.outbox"), nil); !slices.Equal(c.Watch, []string{"a.outbox", "b.outbox"}) {
		t.Errorf("watch = %v", c.Watch)
	}
	if c := mustLoad(t, "", []string{"OUTRELAY_MONGODB_URI=mongodb://u:p@m1/?replicaSet=rs0", base[1]}, nil); !slices.Equal(c.Watch, []string{"*.outbox"}) {
		t.Errorf("watch = %v", c.Watch)
	}
}

// A created topic stays in Kafka, so a relay that creates topics allows fewer.
func TestLimitOfTopics(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]int{
		"": 5000, "topics: {create: {}}\n": 500, "topics: {create: {}, max: 7000}\n": 7000, "topics: {max: 3}\n": 3,
	} {
		if c := mustLoad(t, file, base, nil); c.Topics.Max != want || c.Routing().Max != want {
			t.Errorf("%q: topics.max is %d, and %d for the router, want %d", file, c.Topics.Max, c.Routing().Max, want)
		}
	}
}

func TestFileThenEnvironmentThenFlags(t *testing.T) {
	t.Parallel()
	file := "watcher: file\nlog: {level: debug}\nlease: {ttl: 9s}\ntopics: {create: {partitions: 3, configs: {retention.ms: 5}}}\n"
	env := append(slices.Clone(base), "OUTRELAY_WATCHER=env", "OUTRELAY_LOG_LEVEL=warn", "OUTRELAY_KAFKA_REQUEST_TIMEOUT=7s",
		"OUTRELAY_TOPICS_RULES=[{match: {type: A}, to: [x, y]}]", "OUTRELAY_KAFKA_TLS={}", "OUTRELAY_MONGODB_INDEXES=false", "OUTRELAY_RETENTION=7d")
	set := []string{"watcher=flag", "topics.create.configs.cleanup.policy=compact", "limits.memory=64MiB", "watch=[q.outbox]"}
	c := mustLoad(t, file, env, set)

	if c.Watcher != "flag" || c.Log.Level != "warn" || c.Lease.TTL != 9*time.Second || c.Lease.Renew != time.Second || c.Kafka.RequestTimeout != 7*time.Second {
		t.Errorf("%+v", c)
	}
	if c.Kafka.TLS == nil || c.MongoDB.Indexes || c.Limits.Memory != 64*MiB || c.Retention != 7*24*time.Hour || !slices.Equal(c.Watch, []string{"q.outbox"}) {
		t.Errorf("%+v", c)
	}

	if diff := cmp.Diff(&Create{Partitions: 3, Configs: map[string]string{"retention.ms": "5", "cleanup.policy": "compact"}}, c.Topics.Create); diff != "" {
		t.Error(diff)
	}

	if c := mustLoad(t, "log: {level: debug}\n", append(slices.Clone(base), "OUTRELAY_LOG_LEVEL="), nil); c.Log.Level != "debug" {
		t.Errorf("an empty variable counts: %q", c.Log.Level)
	}
	if diff := cmp.Diff([]Rule{{Match: Match{Type: "A"}, To: []string{"x", "y"}}}, c.Topics.Rules); diff != "" {
		t.Error(diff)
	}
}

func TestEnvironmentNamesAreUnambiguous(t *testing.T) {
	t.Parallel()
	if len(envKeys) != len(keyTypes) {
		t.Errorf("%d keys share %d names", len(keyTypes), len(envKeys))
	}
}

// Servers that only speak the protocol are rejected with their name, before anything is sent to them.
func TestOtherProductsAreRejected(t *testing.T) {
	t.Parallel()
	for uri, want := range map[string]string{
		"mongodb://u:p@shop.cluster-abc.eu-west-1.docdb.amazonaws.com:27017/?replicaSet=rs0": "Amazon DocumentDB",
		"mongodb://shop.mongo.cosmos.azure.com:10255/":                                       "Azure Cosmos DB",
		"mongodb+srv://u:p@shop.global.mongocluster.cosmos.azure.com/":                       "Azure Cosmos DB",
		"mongodb+srv://shop.abc.mongodb.net/":                                                "",
		"mongodb://docdb.amazonaws.com.example.com,b:27018/?replicaSet=rs0":                  "",
	} {
		if got := findOtherProduct(URI{hideText(uri)}); got != want {
			t.Errorf("%s: got %q, want %q", uri, got, want)
		}
	}

	_, _, err := Load("", []string{"OUTRELAY_MONGODB_URI=mongodb://a.docdb.amazonaws.com:27017/", "OUTRELAY_KAFKA_BROKERS=k:9092"}, nil)
	if err == nil || !strings.Contains(err.Error(), "Amazon DocumentDB") || !strings.Contains(err.Error(), "startAfter") {
		t.Errorf("got %v", err)
	}
}

func TestEveryProblemAtOnce(t *testing.T) {
	t.Parallel()
	got := loadProblems(t, `
watcher: "a b"
watch: [shop, x.y, x.y, outrelay.outrelay_z]
kafka:
  brokers: ["k1"]
  compresion: zstd
  delivery: transactional
  sasl: { mechanism: scram-sha-521, username: u }
lease: { ttl: 2s, renew: 1s }
limits: { memory: 1k }
brokers: [x]
retention: 5
recording: mrk
start: yesterday
topics:
  template: "a.{agregatetype}"
  rules: [ { mach: {}, to: [__consumer_offsets] }, { match: {}, to: [] } ]
  create: six
record: { preset: plain, structured: true, headers: { id: x } }
lost_history: swep
mongodb: { tls: { ca: /no/such/file, cert: /x } }
`, nil, []string{"log.levle=info", "nonsense"})

	want := []string{
		`--set: a value without =; write --set path=value`,
		`brokers: unknown key; did you mean kafka.brokers?`,
		`kafka.brokers[0]: found "k1"; expected host:port`,
		`kafka.compresion: unknown key; did you mean kafka.compression?`,
		`kafka.delivery: unknown key; delete it: every record is sent by an idempotent, fenced producer`,
		`kafka.sasl.mechanism: found "scram-sha-521"; expected one of plain, scram-sha-256, scram-sha-512, oauthbearer, aws_msk_iam (did you mean scram-sha-512?)`,
		`kafka.sasl.password: required and not set; set the password, best as ${file:/path} or ${env:NAME} (or OUTRELAY_KAFKA_SASL_PASSWORD)`,
		`lease.renew: found 1s; expected at most a third of lease.ttl, 2s`,
		`limits.memory: found "1k"; expected a size such as 900KiB or 32MiB`,
		`--set log.levle: unknown key; did you mean log.level?`,
		`lost_history: found "swep"; expected one of sweep, halt (did you mean sweep?)`,
		`mongodb.tls.ca: the file /no/such/file cannot be read: no such file or directory`,
		`mongodb.tls.key: required with cert and not set; set the file with the private key`,
		`mongodb.uri: required and not set; set the connection string, such as mongodb://host:27017/?replicaSet=rs0 (or OUTRELAY_MONGODB_URI)`,
		`record.headers.id: found "id"; the names id and outrelay-* belong to outrelay`,
		`record.structured: found "true"; only the cloudevents preset has a structured mode`,
		`recording: found "mrk"; expected one of position, delete, mark (did you mean mark?)`,
		`retention: found "5"; expected a duration such as 250ms, 5s, 24h or 7d`,
		`start: found "yesterday"; expected backlog, now or a time such as 2026-11-20T08:00:00Z`,
		`topics.create: found a text; expected a section with keys: partitions, replication, configs; {} takes their defaults`,
		`topics.rules[0].mach: unknown key; did you mean topics.rules[0].match?`,
		`topics.rules[0].to[0]: found "__consumer_offsets"; topic "__consumer_offsets" is internal to Kafka`,
		`topics.rules[1].to: found ""; expected at least one topic, or drop: true`,
		`topics.template: found "a.{agregatetype}"; {agregatetype} is unknown; known are {aggregatetype}, {type}, {database}, {collection}, {header:x}, {field:x}`,
		`watch[0]: found "shop"; expected database.collection; * and ? are allowed`,
		`watch[2]: found "x.y"; it is in the list twice`,
		`watch[3]: found "outrelay.outrelay_z"; collections that begin with state.prefix hold outrelay's own documents and cannot be watched`,
		`watcher: found "a b"; expected letters, digits, dot, dash, underscore; at most 100`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestReferences(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "secret")
	if err := os.WriteFile(file, []byte("from ${file} \n"), 0o600); err != nil {
		t.Fatal(err)
	}

	env := append(slices.Clone(base), "NAME=abc", "N=6", "LIST=a.x,b.x")
	c := mustLoad(t, `
watcher: "w-${env:NAME}-$${env:NAME}x"
`, append(env, "OUTRELAY_WATCHER=w-${env:NAME}"), nil)
	if c.Watcher != "w-abc" {
		t.Errorf("watcher = %q", c.Watcher)
	}

	c = mustLoad(t, `
watch: "${env:LIST}"
kafka: { sasl: { mechanism: plain, username: "$${x}", password: "${file:`+file+`}" }, tls: {} }
topics: { create: { partitions: "${env:N}", configs: { a: "${env:NAME}" } } }
`, env, nil)
	if got := c.Kafka.SASL.Password.Reveal(); got != "from ${file} " {
		t.Errorf("password = %q", got)
	}
	if c.Topics.Create.Partitions != 6 || c.Topics.Create.Configs["a"] != "abc" || c.Kafka.SASL.Username != "${x}" || !slices.Equal(c.Watch, []string{"a.x", "b.x"}) {
		t.Errorf("%+v", c)
	}

	got := loadProblems(t, `{watcher: "${env:MISSING}", node: "${evn:NAME}", address: "${env:NAME", record: {source: "${file:/no/such}"}}`, env, nil)
	want := []string{
		"address: a ${ without a closing }",
		"node: a reference that is neither ${env:NAME} nor ${file:/path}; write $${ for a literal ${",
		"record.source: the file /no/such cannot be read: no such file or directory",
		"watcher: the environment variable MISSING is not set",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestUnknownEnvironment(t *testing.T) {
	t.Parallel()
	env := append(slices.Clone(base), "OUTRELAY_SERVICE_HOST=10.0.0.1", "OUTRELAY_TEST_KAFKA=x", "OUTRELAY_CONFIG=f", "OUTRELAY_SOMETHING_ELSE_ENTIRELY=1")
	_, warnings, err := Load("", env, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "OUTRELAY_SOMETHING_ELSE_ENTIRELY") {
		t.Errorf("warnings = %v", warnings)
	}

	_, _, err = Load("", append(env, "OUTRELAY_KAFKA_BROKER=k:1"), nil)
	if err == nil || !strings.Contains(err.Error(), "did you mean OUTRELAY_KAFKA_BROKERS?") {
		t.Errorf("error = %v", err)
	}
}

func TestFilesThatAreNone(t *testing.T) {
	t.Parallel()
	if _, _, err := Load("/no/such/file.yaml", base, nil); err == nil || !strings.Contains(err.Error(), "/no/such/file.yaml: cannot be read: no such file") {
		t.Errorf("error = %v", err)
	}

	for text, want := range map[string]string{
		"hunter2":                      "not a mapping",
		"- hunter2":                    "not a mapping",
		"a: b\n---\nc: d":              "more than one YAML document",
		"watcher: a\nwatcher: hunter2": "already defined",
		"kafka: {":                     "line",
		"kafka: [hunter2":              "line",
	} {
		_, _, err := Load(writeConfig(t, text), base, nil)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", text, err)
		}
	}

	for _, text := range []string{" ", "# nothing\n", "null", "kafka:\n"} {
		if _, _, err := Load(writeConfig(t, text), base, nil); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestRedactedLoadsAgain(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, `
node: n1
kafka: { tls: {} }
topics: { rules: [ { match: {type: "A*"}, to: [x, y] } ], create: { partitions: 2, configs: { a: 1 } } }
record: { preset: cloudevents, headers: { a: "{type}" } }
start: 2026-11-20T08:00:00Z
retention: 36h
limits: { envelope: 1500 }
`)
	shown, _, err := Print(file, base, nil)
	if err != nil {
		t.Fatal(err)
	}

	second, _, err := Print(writeConfig(t, shown), nil, nil)
	if err != nil || shown != second {
		t.Errorf("%v\n%s\n---\n%s", err, shown, second)
	}

	c, _, err := Load(file, base, nil)
	if err != nil {
		t.Fatal(err)
	}

	again := mustLoad(t, shown, nil, nil)
	c.MongoDB.URI, again.MongoDB.URI = URI{}, URI{}
	c.Address, again.Address = "", ""
	if !reflect.DeepEqual(normalize(c), normalize(again)) {
		t.Errorf("%+v\n%+v", c, again)
	}
}

// normalize makes empty lists nil, for comparisons.
func normalize(c Config) Config {
	if len(c.Topics.Allow) == 0 {
		c.Topics.Allow = nil
	}
	return c
}

func TestValues(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Size{"0": 0, "1": 1, "900KiB": 900 * KiB, "1.5GiB": 3 * GiB / 2, "10MB": 10_000_000, "32 MiB": 32 * MiB, "5B": 5} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v", text, got, err)
		}
	}

	for _, text := range []string{"", "-1", "MiB", "1TiB", "NaN", "Inf", "1e30GiB"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %d", text, got)
		}
	}

	for text, want := range map[string]time.Duration{"0s": 0, "250ms": 250 * time.Millisecond, "7d": 168 * time.Hour, "1d12h": 36 * time.Hour} {
		if got, err := ParseDuration(text); err != nil || got != want {
			t.Errorf("ParseDuration(%q) = %v, %v", text, got, err)
		}
	}

	for _, text := range []string{"", "5", "-1s", "1d-2h", "d", "99999999999d"} {
		if got, err := ParseDuration(text); err == nil {
			t.Errorf("ParseDuration(%q) = %v", text, got)
		}
	}

	for _, text := range []string{"backlog", "now", "2026-11-20T08:00:00Z"} {
		if got, err := parseStart(text); err != nil || got.String() != text {
			t.Errorf("ParseStart(%q) = %v, %v", text, got, err)
		}
	}
}

// An impossible mapping is reported with the line of its key. A value of the environment has no line.
func TestMappingProblemsHaveLines(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, `mongodb: {uri: "mongodb://m1/"}
kafka: {brokers: [k:1]}
mapping:
  payload: "-"
  timestamp: ts
  type: a.b
topics:
  rules:
    - match: {type: a}
      to: ["{nothing}"]
`)
	_, _, err := Load(file, []string{"OUTRELAY_MAPPING_TYPE=$x"}, nil)
	var problems *Problems
	if !errors.As(err, &problems) {
		t.Fatalf("the mapping loads: %v", err)
	}
	lines := map[string]int{}
	for _, p := range problems.List {
		lines[p.Path] = p.Line
	}
	want := map[string]int{"mapping.payload": 4, "mapping.timestamp": 5, "mapping.type": 0, "topics.rules[0].to[0]": 10}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("lines (-want +got):\n%s\n%v", diff, err)
	}

	// One impossible mapping of each kind, on its last line.
	for text, want := range map[string]string{
		"mapping:\n  id: \"-\"":                                                                       "mapping.id (line 2): ",
		"mapping:\n  type: \"*\"":                                                                     "mapping.type (line 2): ",
		"mapping:\n  type: $type":                                                                     "mapping.type (line 2): ",
		"mapping:\n  aggregatetype: \"-\"":                                                            "mapping.aggregatetype (line 2): ",
		"mapping:\n  types: x":                                                                        "mapping.types (line 2): ",
		"record:\n  preset: nothing":                                                                  "record.preset (line 2): ",
		"mapping: {type: \"-\"}\nrecord:\n  preset: cloudevents":                                      "record.preset (line 3): ",
		"record:\n  json: xml":                                                                        "record.json (line 2): ",
		"record:\n  placement:\n    - tenant:header\n    - tenant":                                    "record.placement[1] (line 4): ",
		"record:\n  placement:\n    - shard:partition":                                                "record.placement[0] (line 3): found \"shard:partition\"; set mapping.partition: shard",
		"record:\n  placement:\n    - a:value\n    - b:value:a":                                       "record.placement[1] (line 4): ",
		"record:\n  headers:\n    id: x":                                                              "record.headers.id (line 3): ",
		"record:\n  headers:\n    tenant: \"{tenant}\"":                                               "record.headers.tenant (line 3): ",
		"mapping: {headers: \"-\"}\nrecord:\n  headers:\n    tenant: \"{header:x}\"":                  "record.headers.tenant (line 4): ",
		"topics:\n  template: \"{tenant}\"":                                                           "topics.template (line 2): ",
		"topics:\n  template: \"{field:a.}\"":                                                         "topics.template (line 2): ",
		"topics:\n  rules:\n    - match:\n        headers: {x: \"\"}\n      drop: true":               "topics.rules[0].match.headers.x (line 4): ",
		"topics:\n  rules:\n    - drop: true\n      to: [a]":                                          "topics.rules[0].to (line 4): ",
		"record: {preset: kafka-connector}\ntopics:\n  rules:\n    - match: {type: a}\n      to: [b]": "topics.rules[0].match.type (line 4): ",
	} {
		_, _, err := Load(writeConfig(t, text+"\n"), base, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q for:\n%s\n%v", want, text, err)
		}
	}
}

// The message shows the line.
func TestProblemsShowTheirLine(t *testing.T) {
	t.Parallel()
	_, _, err := Load(writeConfig(t, "watch: [a.b]\nmapping:\n  timestamp: ts\n"), base, nil)
	if err == nil || !strings.Contains(err.Error(), "mapping.timestamp (line 3): ") {
		t.Errorf("the message shows no line: %v", err)
	}
}
