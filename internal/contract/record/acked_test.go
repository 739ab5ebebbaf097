package record

import (
	"fmt"
	"testing"
	"time"
)

func TestEqualCommitTimesShareALatency(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1000)
	b := AckedBatch{At: at, CommitMS: []int64{990, 990, 995, 990, 1005}}
	var got []string
	b.EachLatency(func(took time.Duration, n int) { got = append(got, fmt.Sprint(took, "×", n)) })
	if want := "[10ms×2 5ms×1 10ms×1 0s×1]"; fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
}
