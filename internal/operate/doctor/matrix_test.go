package doctor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/test/generated"
)

// The page lists the versions that the tests run and the platforms of the releases, and docs/support.md is current.
func TestSupportMatrix(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..", "..")
	read := func(name string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}

	if testedMongoDB != devstack.MongoDBVersion || testedKafka != devstack.KafkaVersion {
		t.Errorf("the tests run MongoDB %s and Kafka %s, the matrix has %s and %s", devstack.MongoDBVersion, devstack.KafkaVersion, testedMongoDB, testedKafka)
	}
	recorded := slices.ContainsFunc(readRuns(), func(r testRun) bool { return r.MongoDB == testedMongoDB && r.Kafka == testedKafka })
	if !recorded {
		t.Errorf("tested.json has no run with MongoDB %s and Kafka %s: go test ./internal/operate/doctor -run TestRecordSupport -doctor.record -timeout 60m", testedMongoDB, testedKafka)
	}
	for _, r := range readRuns() {
		if all := slices.Sorted(slices.Values(append(slices.Clone(r.Passed), r.Failed...))); !slices.Equal(all, coreTestNames()) {
			t.Errorf("the run with MongoDB %s and Kafka %s has other tests than coreTests: %v", r.MongoDB, r.Kafka, all)
		}
	}
	if !strings.Contains(read("go.mod"), "\ngo "+testedGo+".") || !strings.HasPrefix(runtime.Version(), "go"+testedGo+".") {
		t.Errorf("go.mod and the tests do not use Go %s", testedGo)
	}

	var release struct{ Builds []struct{ Targets []string } }
	if err := yaml.Unmarshal([]byte(read(".goreleaser.yaml")), &release); err != nil {
		t.Fatal(err)
	}
	var built, listed []string
	for _, b := range release.Builds {
		for _, target := range b.Targets {
			built = append(built, strings.Replace(target, "_", "/", 1))
		}
	}
	for _, r := range matrix {
		if r.why == "" || !slices.Contains([]support{tested, expected, untested, unsupported}, r.level) {
			t.Errorf("%s %s has no reason or no level", r.area, r.name)
		}
		if r.area == areaPlatform && r.name != "others" {
			listed = append(listed, r.name)
		}
		if r.area == areaPlatform && r.level == tested && r.name != runtime.GOOS+"/"+runtime.GOARCH {
			t.Errorf("the matrix has %s as tested, and this test runs on %s/%s", r.name, runtime.GOOS, runtime.GOARCH)
		}
	}
	slices.Sort(built)
	slices.Sort(listed)
	if !slices.Equal(built, listed) {
		t.Errorf("releases are built for %v, and the matrix has %v", built, listed)
	}

	generated.Check(t, "docs/support.md", matrixDocument())
}

// The doctor passes tested and expected versions, warns of untested ones, and rejects unsupported ones.
func TestVersionsOutsideOfTheMatrixAreReported(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]struct {
		status Status
		text   string
	}{
		testedMongoDB: {OK, ", tested"},
		"7.0.39":      {OK, "expected to work"},
		"8.2.1":       {OK, "expected to work"},
		"9.0.0":       {Warn, "untested"},
		"5.0.31":      {Fail, "MongoDB 5.0.31"},
		"nonsense":    {Warn, "untested"},
	} {
		if f := judgeMongoDB(version); f.status != want.status || !strings.Contains(f.detail, want.text) || (f.status == OK) != (f.fix == "") {
			t.Errorf("%s: %+v", version, f)
		}
	}

	for broker, want := range map[string]string{
		"pkc-1.eu-west-1.aws.confluent.cloud:9092":       kafkaConfluent,
		"b-1.shop.x.c2.kafka.eu-west-1.amazonaws.com:98": kafkaMSK,
		"shop.ServiceBus.windows.net:9093":               kafkaEventHubs,
		"seed.x.byoc.prd.cloud.redpanda.com":             kafkaRedpanda,
		"kafka-1:9092":                                   "",
	} {
		if r, known := kafkaService([]string{broker}); r.name != want || known != (want != "") {
			t.Errorf("%s: %+v", broker, r)
		}
	}

	sharded := mongoChecks{&examination{mongo: mongoFacts{hello: helloResponse{Msg: "isdbgrid"}}}}.checkReplicaSet(t.Context())
	if sharded.status != Warn || !strings.Contains(sharded.detail, "untested") {
		t.Errorf("a sharded cluster: %+v", sharded)
	}
	if r := rowOf(areaPlatform, "plan9/386"); r.level != untested {
		t.Errorf("%+v", r)
	}
	if f := judge(untested, "why", "%s", "plan9/386"); f.status != Warn || f.fix == "" || !strings.Contains(fmt.Sprint(f.detail), "why") {
		t.Errorf("%+v", f)
	}
}

