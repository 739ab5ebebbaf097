//go:build unix

package migrate

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/test/kit"
)

// keys is the number of ordering keys, each with a writer.
const keys = 8

// scene is a migration: an outbox under load, and the records that arrive.
type scene struct {
	t      *testing.T
	db     *mongo.Database
	state  state.Database
	topics *stacktest.Topics
	topic  string
	env    []string // of outrelay
	dir    string
	relay  *exec.Cmd

	ignoredHeaders []string // in the comparison of records
	payloads       []any    // of insertVaried, in turns
	more           bson.D   // further fields of its documents, instead of the type

	newID func(n int) (id any, text string) // of insertVaried; nil: ObjectIds

	ctx     context.Context
	stop    context.CancelFunc
	writers sync.WaitGroup

	mu      sync.Mutex
	written map[string]written // by id
	arrived map[string][]*kgo.Record
	records int
}

// written is a committed event.
type written struct {
	key    string
	number int // of the key
}

func newScene(t *testing.T) *scene {
	t.Helper()
	client := stacktest.Client(t)

	s := &scene{
		t: t, db: stacktest.Database(t, client), state: state.Of(stacktest.Database(t, client)), topics: stacktest.NewTopics(t),
		dir: t.TempDir(), written: map[string]written{}, arrived: map[string][]*kgo.Record{},
	}

	s.topic = s.topics.Create("order", 4)
	s.env = []string{
		"OUTRELAY_MONGODB_URI=" + stacktest.MongoURI(t), "OUTRELAY_STATE_DATABASE=" + s.state.Name(),
		"OUTRELAY_KAFKA_BROKERS=" + strings.Join(stacktest.Brokers(t), ","), "OUTRELAY_WATCH=" + s.db.Name() + ".outbox",
		"OUTRELAY_WATCHER=orders", "OUTRELAY_TOPICS_TEMPLATE=" + s.topics.Prefix + "{aggregatetype}", "OUTRELAY_HTTP_LISTEN=off",
	}

	s.ctx, s.stop = context.WithCancel(t.Context())
	t.Cleanup(func() {
		s.stop()
		s.writers.Wait()
	})
	return s
}

// writeEvents inserts events with every key until stop or stopWriting, about 25 a second for each. insert inserts one and returns its id.
func (s *scene) writeEvents(insert func(ctx context.Context, key string, number int) (id string, err error)) (stop func()) {
	ctx, cancel := context.WithCancel(s.ctx)
	var running sync.WaitGroup
	defer s.writers.Go(running.Wait)

	for k := range keys {
		running.Go(func() {
			key, tick := fmt.Sprint("customer-", k), time.NewTicker(40*time.Millisecond)
			defer tick.Stop()

			// Numbers of a later call are higher.
			for n := s.countWritten(); ; n++ {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}

				// The insert that runs when the writing stops ends as well.
				id, err := insert(context.WithoutCancel(ctx), key, n)
				if err != nil {
					s.t.Error(err)
					return
				}

				s.mu.Lock()
				s.written[id] = written{key, n}
				s.mu.Unlock()
			}
		})
	}

	return func() {
		cancel()
		running.Wait()
	}
}

// stopWriting stops the writers. The scene can write again afterwards.
func (s *scene) stopWriting() {
	s.stop()
	s.writers.Wait()
	s.ctx, s.stop = context.WithCancel(s.t.Context())
}

func (s *scene) countWritten() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.written)
}

// insertEnvelope inserts a document as services write it for Debezium, with a text as payload.
func (s *scene) insertEnvelope(ctx context.Context, key string, n int) (string, error) {
	return s.insertPayload(ctx, key, n, fmt.Sprintf(`{"number":%d,"text":"é <&>"}`, n))
}

// insertVaried inserts such a document with one of the payloads.
func (s *scene) insertVaried(ctx context.Context, key string, n int) (string, error) {
	return s.insertPayload(ctx, key, n, s.payloads[n%len(s.payloads)])
}

