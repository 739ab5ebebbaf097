package config

import (
	"strings"
	"testing"
)

// A section that was given as another value gets an error with its keys.
func TestASectionNamesItsKeys(t *testing.T) {
	t.Parallel()
	_, _, err := Load("", nil, []string{"mongodb.uri=mongodb://h/a", "kafka.brokers=h:1", "watch=a.outbox", "topics.create=true"})
	want := "topics.create: found true; expected a section with keys: partitions, replication, configs; {} takes their defaults"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// A file that cannot be loaded is the only problem: the keys that it may hold are not reported as missing.
func TestALostFileIsTheOnlyProblem(t *testing.T) {
	t.Parallel()
	_, _, err := Load("/no/such/file.yaml", nil, nil)
	if err == nil || !strings.Contains(err.Error(), "/no/such/file.yaml: cannot be read") || strings.Contains(err.Error(), "required") {
		t.Errorf("%v", err)
	}
}
