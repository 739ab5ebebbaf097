package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/doctor"
)

func TestDoctor(t *testing.T) {
	t.Parallel()
	state := stacktest.Database(t, stacktest.Client(t))
	good := []string{
		"OUTRELAY_MONGODB_URI=" + stacktest.MongoURI(t), "OUTRELAY_KAFKA_BROKERS=" + strings.Join(stacktest.Brokers(t), ","),
		"OUTRELAY_WATCH=" + state.Name() + "x.outbox", "OUTRELAY_MONGODB_STATE=" + state.Name(),
		"OUTRELAY_RETENTION=1m", // others write to this server, too: its oplog may hold minutes only
	}
	away := []string{
		"OUTRELAY_MONGODB_URI=mongodb://user:" + planted + "@127.0.0.1:1/shop", "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1",
		"OUTRELAY_KAFKA_SASL_MECHANISM=scram-sha-256", "OUTRELAY_KAFKA_SASL_USERNAME=u", "OUTRELAY_KAFKA_SASL_PASSWORD=" + planted,
	}
	for _, c := range []struct {
		env  []string
		code int
		last string
	}{
		{good, 0, " 0 failed\n"},
		{away, 1, " 2 failed\n"},
	} {
		code, out, errOut := call(t, c.env, "doctor", "--json")
		var r doctor.Report
		if err := json.Unmarshal([]byte(out), &r); err != nil || code != c.code || strings.Contains(out+errOut, planted) || r.Failed() != (c.code == 1) {
			t.Errorf("%v: %d %q %q", err, code, out, errOut)
		}
		if !slices.ContainsFunc(r.Checks, func(x doctor.Check) bool { return x.ID == "mongodb" }) {
			t.Errorf("%q", out)
		}
		code, out, errOut = call(t, c.env, "doctor")
		if code != c.code || out != "" || !strings.HasSuffix(errOut, c.last) || strings.Contains(errOut, planted) {
			t.Errorf("%d %q %q", code, out, errOut)
		}
	}
	if code, out, errOut := call(t, nil, "doctor", "--json"); code != 1 || out != "" || !strings.Contains(errOut, "mongodb.uri") {
		t.Errorf("%d %q %q", code, out, errOut)
	}
}
