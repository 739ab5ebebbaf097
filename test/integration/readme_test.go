//go:build unix

package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// documentBlock returns the first code block of a document in this language that contains this text.
func documentBlock(t *testing.T, document, language, with string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", document))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?ms)^ *```"+language+"\n(.*?)^ *```").FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(m[1], with) {
			return m[1]
		}
	}
	t.Fatalf("%s has no %s example with %q", document, language, with)
	return ""
}

// buildReadme builds the README's service and consumer in a separate module, like a reader, and returns their paths.
// oldNew are pairs of texts to replace in them.
func buildReadme(t *testing.T, oldNew ...string) (service, consumer string) {
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
	dir := t.TempDir()
	for name, text := range map[string]string{
		"place/main.go": own.Replace(documentBlock(t, "README.md", "go", "outbox.New(db)")),
		"pack/main.go":  own.Replace(documentBlock(t, "README.md", "go", "consumer.New(")),
		"go.mod":        strings.Replace(string(mod), "module "+path, "module example.com/hello", 1) + "\nrequire " + path + " v0.0.0\n\nreplace " + path + " => " + root + "\n",
		"go.sum":        string(sum),
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-mod=mod", "-o", "bin/", "./place", "./pack")
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the README's programs: %v\n%s", err, out)
	}
	return filepath.Join(dir, "bin", "place"), filepath.Join(dir, "bin", "pack")
}

// The README's service and consumer run unchanged next to `outrelay dev --rate 0`, with the variables that dev prints.
// With another database they run with a separate relay and the configuration of the first hour, whose topic does not
// exist yet. The handler packs each order once. The events do not affect the result of dev.
func TestReadmeExamplesWorkWhenCopied(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "it compiles each program of the documents", "slow")
	stacktest.LockMachine(t)
	binary := kit.Binary(t)
	noServers := []string{devstack.EnvMongoDB + "=", devstack.EnvKafka + "="}
	dev := kit.Launch(t, "dev", binary, noServers, "dev", "--rate", "0")
	dev.WaitForLog("  all ready  ")
	variables := regexp.MustCompile(`export MONGODB_URI='(.*)' KAFKA=(.*)$`).FindStringSubmatch(dev.WaitForLog("export MONGODB_URI="))
	if variables == nil {
		t.Fatal("dev prints no variables to copy")
	}
	uri, broker := variables[1], variables[2]
	env := []string{"MONGODB_URI=" + uri, "KAFKA=" + broker}
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(context.WithoutCancel(t.Context())) })

	// copied runs the programs of a reader: the consumer, and the service several times.
	copied := func(database string, oldNew ...string) {
		t.Helper()
		const orders = 3
		service, consumer := buildReadme(t, oldNew...)
		pack := kit.Launch(t, "pack", consumer, env)
		for range orders {
			place := kit.Launch(t, "place", service, env)
			if code := place.WaitExit(); code != 0 {
				t.Fatalf("exit code %d of the README's service\n%s", code, place.ReadLog())
			}
		}

		parcels := client.Database(database).Collection("parcels")
		stacktest.Eventually(t, "the handler's documents in "+database, func() bool {
			n, err := parcels.CountDocuments(t.Context(), bson.D{})
			return err == nil && n == orders
		})
		pack.Terminate()
		if code := pack.WaitExit(); code != 0 {
			t.Errorf("exit code %d of the README's consumer\n%s", code, pack.ReadLog())
		}
		if n, err := parcels.CountDocuments(t.Context(), bson.D{}); n != orders || err != nil {
			t.Errorf("%d parcels of %d orders: %v", n, orders, err)
		}
	}
	copied("shop")
	topic := exec.CommandContext(t.Context(), binary, "dev", "topic", "outbox.event.order", "--brokers", broker, "--count", "3")
	out, err := topic.Output()
	if err != nil || strings.Count(string(out), "type=OrderPlaced") != 3 {
		t.Errorf("dev topic printed %v\n%s", err, out)
	}
	if record := maskIDs(documentBlock(t, "README.md", "text", "key=")); !strings.Contains(maskIDs(string(out)), record) {
		t.Errorf("the README shows the record\n%sand dev topic prints\n%s", record, out)
	}

	config := filepath.Join(t.TempDir(), "outrelay.yaml")
	if err := os.WriteFile(config, []byte(documentBlock(t, "docs/start/first-hour.md", "yaml", "watch:")), 0o600); err != nil {
		t.Fatal(err)
	}
	relay := kit.Launch(t, "relay", binary, append([]string{"OUTRELAY_HTTP_LISTEN=off"}, env...), "run", "--config", config)
	copied("hello", `Database("shop")`, `Database("hello")`, `Aggregate: "order"`, `Aggregate: "purchase"`, "event.order", "event.purchase", `"shipping"`, `"mailing"`)
	relay.Terminate()
	relay.WaitExit()

	dev.Terminate()
	if code := dev.WaitExit(); code != 0 {
		t.Errorf("exit code %d of dev\n%s", code, dev.ReadLog())
	}
}

// maskIDs replaces the ids and places in printed records, which differ from run to run.
func maskIDs(text string) string {
	return regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{24}|(?m:^[0-9]+@[0-9]+)`).ReplaceAllString(text, "#")
}

// The README stays short: two complete programs, and the facts for a decision.
func TestReadmeStaysShort(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), "\n"); n > 170 {
		t.Errorf("%d lines: move details to docs", n)
	}
}
