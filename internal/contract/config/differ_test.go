package config

import (
	"slices"
	"strings"
	"testing"
)

func TestDifferingNamesKeysAndShowsNothing(t *testing.T) {
	t.Parallel()
	env := []string{"OUTRELAY_MONGODB_URI=mongodb://u:hunter2@m1/shop", "OUTRELAY_KAFKA_BROKERS=k1:9092", "OUTRELAY_NODE=n"}
	load := func(env []string, set ...string) Config {
		t.Helper()
		c, _, err := Load("", env, set)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}

	base := load(env)
	if keys := DifferingKeys(base, load(env)); len(keys) != 0 {
		t.Errorf("the same configuration differs in %v", keys)
	}

	other := slices.Clone(env)
	other[0] = strings.Replace(other[0], "hunter2", "hunter3", 1)
	changed := load(other, "log.level=debug", "kafka.brokers=k1:9092,k2:9092", "limits.memory=64MiB", "http.admin.listen=127.0.0.1:0", "http.admin.token=0123456789abcdef0123456789abcdef")
	want := []string{"http.admin", "kafka.brokers", "limits.memory", "log.level", "mongodb.uri"}
	if keys := DifferingKeys(base, changed); !slices.Equal(keys, want) {
		t.Errorf("%v, want %v", keys, want)
	}

	again := load(other, "log.level=debug", "kafka.brokers=k1:9092,k2:9092", "limits.memory=64MiB", "http.admin.listen=127.0.0.1:1", "http.admin.token=another9abcdef0123456789abcdef12")
	if keys := DifferingKeys(changed, again); !slices.Equal(keys, []string{"http.admin.listen", "http.admin.token"}) {
		t.Errorf("%v", keys)
	}
}
