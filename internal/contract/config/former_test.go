package config

import (
	"strings"
	"testing"
)

// A key or value that has moved or was removed is rejected with what takes its place, in each source.
func TestAFormerKeyNamesItsSuccessor(t *testing.T) {
	t.Parallel()
	base := []string{"mongodb.uri=mongodb://h/a", "kafka.brokers=h:1", "watch=a.outbox"}
	for _, c := range []struct {
		env, set []string
		want     string
	}{
		{nil, []string{"mongodb.state=x"}, "mongodb.state: unknown key; state.database replaces it"},
		{[]string{"OUTRELAY_MONGODB_STATE=x"}, nil, "OUTRELAY_MONGODB_STATE: unknown environment variable; OUTRELAY_STATE_DATABASE replaces it"},
		{nil, []string{"kafka.delivery=idempotent"}, "kafka.delivery: unknown key; delete it: every record"},
		{nil, []string{"kafka.lanes=2"}, "kafka.lanes: unknown key; kafka.requests_per_broker replaces it"},
		{nil, []string{"recording=watermark"}, `recording: found "watermark"; position replaces it`},
		{[]string{"OUTRELAY_KAFKA_DELIVERY=idempotent"}, nil, "OUTRELAY_KAFKA_DELIVERY: unknown environment variable; delete it: every record"},
	} {
		if _, _, err := Load("", c.env, append(c.set, base...)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}

	keys := map[string]any{"mongodb": map[string]any{"uri": "mongodb://h/a", "state": "x"}, "kafka": map[string]any{"brokers": "h:1"}}
	want := "mongodb.state: unknown key; state.database replaces it"
	if _, _, _, err := decodeKeys(Default(), keys, nil, &Problems{}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// A watched name in the state database is accepted unless it begins with the prefix.
func TestTheStateDatabaseMayBeWatched(t *testing.T) {
	t.Parallel()
	set := []string{"mongodb.uri=mongodb://h/a", "kafka.brokers=h:1", "state.database=shop", "watch=shop.outbox"}
	if _, _, err := Load("", nil, set); err != nil {
		t.Error(err)
	}

	for _, set := range [][]string{
		append(set, "watch=shop.outrelay_audit"), append(set, "state.prefix=out"), append(set, "state.prefix="), append(set, "state.prefix=a*"),
	} {
		if _, _, err := Load("", nil, set); err == nil {
			t.Errorf("%q is accepted", set)
		}
	}
}
