package consumer

import (
	"encoding/json"
	"testing"
	"time"
)

// The JSON of a status has durations in seconds, as all of outrelay has.
func TestTheStatusHasSecondsInJSON(t *testing.T) {
	t.Parallel()
	status := Status{
		Partitions: []PartitionStatus{{Topic: "orders", Oldest: 1500 * time.Millisecond}},
		Handlers:   []HandlerStatus{{Name: "pay", OldestWaiting: time.Minute}},
		Strays:     []StrayStatus{{Handler: "pay", Oldest: time.Second}},
	}
	text, err := json.Marshal(status)
	if err != nil {
		t.Fatal(err)
	}

	const want = `{"ready":false,"group":"","paused":false,` +
		`"partitions":[{"topic":"orders","partition":0,"lag":0,"stuck":false,"oldest_s":1.5}],` +
		`"handlers":[{"name":"pay","running":0,"waiting":0,"suspended":false,"rate_waiting":0,"oldest_waiting_s":60}],` +
		`"strays":[{"handler":"pay","topic":"","waiting":0,"reason":"","oldest_s":1}]}`
	if string(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
}
