//go:build unix

package bench

import (
	"bytes"
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// runBench runs `outrelay bench --json` on the shared servers and decodes its JSON object. It returns
// the text on standard error, and prints it if the test fails.
func runBench(t *testing.T, object any, args ...string) (output string) {
	t.Helper()
	binary := kit.Binary(t)
	ctx, cancel := kit.Context(t)
	defer cancel()
	var out, errOut bytes.Buffer
	args = append([]string{"bench", "--json", "--mongodb", stacktest.MongoURI(t), "--kafka", strings.Join(stacktest.Brokers(t), ",")}, args...)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &errOut)
	}

	t.Cleanup(func() {
		if t.Failed() {
			t.Log(errOut.String())
		}
	})

	d := json.NewDecoder(&out)
	if err := d.Decode(object); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Errorf("more than one object on standard output: %v", err)
	}
	return errOut.String()
}
