package record

import "time"

// AckedBatch is a batch that Kafka has acked, in numbers.
type AckedBatch struct {
	TP       TopicPartition
	Base     int64 // offset of the first record
	Records  int
	Bytes    int       // that the records had reserved
	At       time.Time // of the ack, by the clock of the commit times
	CommitMS []int64   // commit times of the stream's events, in Unix milliseconds; valid during the call
}

// EachLatency calls observe for the times from commit to ack. n is the number of consecutive records with the same time. Clocks
// differ, so a negative time counts as 0.
func (b *AckedBatch) EachLatency(observe func(took time.Duration, n int)) {
	for from := 0; from < len(b.CommitMS); {
		to := from + 1
		for to < len(b.CommitMS) && b.CommitMS[to] == b.CommitMS[from] {
			to++
		}
		observe(max(b.At.Sub(time.UnixMilli(b.CommitMS[from])), 0), to-from)
		from = to
	}
}
