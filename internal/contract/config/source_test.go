package config

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A problem of a value from a variable or a flag names it, and no line of the file. A problem of a value of the file has its line.
func TestProblemsNameTheirSource(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, `mongodb: {uri: "mongodb://m1/"}
kafka:
  brokers: [k1]
  tls:
    cert: /no/such/cert
lease:
  ttl: 1ms
`)
	env := []string{
		"OUTRELAY_LEASE_TTL=1ms", "OUTRELAY_KAFKA_TLS={ca: /no/such/ca}", "OUTRELAY_TOPICS_RULES=[{mach: {}, to: [a]}]",
		"OUTRELAY_KAFKA_SASL={mechanism: oauthbearer, token: {file: /a, command: [b]}}", "OUTRELAY_RECORD={", "OUTRELAY_MONGODB_TLS={}",
	}
	set := []string{"kafka.broker=x", "log.level=loud", "watch=a.b,shop", "topics.create={partitions: many}", "mapping={typ: a}", "slots=x", "limits=[", "retention=${env:NOT_SET}"}
	_, _, err := Load(file, env, set)
	problems, ok := errors.AsType[*Problems](err)
	if !ok {
		t.Fatal(err)
	}

	var got []string
	for _, problem := range problems.List {
		problem.Found, problem.Allowed = "", ""
		got = append(got, problem.String())
	}
	want := []string{
		"--set kafka.broker: ",
		"kafka.brokers[0] (line 3): ",
		"kafka.sasl.token (OUTRELAY_KAFKA_SASL): ",
		"kafka.tls.ca (OUTRELAY_KAFKA_TLS): ",
		"kafka.tls.key (line 4): ",
		"lease.ttl (OUTRELAY_LEASE_TTL): ",
		"--set limits: ",
		"--set log.level: ",
		"--set mapping.typ: ",
		"record (OUTRELAY_RECORD): ",
		"--set retention: ",
		"--set slots: ",
		"--set topics.create.partitions: ",
		"topics.rules[0].mach (OUTRELAY_TOPICS_RULES): ",
		"--set watch[1]: ",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s\n%v", diff, err)
	}
}
