package consumer

import "testing"

// When too many attempts are kept, the oldest are dropped, and only these.
func TestTheOldestKeptAttemptsAreDropped(t *testing.T) {
	t.Parallel()
	r := &run{}
	of := &track{p: &partition{tp: TopicPartition{Topic: "t"}}, reg: &registration{}}
	at := func(offset int64) task { return task{entry: &entry{offset: offset}, share: &share{}} }
	keep := func(offset int64) {
		x := at(offset)
		x.share.attempts.Total = 7
		r.keepAttempts(of, x)
	}
	isKept := func(offset int64) bool {
		x := at(offset)
		r.restoreAttempts(of, x)
		return x.share.attempts.Total == 7
	}

	for offset := range int64(maxKeptAttempts) {
		keep(offset)
	}
	keep(0) // now it is the newest one
	keep(maxKeptAttempts)
	keep(maxKeptAttempts + 1)
	for offset := range int64(maxKeptAttempts + 2) {
		if dropped := offset == 1 || offset == 2; isKept(offset) == dropped {
			t.Fatalf("message %d: kept %t, want %t", offset, dropped, !dropped)
		}
	}
	if isKept(0) {
		t.Error("attempts are restored twice")
	}
}
