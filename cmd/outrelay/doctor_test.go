package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/doctor"
)

// runDoctor runs the doctor. If there are servers, it runs the doctor again until they respond within its time
// limit.
func runDoctor(t *testing.T, env []string, there bool, flags ...string) (code int, out, errOut string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		code, out, errOut = runCommand(t, env, append([]string{"doctor"}, flags...)...)
		late := strings.Contains(out+errOut, "does not respond in time") || strings.Contains(out+errOut, "no broker responds in time") || strings.Contains(out+errOut, "no response in time") ||
			strings.Contains(out+errOut, "no primary responds within")
		if !there || !late || time.Now().After(end) {
			return code, out, errOut
		}
	}
}

func TestDoctor(t *testing.T) {
	t.Parallel()
	// The oplog window of the shared server depends on the writes of other tests.
	mongod := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true})
	good := []string{
		"OUTRELAY_MONGODB_URI=" + mongod.MongoURI(), "OUTRELAY_KAFKA_BROKERS=" + strings.Join(stacktest.Brokers(t), ","),
		"OUTRELAY_WATCH=shop.outbox", "OUTRELAY_STATE_DATABASE=relay",
	}

	away := []string{
		"OUTRELAY_MONGODB_URI=mongodb://user:" + plantedSecret + "@127.0.0.1:1/shop", "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1",
		"OUTRELAY_KAFKA_SASL_MECHANISM=scram-sha-256", "OUTRELAY_KAFKA_SASL_USERNAME=u", "OUTRELAY_KAFKA_SASL_PASSWORD=" + plantedSecret,
	}

	for _, c := range []struct {
		env  []string
		code int
		last string
	}{
		{good, 0, " 0 failed\n"},
		{away, 1, " 2 failed, 33 not checked\n"},
	} {
		code, out, errOut := runDoctor(t, c.env, c.code == 0, "--json")
		var r doctor.Report
		if err := json.Unmarshal([]byte(out), &r); err != nil || code != c.code || strings.Contains(out+errOut, plantedSecret) || r.Failed() != (c.code == 1) {
			t.Errorf("%v: exit code %d, stdout %q, stderr %q", err, code, out, errOut)
		}
		if !slices.ContainsFunc(r.Checks, func(x doctor.Check) bool { return x.ID == "mongodb" }) {
			t.Errorf("%q", out)
		}
		code, out, errOut = runDoctor(t, c.env, c.code == 0)
		if code != c.code || errOut != "" || !strings.HasSuffix(out, c.last) || strings.Contains(out, plantedSecret) {
			t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
		}
	}

	if code, out, errOut := runCommand(t, nil, "doctor", "--json"); code != 1 || out != "" || !strings.Contains(errOut, "mongodb.uri") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
	}
}
