//go:build unix

package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// readmeProgram is the code that the README leaves to its reader: imports, clients, and two functions around
// its examples.
const readmeProgram = `package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

TYPES

func place(ctx context.Context, db *mongo.Database, orders *mongo.Collection, order Order) error {
	SERVICE
	return err
}

func consume(ctx context.Context, db *mongo.Database, parcels *mongo.Collection) error {
	box, err := outbox.New(db)
	if err != nil {
		return err
	}
	_ = box
	CONSUMER
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	client, err := mongo.Connect(options.Client().ApplyURI(os.Getenv("MONGODB_URI")))
	if err != nil {
		log.Fatal(err)
	}
	db := client.Database(os.Args[1])
	if err := place(ctx, db, db.Collection("orders"), Order{ID: "o-1"}); err != nil {
		log.Fatal(err)
	}
	log.Print("placed")
	if err := consume(ctx, db, db.Collection("parcels")); err != nil {
		log.Fatal(err)
	}
}
`

// readmeBlock returns the first code block of the README in this language that contains this text.
func readmeBlock(t *testing.T, language, with string) string {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?ms)^ *```"+language+"\n(.*?)^ *```").FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(m[1], with) {
			return m[1]
		}
	}
	t.Fatalf("the README has no %s example with %q", language, with)
	return ""
}

// buildReadme builds a program from the README's service and consumer in a separate module, like a reader.
// oldNew are pairs of texts to replace in the README.
func buildReadme(t *testing.T, oldNew ...string) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	sum, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}

	const path = "github.com/outrelay/outrelay"
	own := strings.NewReplacer(oldNew...)
	program := strings.NewReplacer(
		"TYPES", own.Replace(readmeBlock(t, "go", "event.Type[Order]")),
		"SERVICE", own.Replace(readmeBlock(t, "go", "box.Transaction(ctx, func")),
		"CONSUMER", own.Replace(readmeBlock(t, "go", `consumer.New("shipping"`)),
	).Replace(readmeProgram)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"main.go": program,
		"go.mod":  strings.Replace(string(mod), "module "+path, "module example.com/shop", 1) + "\nrequire " + path + " v0.0.0\n\nreplace " + path + " => " + root + "\n",
		"go.sum":  string(sum),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-mod=mod", "-o", "shop", ".")
	build.Dir = dir
	if words, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the README's examples: %v\n%s", err, words)
	}
	return filepath.Join(dir, "shop")
}

// The README's service and consumer run next to `outrelay dev --keep`, and with the README's smallest
// configuration, whose topics do not exist yet. The consumer handles the event, and the event that it appends
// is delivered too.
func TestReadmeExamplesWorkWhenCopied(t *testing.T) {
	t.Parallel()
	stacktest.LockMachine(t)
	binary := kit.Binary(t, "")
	noServers := []string{devstack.EnvMongoDB + "=", devstack.EnvKafka + "="}
	dev := kit.Launch(t, "dev", binary, noServers, "dev", "--keep", "--rate", "5")
	mongoURI := strings.Fields(dev.WaitForLog("  MongoDB   "))[1]
	broker := strings.Fields(dev.WaitForLog("  Kafka   "))[1]
	dev.WaitForLog("mongosh")
	client, err := mongo.Connect(options.Client().ApplyURI(mongoURI))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(context.WithoutCancel(t.Context())) })
	var types sync.Map // of the handlers' events, by topic
	go devstack.Tail(t.Context(), []string{broker}, []string{"outbox.event.parcel", "outbox.event.letter"}, func(m devstack.Message) {
		if string(m.Key) == "o-1" {
			types.Store(m.Topic, m.Header("type"))
		}
	})

	// copied runs the README's program on a database. It waits for the effect of its handler and for the
	// handler's event.
	copied := func(program, database, topic string) {
		t.Helper()
		shop := kit.Launch(t, database, program, []string{"MONGODB_URI=" + mongoURI}, database)
		parcels := client.Database(database).Collection("parcels")
		stacktest.Eventually(t, "the handler's document in "+database, func() bool {
			n, err := parcels.CountDocuments(t.Context(), bson.D{{Key: "order", Value: "o-1"}})
			return err == nil && n == 1
		})
		stacktest.Eventually(t, "the handler's event in "+topic, func() bool {
			_, ok := types.Load(topic)
			return ok
		})
		if typ, _ := types.Load(topic); typ != "ParcelPacked" {
			t.Errorf("type of the handler's event is %q", typ)
		}
		shop.Terminate()
		if code := shop.WaitExit(); code != 0 {
			t.Errorf("exit code %d of the README's program\n%s", code, shop.ReadLog())
		}
	}
	copied(buildReadme(t, "kafka-1:9092", broker), "shop", "outbox.event.parcel")

	config := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := strings.NewReplacer("kafka-1:9092, kafka-2:9092", broker, "shop.outbox", "store.outbox").Replace(readmeBlock(t, "yaml", "watch:"))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	relay := kit.Launch(t, "relay", binary, []string{"MONGODB_URI=" + mongoURI, "OUTRELAY_HTTP_LISTEN=off"}, "run", "--config", config)
	// The aggregates differ from those of dev, so that no topic exists.
	copied(buildReadme(t, "kafka-1:9092", broker, `Aggregate: "order"`, `Aggregate: "purchase"`, ".order", ".purchase", `Aggregate: "parcel"`, `Aggregate: "letter"`, `"shipping"`, `"mailing"`), "store", "outbox.event.letter")
	relay.Terminate()
	relay.WaitExit()

	// Events of another service do not affect the result of dev.
	dev.Terminate()
	if code := dev.WaitExit(); code != 0 {
		t.Errorf("exit code %d of dev\n%s", code, dev.ReadLog())
	}
}
