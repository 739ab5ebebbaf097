package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
)

func TestBillOfMaterials(t *testing.T) {
	t.Parallel()
	info := &debug.BuildInfo{Main: debug.Module{Path: "github.com/outrelay/outrelay"}, Deps: []*debug.Module{
		{Path: "a.org/b", Version: "v1.2.3", Sum: "h1:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="},
		{Path: "a.org/old", Version: "v1.0.0", Replace: &debug.Module{Path: "a.org/new", Version: "v2.0.0+incompatible"}},
	}}

	b := newBill(build{Version: "1.0.0", Go: "go1.26.1"}, info)
	if b.Metadata.Component.PURL != "pkg:golang/github.com/outrelay/outrelay@1.0.0" || len(b.Components) != 3 || b.Components[0].PURL != "pkg:golang/std@1.26.1" {
		t.Errorf("unexpected result %+v", b)
	}
	if c := b.Components[1]; c.PURL != "pkg:golang/a.org/b@v1.2.3" || len(c.Hashes) != 1 || c.Hashes[0].Content != "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" {
		t.Errorf("unexpected result %+v", c)
	}
	if c := b.Components[2]; c.Name != "a.org/new" || len(c.Hashes) != 0 {
		t.Errorf("unexpected result %+v", c)
	}

	code, out, errOut := runCommand(t, nil, "version", "--sbom")
	var own bill
	if err := json.Unmarshal([]byte(out), &own); err != nil || code != 0 || errOut != "" || own.Format != "CycloneDX" {
		t.Errorf("%v: %d %.200q %q", err, code, out, errOut)
	}

	// The same list, read from the file of this program.
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if code, of, errOut := runCommand(t, nil, "version", "--sbom", "--of", program); code != 0 || of != out {
		t.Errorf("%d %.200q %q", code, of, errOut)
	}
	for _, args := range [][]string{{"version", "--of", program}, {"version", "--sbom", "--of", "none"}} {
		if code, out, errOut := runCommand(t, nil, args...); code != 1 || out != "" || !strings.Contains(errOut, "--of") {
			t.Errorf("%v: %d %q %q", args, code, out, errOut)
		}
	}
}

// The roles are printed without any server.
func TestRolesAskNoServer(t *testing.T) {
	t.Parallel()
	code, out, errOut := runCommand(t, []string{"OUTRELAY_KAFKA_BROKERS=kafka:9092"}, "roles", "--watch", "shop.outbox", "--principal", "User:relay")
	for _, want := range []string{`make("outrelayRelay"`, `{db: "shop", collection: "outbox"}`, "kafka-acls.sh", "--transactional-id 'outrelay.'"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("%d: no %s in %s%s", code, want, out, errOut)
		}
	}

	code, out, _ = runCommand(t, nil, "roles", "--watch", "shop.outbox", "--json", "--principal", "User:CN=relay", "--set", "state.database=relays")
	var r struct {
		MongoDB []struct{ Role string } `json:"mongodb"`
		Kafka   []struct{ Principal string }
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 || len(r.MongoDB) != 7 || len(r.Kafka) != 2 || r.Kafka[0].Principal != "User:CN=relay" || !strings.Contains(out, `"relays"`) {
		t.Errorf("%v: %d %s", err, code, out)
	}
	// The secrets of a pod are not on the machine of the administrator who makes its roles.
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := "mongodb: {uri: \"${file:/run/secrets/uri}\"}\nwatch: [shop.outbox]\nkafka: {brokers: [\"kafka:9092\"], sasl: {mechanism: plain, username: relay, password: \"${file:/run/secrets/p}\"}, tls: {ca: /run/secrets/ca.crt}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errOut = runCommand(t, nil, "roles", "--config", file)
	for _, want := range []string{`{db: "shop", collection: "outbox"}`, "--bootstrap-server kafka:9092", "User:relay"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("%d: no %s in %s%s", code, want, out, errOut)
		}
	}
	if code, out, errOut := runCommand(t, nil, "roles", "--only", "redis"); code != 1 || out != "" || !strings.Contains(errOut, "mongodb, kafka, atlas, confluent or msk") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
	}
	if code, _, errOut := runCommand(t, []string{"OUTRELAY_MONGODB_URI=nonsense"}, "roles"); code != 1 || !strings.Contains(errOut, "mongodb.uri") {
		t.Errorf("exit code %d, stderr %q", code, errOut)
	}
}
