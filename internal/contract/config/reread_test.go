package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Secrets for Kafka in a file are rotated like a token or a certificate: the file is replaced, without a signal.
func TestSecretsInAFileAreReadAgain(t *testing.T) {
	t.Parallel()
	for key, c := range map[string]struct {
		sasl string
		read func(Config) Secret
	}{
		"kafka.sasl.password": {
			"{ mechanism: scram-sha-512, username: u, password: '${file:FILE}' }",
			func(c Config) Secret { return c.Kafka.SASL.Password },
		},
		"kafka.sasl.token.oidc.client_secret": {
			"{ mechanism: oauthbearer, token: { oidc: { url: 'https://login/token', client_id: c, client_secret: '${file:FILE}' } } }",
			func(c Config) Secret { return c.Kafka.SASL.Token.OIDC.ClientSecret },
		},
	} {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "secret")
			load := func() Config {
				return mustLoad(t, "mongodb: { uri: 'mongodb://h/shop' }\nkafka: { brokers: [k:1], sasl: "+
					strings.ReplaceAll(c.sasl, "FILE", file)+" }\n", nil, nil)
			}

			mustWrite(t, file, "first\n")
			started := load()
			if got := c.read(started).Current(); got != "first" {
				t.Errorf("the secret at the start is %q", got)
			}
			mustWrite(t, file, "second\n")
			if got := c.read(started).Current(); got != "second" {
				t.Errorf("the rotated secret is %q", got)
			}

			// A reload has nothing to apply.
			if keys := DifferingKeys(started, load()); slices.Contains(keys, key) {
				t.Errorf("keys that need a restart: %v", keys)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if got := c.read(started).Current(); got != "first" {
				t.Errorf("without the file, the secret is %q, want that of the start", got)
			}
		})
	}
}

// The login to MongoDB applies at the next start, and a reload names its key.
func TestARotatedLoginToMongoDBNeedsARestart(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "uri")
	load := func() Config {
		return mustLoad(t, "mongodb: { uri: '${file:"+file+"}' }\nkafka: { brokers: [k:1] }\n", nil, nil)
	}
	mustWrite(t, file, "mongodb://relay:first@h/shop\n")
	started := load()
	mustWrite(t, file, "mongodb://relay:second@h/shop\n")
	if keys := DifferingKeys(started, load()); !slices.Contains(keys, "mongodb.uri") {
		t.Errorf("keys that need a restart: %v, want mongodb.uri", keys)
	}
}

func mustWrite(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
