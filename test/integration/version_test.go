//go:build unix

package integration

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// A program that was linked with a version reports this version everywhere: to people, to other programs, in its bill of
// materials, in the log, the metrics and the list of nodes, and on the operators' page.
func TestEveryPlaceReportsTheLinkedVersion(t *testing.T) {
	t.Parallel()
	const version = kit.BinaryVersion
	program := kit.Binary(t)

	run := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program, args...)
		output, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, output)
		}
		return string(output)
	}
	decode := func(text string, into any) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatalf("%v: %.300s", err, text)
		}
	}

	var short struct{ Version string }
	decode(run("version", "--json"), &short)
	var bill struct {
		Metadata struct{ Component struct{ Version string } }
	}
	decode(run("version", "--sbom"), &bill)
	if text := run("version"); short.Version != version || bill.Metadata.Component.Version != version || !strings.HasPrefix(text, "outrelay "+version+" ") {
		t.Errorf("version --json %q, version --sbom %q, version %q", short.Version, bill.Metadata.Component.Version, text)
	}

	const token = "a-token-of-the-test-of-versions"
	s := kit.New(t, kit.Options{Set: map[string]any{"http.admin": map[string]any{"listen": "127.0.0.1:0", "token": token}}})
	listen, err := devstack.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	file := s.WriteConfig("versioned", listen)
	p := kit.Launch(t, "versioned", program, nil, "run", "--config", file)
	p.HTTP = "http://" + listen
	p.WaitTookOver()

	line := p.WaitForLog("outrelay starts")
	for _, want := range []string{
		"version=" + version, "watcher=", "node=versioned", "watch=", "mongodb=", "kafka=", "http=" + listen, "tasks=", "preset=",
		"recording=position", "slots=1", "lease=",
	} {
		if !strings.Contains(line, want) {
			t.Errorf("the first log line has no %s: %s", want, line)
		}
	}
	if _, metrics := p.Get("/metrics"); !strings.Contains(metrics, `outrelay_build_info{`) || !strings.Contains(metrics, `version="`+version+`"`) {
		t.Error("outrelay_build_info has another version")
	}

	var nodes struct {
		Nodes []struct{ Node, Version string }
	}
	stacktest.Eventually(t, "the node is listed", func() bool {
		decode(run("nodes", "--json", "--config", file), &nodes)
		return len(nodes.Nodes) == 1
	})
	if nodes.Nodes[0].Version != version {
		t.Errorf("the node has the version %q", nodes.Nodes[0].Version)
	}

	if code, page := findOperators(t, p).get("/", token); code != 200 || !strings.Contains(page, "outrelay "+version) {
		t.Errorf("%d: the page does not contain version %s", code, version)
	}
}