// matrixDocument returns docs/support.md.
func matrixDocument() string {
	var b strings.Builder
	b.WriteString("# Support\n\n" +
		"Generated from `internal/operate/doctor/matrix.go` and the recorded runs of the core tests in `internal/operate/doctor/tested.json`;\n" +
		"`go run ./test/regenerate` writes it. `outrelay doctor` warns of a MongoDB or a platform that is untested, and rejects an unsupported\n" +
		"MongoDB. A Kafka broker does not report its version, so `doctor` warns only of services that it recognizes by their host names.\n\n" +
		"- **tested**: each run of the tests uses it, or a run of the core tests on it is recorded. The core tests cover transactions and their\n" +
		"  rollback, the sweep after lost history, the fence and the read-back of a takeover, two relays that share the work, and consumers.\n" +
		"  MongoDB is tested in versions of 6.0 alone, because no other one can be fetched from a package registry. The workflow *Versions* runs\n" +
		"  the core tests on 6.0, 7.0, 8.0 and on two shards every week; no run of it is recorded yet.\n" +
		"- **expected to work**: it has the features that outrelay uses. The tests do not run on it. Please report problems.\n" +
		"- **untested**: no test has used it, and it differs in a feature that outrelay relies on. Test your use of it first.\n" +
		"- **unsupported**: it does not work, or reports about it are not accepted.\n")

	last := ""
	for _, r := range matrix {
		if r.area != last {
			fmt.Fprintf(&b, "\n## %s\n\n| | | why |\n|---|---|---|\n", r.area)
		}
		last = r.area
		fmt.Fprintf(&b, "| %s | %s | %s |\n", r.name, r.level, cmp.Or(r.why, "–"))
	}
	return b.String() + readForOtherVersions
}

// readForOtherVersions is the end of docs/support.md.
const readForOtherVersions = `
## What was read about MongoDB 7.0, 8.0 and sharded clusters

Nothing below was run on these servers, except where a fail point of 6.0 returns the same error. It was compared with the documentation
of the servers and of the driver.

| statement | used by | 7.0 and 8.0 | through mongos |
|---|---|---|---|
| aggregate with $changeStream, and its getMore | the stream of each slot | the options of 6.0 exist; a getMore has its own time limit | an event waits until every shard has moved: up to ` + "`" + `periodicNoopIntervalSecs` + "`" + ` (10 s). The watchdog waits for 13 s |
| find, aggregate, count, distinct | all reads | each read of a list sends ` + "`" + `maxTimeMS` + "`" + ` (24 h), and each other one the time that its caller has left: ` + "`" + `defaultMaxTimeMS` + "`" + ` of 8.0 holds for neither | as on a replica set; counts may contain orphaned documents |
| insert, update, delete, findAndModify | services and the relay | always with ` + "`" + `w: majority, j: true` + "`" + `. Errors with the labels ` + "`" + `RetryableError` + "`" + ` and ` + "`" + `SystemOverloadedError` + "`" + ` of 8.2 are repeated | as on a replica set |
| transactions, commitTransaction, abortTransaction | outbox, inbox, fenced writes | ` + "`" + `TransactionTooLargeForCache` + "`" + ` (7.0) halves the list. Nothing is created in a transaction of the relay: its collections exist before | across shards they commit in the order of each shard only. Keep the envelopes of a key on one shard |
| createIndexes with collectionUUID, collMod, listIndexes, listCollections, create | indexes and state | the same | the same |
| killSessions | transactions of lost owners | the same | it reaches every shard; a prepared part stays until the transaction is decided |
| killCursors | streams that end | the same | it may reach another mongos: the getMore then ends after its await time |
| reshardCollection, unshardCollection | operators | unshardCollection is new in 8.0 | a new UUID makes it another collection of the name for the relay (N27) |
| currentOp with $ownOps | the check of a client of the service | the same | it shows the operations of shards and may not contain the call: then a Timeout of the client is not noticed |
| replSetGetConfig | the id of the replica set | the same | mongos lacks it: a state that was copied to another cluster is not noticed (N5) |
| getParameter transactionLifetimeLimitSeconds | the margin M | the same | mongos lacks it: M is 5 minutes |
| serverStatus with oplog | the oplog window | the same | mongos has no oplog: the window is unknown |
| hello, ping, buildInfo, $$NOW | the server's time and version, leases | the same | the time is that of one mongos: synchronize the clocks of all by NTP |

The strict stable API lacks distinct and the commands of operators. The relay rejects a client that uses it and ignores it in options.
`
