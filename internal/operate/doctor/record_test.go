package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

var _ = flag.Bool("doctor.record", false, "run the core tests on each version of Kafka, and write tested.json; needs a JDK with Maven")

// recordedVersions are the versions of Kafka that TestRecordSupport fetches and runs: the last one of each minor version of Kafka 4,
// and the version of all other tests.
var recordedVersions = []string{"4.0.2", "4.1.2", "4.2.2", devstack.KafkaVersion, "4.4.0"}

// coreTests are the tests, by package, that decide whether a version is tested.
var coreTests = map[string][]string{
	"./pkg/outbox":                    {"TestAppendManyKeepsOrderAndAtomicity", "TestI2_AbortedTransactionLeavesNothing", "TestTransactionRetries"},
	"./internal/relay/stored/sweep":   {"TestN22_NothingBetweenSweepAndStream", "TestN22_TransactionOpenAcrossTheEnd"},
	"./internal/relay/internal/fence": {"TestN04_RacingOwners", "TestN04_ZombieIsRejectedEverywhere", "TestN07_ForeignRecordsAreNotHits", "TestN08_LongTailIsTruncated"},
	"./pkg/relay":                     {"TestTwoInstancesOfAServiceShareTheWork"},
	"./pkg/consumer":                  {"TestEachEffectHappensOnceInTheOrderOfItsKey", "TestExclusiveMemberHasAllPartitionsAndAnotherTakesOver", "TestRedeliveryHasNoEffectAndIsCommitted"},
}

func coreTestNames() []string {
	var names []string
	for _, tests := range coreTests {
		names = append(names, tests...)
	}
	slices.Sort(names)
	return names
}

// TestRecordSupport runs the core tests on each version of Kafka, with the MongoDB on the PATH or else the version of all other tests. It
// writes the results into tested.json, and keeps the runs of other pairs of versions.
func TestRecordSupport(t *testing.T) {
	stacktest.OnlyWith(t, "fetches several versions of Kafka and runs the core tests on each", "doctor.record")
	runs := readRuns()
	for _, version := range recordedVersions {
		t.Run(version, func(t *testing.T) {
			run := runCoreTests(t, version)
			runs = slices.DeleteFunc(runs, func(r testRun) bool { return r.MongoDB == run.MongoDB && r.Kafka == run.Kafka })
			runs = append(runs, run)
		})
	}

	text, err := json.MarshalIndent(map[string]any{"runs": runs}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("tested.json", append(text, '\n'), 0o644); err != nil { //nolint:gosec // a public document
		t.Fatal(err)
	}
}

// runCoreTests runs the core tests on separate servers, with this version of Kafka.
func runCoreTests(t *testing.T, version string) testRun {
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 1, Quick: true, Kafka: devstack.KafkaOptions{Version: version}})
	run := testRun{Date: time.Now().UTC().Format(time.DateOnly), Platform: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version()}
	for _, s := range stack.Servers() {
		switch s.Name {
		case "Kafka":
			run.Kafka = s.Version
		default:
			run.MongoDB = s.Version
		}
	}
	if run.Kafka != version || run.MongoDB == "" {
		t.Fatalf("the servers are %+v", stack.Servers())
	}

	args := []string{"test", "-count=1", "-p=1", "-json", "-run", "^(" + strings.Join(coreTestNames(), "|") + ")$"}
	for dir := range coreTests {
		args = append(args, dir)
	}
	c := exec.CommandContext(t.Context(), "go", args...)
	c.Dir = "../../.."
	c.Env = append(os.Environ(), devstack.EnvMongoDB+"="+stack.MongoURI(), devstack.EnvKafka+"="+strings.Join(stack.Brokers(), ","))
	out, err := c.Output()
	run.Passed = passedTests(t, out)
	for _, name := range coreTestNames() {
		if !slices.Contains(run.Passed, name) {
			run.Failed = append(run.Failed, name)
		}
	}
	if err != nil || len(run.Failed) > 0 {
		t.Errorf("MongoDB %s, Kafka %s: %v, failed %v\n%s", run.MongoDB, run.Kafka, err, run.Failed, out)
	}
	return run
}

// passedTests returns the names of the tests that have passed, from the output of go test -json.
func passedTests(t *testing.T, out []byte) []string {
	t.Helper()
	var passed []string
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var event struct{ Action, Test string }
		err := d.Decode(&event)

		if errors.Is(err, io.EOF) {
			slices.Sort(passed)
			return passed
		}
		if err != nil {
			t.Fatal(err)
		}

		if event.Action == "pass" && event.Test != "" && !strings.Contains(event.Test, "/") {
			passed = append(passed, event.Test)
		}
	}
}