// variedPayloads returns a text, and a document with values that JSON lacks.
func variedPayloads(t *testing.T) []any {
	t.Helper()
	amount, err := bson.ParseDecimal128("12.30")
	if err != nil {
		t.Fatal(err)
	}

	return []any{`{"text":"é <&>\u2028"}`, bson.D{
		{Key: "long", Value: int64(1) << 53},
		{Key: "int", Value: int32(-7)},
		{Key: "price", Value: 0.1},
		{Key: "whole", Value: 3.0},
		{Key: "amount", Value: amount},
		{Key: "at", Value: time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)},
		{Key: "of", Value: bson.NewObjectID()},
		{Key: "list", Value: bson.A{"é <&>", true, nil, bson.D{{Key: "n", Value: int32(1)}}}},
	}}
}

func (s *scene) insertPayload(ctx context.Context, key string, n int, payload any) (string, error) {
	oid := bson.NewObjectID()
	id, text := any(oid), oid.Hex()
	if s.newID != nil {
		id, text = s.newID(n)
	}

	more := s.more
	if more == nil {
		more = bson.D{{Key: "type", Value: "OrderPlaced"}}
	}

	_, err := s.db.Collection("outbox").InsertOne(ctx, append(bson.D{
		{Key: "_id", Value: id},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: key},
		{Key: "payload", Value: payload},
	}, more...))
	return text, err
}

// followTopic reads topic and files each record under the id of its event, until the test ends.
func (s *scene) followTopic(topic string, idOf func(r *kgo.Record) string) {
	s.t.Helper()

	client, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(s.t)...), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		s.t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.WithoutCancel(s.t.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			client.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
				s.mu.Lock()
				defer s.mu.Unlock()
				id := idOf(r)
				s.arrived[id] = append(s.arrived[id], r)
				s.records++
			})
		}
	}()

	s.t.Cleanup(func() {
		cancel()
		<-done
		client.Close()
	})
}

// waitArrived blocks until the condition about the numbers of events and records holds. It calls ok with the lock.
func (s *scene) waitArrived(what string, ok func(events, records int) bool) {
	s.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for tick := time.Tick(50 * time.Millisecond); ; <-tick {
		s.mu.Lock()
		events, records := len(s.arrived), s.records
		met := ok(events, records)
		s.mu.Unlock()

		if met {
			return
		}

		if time.Now().After(deadline) {
			s.t.Fatalf("waiting for %s: %d events in %d records", what, events, records)
		}
	}
}

// waitAll blocks until every committed event has arrived.
func (s *scene) waitAll() {
	s.t.Helper()
	s.waitArrived("all events", func(int, int) bool {
		for id := range s.written {
			if len(s.arrived[id]) == 0 {
				return false
			}
		}
		return true
	})
}

// checkRecords checks that nothing is lost, that the repeats are within the bound, that the first records of each key are in order (if ordered), and that
// all records of one event are equal. It returns the number of repeats.
func (s *scene) checkRecords(bound int64, ordered bool) (repeats int64) {
	s.t.Helper()
	s.waitAll()
	s.mu.Lock()
	defer s.mu.Unlock()
	first := map[string][]*kgo.Record{} // by key
	number := map[*kgo.Record]int{}
	for id, list := range s.arrived {
		event, ok := s.written[id]
		if !ok {
			s.t.Errorf("event %s was never committed", id)
		}
		repeats += int64(len(list) - 1)
		for _, r := range list[1:] {
			if got, want := s.printRecord(r), s.printRecord(list[0]); got != want {
				s.t.Errorf("the records of event %s differ:\n%s\n%s", id, want, got)
			}
		}
		first[event.key] = append(first[event.key], list[0])
		number[list[0]] = event.number
	}

	for key, list := range first {
		slices.SortFunc(list, func(a, b *kgo.Record) int { return int(a.Offset - b.Offset) })
		for i := 1; i < len(list) && ordered; i++ {
			if list[i].Partition != list[0].Partition || number[list[i]] <= number[list[i-1]] {
				s.t.Errorf("%s: event %d at partition %d follows event %d at partition %d", key,
					number[list[i]], list[i].Partition, number[list[i-1]], list[0].Partition)
			}
		}
	}
	if repeats > bound {
		s.t.Errorf("%d repeats, announced were at most %d", repeats, bound)
	}
	return repeats
}

