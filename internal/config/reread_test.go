package config

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A password in a file is rotated like a token or a certificate: the file is replaced, and nobody is told.
func TestPasswordInAFileIsReadAgain(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "password")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	load := func() Config {
		t.Helper()
		c, _, err := Load(writeConfig(t, `
mongodb: { uri: "mongodb://h/shop" }
kafka: { brokers: [k:1], sasl: { mechanism: scram-sha-512, username: u, password: "${file:`+file+`}" } }
`), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}

	write("first")
	c := load()
	if got := c.Kafka.SASL.Password.Current(); got != "first" {
		t.Errorf("the password at the start is %q", got)
	}
	write("second")
	if got := c.Kafka.SASL.Password.Current(); got != "second" {
		t.Errorf("the rotated password is %q", got)
	}

	// A reload has nothing to apply.
	if keys := DifferingKeys(c, load()); slices.Contains(keys, "kafka.sasl.password") {
		t.Errorf("keys that need a restart: %v", keys)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got := c.Kafka.SASL.Password.Current(); got != "first" {
		t.Errorf("without the file, the password is %q, want that of the start", got)
	}
}
