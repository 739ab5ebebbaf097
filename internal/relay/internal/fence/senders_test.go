package fence

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// A takeover that scans the open partitions for each partition needs minutes, during which nothing is sent.
func TestN04_ClosingSixtyThousandPartitionsIsNotQuadratic(t *testing.T) {
	t.Parallel()
	var targets []record.TopicPartition
	for i := range 10_000 {
		topic := fmt.Sprintf("%-55s%05d", "outbox.event.", i)
		for p := range 6 {
			targets = append(targets, record.TopicPartition{Topic: topic, Partition: int32(p)})
		}
	}
	saved := make([]record.Sender, 8)
	for i := range saved {
		saved[i] = record.Sender{ID: int64(i), Epoch: 1, Open: targets}
	}

	began := time.Now()
	session := newSession(nil, In{})
	session.retired = earlierSenders(saved, targets, nil)
	for i, tp := range targets {
		if open := session.openSenders(tp); len(open) != len(saved) {
			t.Fatalf("%d senders are open in %v, want %d", len(open), tp, len(saved))
		}
		session.retired.closePartition(tp, int64(i))
		if open := session.openSenders(tp); len(open) != 0 {
			t.Fatalf("%d senders are open in %v after it was closed", len(open), tp)
		}
	}

	took := time.Since(began)
	t.Logf("closed %d partitions of %d senders in %v", len(targets), len(saved), took)
	// It takes 0.3 s, and with the race detector 2 s. A search in lists takes more than 20 s.
	if limit := 15 * time.Second; took > limit {
		t.Errorf("closing %d partitions of %d senders took %v, want at most %v", len(targets), len(saved), took, limit)
	}
	for _, sender := range session.Senders()[:len(saved)] {
		if len(sender.Open) != 0 || len(sender.EndOffsets) != 10_000 {
			t.Errorf("sender %d is open in %d partitions and has ends in %d topics, want 0 and 10,000", sender.ID, len(sender.Open), len(sender.EndOffsets))
		}
	}
}

// Owners that end one after the other, each with another producer id, while one partition cannot be fenced.
func TestN04_SendersThatAreListedForOnePartitionDoNotGrow(t *testing.T) {
	t.Parallel()
	sick := at("sick", 0)
	targets := append(allOf("a", 3), append(allOf("b", 2), sick)...)
	takeOver := func(saved []record.Sender, offsets map[string][]int64, end int64) []record.Sender {
		session := newSession(nil, In{})
		session.retired = earlierSenders(saved, targets, offsets)
		for _, tp := range targets {
			if tp != sick {
				session.retired.closePartition(tp, end)
			}
		}
		session.current = Producer{ID: end, Epoch: 1}
		return session.Senders()
	}

	// No owner stores an offset: the senders have the same ends, so the document states them once.
	stored := map[string][]int64{"a": {1, 1, 1}, "b": {1, 1}, "sick": {1}}
	saved := []record.Sender{{ID: 1}}
	for end := int64(10); end < 20; end++ {
		saved = takeOver(saved, stored, end)
	}
	for _, sender := range saved[:10] {
		if !slices.Equal(sender.Open, []record.TopicPartition{sick}) ||
			!slices.Equal(sender.EndOffsets["a"], []int64{19, 19, 19}) || !slices.Equal(sender.EndOffsets["b"], []int64{19, 19}) {
			t.Errorf("sender %+v, want it open in %v, with the ends of the last takeover", sender, sick)
		}
	}

	// The stored offsets have passed the ends in topic a alone.
	stored["a"] = []int64{19, 30, 30}
	saved = takeOver(saved, stored, 40)
	for i, sender := range saved[:10] {
		if !slices.Equal(sender.Open, []record.TopicPartition{sick}) || sender.EndOffsets["a"] != nil ||
			!slices.Equal(sender.EndOffsets["b"], []int64{40, 40}) {
			t.Errorf("sender %d: %+v, want no ends in topic a", i, sender)
		}
	}
	if previous := saved[10]; !slices.Equal(previous.EndOffsets["a"], []int64{40, 40, 40}) {
		t.Errorf("the previous owner: %+v, want the ends of the last takeover", previous)
	}
}