// printRecord returns the bytes of a record that a consumer sees. The order of headers with different names does not matter.
func (s *scene) printRecord(r *kgo.Record) string {
	value := "null"
	if r.Value != nil {
		value = fmt.Sprintf("%q", r.Value)
	}
	var headers []string
	for _, h := range r.Headers {
		// outrelay adds its namespace to each record.
		if h.Key != "outrelay-ns" && !slices.Contains(s.ignoredHeaders, h.Key) {
			headers = append(headers, fmt.Sprintf("%s=%q", h.Key, h.Value))
		}
	}
	slices.Sort(headers)
	return fmt.Sprintf("partition %d key %q value %s headers %s", r.Partition, r.Key, value, strings.Join(headers, " "))
}

// runOutrelay runs a command to its end, and decodes its output into v.
func (s *scene) runOutrelay(v any, args ...string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*time.Minute)
	defer cancel()

	cmd := exec.CommandContext(ctx, kit.Binary(s.t), append(args, "--json")...)
	cmd.Env = append(os.Environ(), s.env...)
	var diagnosis strings.Builder
	cmd.Stderr = &diagnosis
	out, err := cmd.Output()

	if err == nil {
		err = json.Unmarshal(out, v)
	}

	if err != nil {
		s.t.Fatalf("outrelay %s: %v\n%s%s", strings.Join(args, " "), err, diagnosis.String(), out)
	}
}

// writeConfig writes a configuration file of outrelay. The environment completes it.
func (s *scene) writeConfig(lines ...string) {
	s.t.Helper()
	file := filepath.Join(s.dir, "outrelay.yaml")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.env = append(s.env, "OUTRELAY_CONFIG="+file)
}

// startRelay starts outrelay run. It ends with the test.
func (s *scene) startRelay() { s.relay = s.startProgram("outrelay", s.env, kit.Binary(s.t), "run") }

// startProgram starts a program that writes its output to a file, which a failed test shows. The end of the test kills it.
func (s *scene) startProgram(name string, env []string, path string, args ...string) *exec.Cmd {
	s.t.Helper()
	file, err := os.Create(filepath.Join(s.dir, name+".log"))
	if err != nil {
		s.t.Fatal(err)
	}

	cmd := exec.Command(path, args...)
	cmd.Dir, cmd.Env = s.dir, append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = file, file
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}

	s.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = file.Close()
		if text, err := os.ReadFile(file.Name()); s.t.Failed() && err == nil {
			s.t.Logf("output of %s:\n%s", name, text[max(0, len(text)-6000):])
		}
	})
	return cmd
}

// endProgram ends a program by a signal, and returns the time at which it had ended.
func (s *scene) endProgram(cmd *exec.Cmd, by syscall.Signal) time.Time {
	s.t.Helper()
	if err := cmd.Process.Signal(by); err != nil {
		s.t.Fatal(err)
	}
	_ = cmd.Wait()
	return time.Now()
}

// runProgram runs a program to its end.
func (s *scene) runProgram(name string, args ...string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = s.dir
	if out, err := cmd.CombinedOutput(); err != nil {
		s.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// startConnect starts Kafka Connect with a connector. It stores offsets every five seconds.
func (s *scene) startConnect(plugin string, distributed bool, config map[string]string) *kafkaconnect.Worker {
	s.t.Helper()
	w, err := kafkaconnect.Prepare(s.t.Context(), kafkaconnect.Options{
		Plugin: plugin, Name: "orders", Config: config, Brokers: stacktest.Brokers(s.t), JVM: []string{"-Xmx512m"},
		Distributed: distributed, Prefix: s.topics.Prefix,
	})

	if err == nil {
		s.t.Cleanup(func() {
			if s.t.Failed() {
				s.t.Logf("output of Kafka Connect:\n%s", w.Log())
			}
			w.Close()
		})
		err = w.Launch()
	}

	if err == nil {
		err = w.Create(s.t.Context())
	}

	if err != nil {
		s.t.Fatal(err)
	}
	return w
}
