package config

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPurgeAndRecording(t *testing.T) {
	t.Parallel()
	c := mustLoad(t, "", base, nil)
	if diff := cmp.Diff(Purge{Rate: 5000, Batch: 500, Interval: 10 * time.Second}, c.Purge); diff != "" || c.DeadLetters.Expire != 0 || c.Recording != "position" {
		t.Errorf("defaults: %+v %+v %s", c.Purge, c.DeadLetters, c.Recording)
	}

	c = mustLoad(t, "recording: mark\nretention: 0s\npurge: {rate: 0, batch: 50, interval: 1s, ttl: 7d}\ndead_letters: {expire: 90d}\n", append(slices.Clone(base), "OUTRELAY_PURGE_BATCH=60"), nil)
	if diff := cmp.Diff(Purge{Batch: 60, Interval: time.Second, TTL: 7 * 24 * time.Hour}, c.Purge); diff != "" || c.DeadLetters.Expire != 90*24*time.Hour || c.Retention != 0 {
		t.Errorf("%+v %+v", c.Purge, c.DeadLetters)
	}

	for _, mode := range []string{"position", "delete", "mark"} {
		if c := mustLoad(t, "recording: "+mode+"\n", base, nil); c.Recording != mode {
			t.Errorf("%s is %s", mode, c.Recording)
		}
	}

	got := loadProblems(t, "retention: 59s\nrecording: delete\npurge: {rate: -1, batch: 9, interval: 1ms, ttl: 1h}\ndead_letters: {expire: 1s}\n", base, nil)
	want := []string{
		`dead_letters.expire: found 1s; expected at least 1m0s, or 0 to keep dead letters forever`,
		`purge.batch: found 9; expected between 10 and 5000`,
		`purge.interval: found 1ms; expected between 100ms and 24h0m0s`,
		`purge.rate: found -1; expected between 0 and 10000000`,
		`purge.ttl: found 1h0m0s; only recording: mark stores the delivery time; set recording: mark, or purge.ttl: 0 and use retention`,
		`retention: found 59s; expected at least 1m0s, or 0 to keep envelopes forever`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Documents of another program are purged only if the configuration orders it: most of them may be older than the switch to outrelay.
func TestForeignDocumentsStay(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]time.Duration{
		"":                                    24 * time.Hour,
		"record: {preset: debezium}\n":        24 * time.Hour,
		"record: {preset: kafka-connector}\n": 0,
		"mapping: {type: name}\n":             0,
		"mapping: {type: name}\nretention:\n": 0,
		"record: {preset: kafka-connector}\nretention: 36h\n": 36 * time.Hour,
		"mapping: {type: name}\nretention: 24h\n":             24 * time.Hour,
	} {
		if got := mustLoad(t, file, base, nil).Retention; got != want {
			t.Errorf("%q: retention %v instead of %v", file, got, want)
		}
	}

	if got := mustLoad(t, "mapping: {type: name}\n", append(slices.Clone(base), "OUTRELAY_RETENTION=2h"), nil).Retention; got != 2*time.Hour {
		t.Errorf("the retention of the environment is %v", got)
	}
}

func TestDatabasesOfConsumersHaveNoPattern(t *testing.T) {
	t.Parallel()
	c := mustLoad(t, "consumers: {databases: [shipping, billing]}\n", base, nil)
	if want := []string{"shipping", "billing"}; !slices.Equal(c.Consumers.Databases, want) {
		t.Errorf("got %q, want %q", c.Consumers.Databases, want)
	}
	got := loadProblems(t, "consumers: {databases: [shipping, 'tenant_*']}\n", base, nil)
	want := []string{`consumers.databases[1]: found "tenant_*"; expected the name of a database, without a pattern`}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
