package producers

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/servertest"
)

// The flag enables the tests with the drivers of other languages, which npm, pip and Maven fetch (about 10 MB), and cargo (about 60 MB).
var _ = flag.Bool("producers", false, "run the producers in other languages; needs Node with npm, Python with pip, a JDK with Maven, and cargo if there is Rust")

// orders is how many orders each program places. It aborts every tenth.
const orders = 1000

// maxLines is the most lines of a program, so that it stays an example.
const maxLines = 80

func TestProducersOfOtherLanguages(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches drivers with npm, pip and Maven", "producers")
	programs := []program{
		{"node", []string{"npm", "install", "--no-audit", "--no-fund"}, []string{"node", "producer.js"}, nil},
		{
			"python",
			[]string{"python3", "-m", "pip", "install", "--disable-pip-version-check", "--target", "libs", "-r", "requirements.txt"},
			[]string{"python3", "producer.py"},
			[]string{"PYTHONPATH=libs"},
		},
		{
			"java",
			[]string{"mvn", "-B", "--no-transfer-progress", "dependency:copy-dependencies", "-DoutputDirectory=libs"},
			[]string{"java", "-cp", "libs" + string(os.PathSeparator) + "*", "Producer.java"},
			nil,
		},
	}
	// Many machines have no Rust, and building the driver takes minutes. The cache keeps the result.
	// A cargo of rustup may have no toolchain.
	if err := exec.CommandContext(t.Context(), "cargo", "--version").Run(); err == nil {
		target := cacheDir(t)
		programs = append(programs, program{
			"rust",
			[]string{"cargo", "build", "--quiet", "--locked", "--target-dir", target},
			[]string{filepath.Join(target, "debug", "producer")},
			nil,
		})
	} else {
		t.Logf("without cargo, the producer in Rust does not run: %v", err)
	}

	for _, p := range programs {
		t.Run(p.language, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(p.language)); err != nil {
				t.Fatal(err)
			}
			t.Logf("fetching the driver for %s: %s", p.language, strings.Join(p.install, " "))
			runProgram(t, dir, 14*time.Minute, nil, p.install)

			env := servertest.Start(t)
			database := []string{"MONGODB_URI=" + env.MongoURI, "MONGODB_DATABASE=" + env.DB.Name()}
			runProgram(t, dir, 4*time.Minute, append(database, p.env...), append(p.run, fmt.Sprint(orders)))
			checkRecords(t, env, p.language)
		})
	}
}

// program is an example in another language.
type program struct {
	language string
	install  []string // fetches the driver
	run      []string
	env      []string
}

// cacheDir returns the directory that keeps the compiled driver for Rust.
func cacheDir(t *testing.T) string {
	t.Helper()
	base, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(base, "outrelay", "producers-rust")
}

// runProgram runs a program in dir until it ends.
func runProgram(t *testing.T, dir string, within time.Duration, env, args []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// topicPartitions is the number of partitions of a topic in servertest.
const topicPartitions = 4

// checkRecords reads the topic up to an event at the end of each partition. It checks each record, that the records of each
// customer are in order, and that there is one for each committed order and none of an aborted one.
func checkRecords(t *testing.T, env *servertest.Env, language string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(env.Brokers...), kgo.ConsumeTopics(env.Topic("outbox.event.order")),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for p := range topicPartitions {
		end := bson.D{
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "end"},
			{Key: "type", Value: "End"},
			{Key: "payload", Value: nil},
			{Key: "partition", Value: p},
		}
		if _, err := env.DB.Collection("outbox").InsertOne(t.Context(), end); err != nil {
			t.Fatal(err)
		}
	}

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	namespace := sha256.Sum256([]byte(env.DB.Name() + ".outbox"))
	last := map[string]int{}
	records, ended, ids := 0, 0, map[string]bool{}
	for ended < topicPartitions {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatalf("after %d records: %v", records, err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if string(r.Key) == "end" {
				ended++
				return
			}
			records++
			id, number := "", -1
			if len(r.Headers) > 0 {
				id = string(r.Headers[0].Value)
			}
			ids[id] = true
			_, _ = fmt.Sscanf(string(r.Value), `{"number":%d`, &number)

			// The golden record, which is the same for each language.
			golden := fmt.Sprintf(`customer-%d {"number":%d,"cents":%d} id=%s outrelay-ns=%s type=OrderPlaced language=%s`,
				number%20, number, 100*number, id, namespace[:8], language)
			got := fmt.Sprintf("%s %s", r.Key, r.Value)
			for _, h := range r.Headers {
				got += fmt.Sprintf(" %s=%s", h.Key, h.Value)
			}
			if got != golden {
				t.Errorf("record %s, want %s", got, golden)
			}
			if number%10 == 9 {
				t.Errorf("order %d was aborted, and its event was sent", number)
			}
			customer := string(r.Key)
			if before, ok := last[customer]; ok && number <= before {
				t.Errorf("%s: order %d follows order %d", customer, number, before)
			}
			last[customer] = number
		})
	}
	if committed := orders - orders/10; records != committed || len(ids) != records {
		t.Errorf("%d records with %d ids, want %d", records, len(ids), committed)
	}
}

func TestProducersAreShort(t *testing.T) {
	t.Parallel()
	programs := 0
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.Contains(path, string(os.PathSeparator)) || !strings.Contains(strings.ToLower(filepath.Base(path)), "producer.") {
			return err
		}
		programs++
		text, err := os.ReadFile(path)
		if n := strings.Count(string(text), "\n"); n > maxLines {
			t.Errorf("%s has %d lines, at most %d", path, n, maxLines)
		}
		return err
	})
	if err != nil || programs != 4 {
		t.Errorf("%d programs, %v", programs, err)
	}
}
