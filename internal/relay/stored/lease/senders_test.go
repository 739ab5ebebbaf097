package lease

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// largeDocument returns the senders of owners that ended one after the other before any of their 60,000 partitions was closed, and
// the offsets of all partitions. The topics have names of 60 bytes.
func largeDocument(owners int) ([]record.Sender, map[string][]int64) {
	offsets := map[string][]int64{}
	var open []record.TopicPartition
	for i := range 10_000 {
		topic := fmt.Sprintf("%-55s%05d", "outbox.event.", i)
		for p := range 6 {
			open = append(open, record.TopicPartition{Topic: topic, Partition: int32(p)})
			offsets[topic] = append(offsets[topic], 1_000_000_000_000+int64(6*i+p))
		}
	}

	list := make([]record.Sender, owners)
	for i := range list {
		list[i] = record.Sender{ID: 1_000_000 + int64(i), Epoch: int16(i), Generation: i, Cluster: "MkU3OEVBNTcwNTJENDM2Qk", Open: slices.Clone(open)}
	}
	return list, offsets
}

// A document above 16 MB could not be saved, so no takeover would ever end.
func TestN04_SixtyThousandOpenPartitionsFitIntoTheDocument(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := longConfig(coll, "a")
	cfg.CallTimeout = 0
	l := newLease(t, cfg)
	h := mustAcquire(t, l)
	senders, offsets := largeDocument(8)

	// Each attempt of Save has the default CallTimeout.
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	began := time.Now()
	if err := h.Save(ctx, Update{Senders: &senders, Offsets: offsets}); err != nil {
		t.Fatalf("saving with a timeout of %v: %v", l.cfg.CallTimeout, err)
	}
	took := time.Since(began)

	raw, err := coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: slotID}}).Raw()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("saved %d bytes in %v", len(raw), took)
	if len(raw) > 8<<20 {
		t.Errorf("the document has %d bytes, want at most 8 MiB", len(raw))
	}

	stored := readStored(t, coll)
	if got := stored.Senders(); !reflect.DeepEqual(got, senders) {
		t.Errorf("%d senders were read back, and they differ from the %d that were saved", len(got), len(senders))
	}
	if !maps.EqualFunc(stored.OffsetMap(), offsets, slices.Equal) {
		t.Error("the offsets that were read back differ from those that were saved")
	}
}

func marshalSenders(t *testing.T, list []record.Sender) []byte {
	t.Helper()
	raw, err := bson.Marshal(newSenderTable(list))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// Kafka may give each of many owners another producer id, which no later marker of the id fences.
func TestN04_AFurtherOwnerCostsFewBytes(t *testing.T) {
	t.Parallel()
	senders, _ := largeDocument(200)
	eight, all := len(marshalSenders(t, senders[:8])), len(marshalSenders(t, senders))
	t.Logf("%d bytes for 8 senders, %d for %d", eight, all, len(senders))
	if each := (all - eight) / (len(senders) - 8); each > 150 {
		t.Errorf("each further sender costs %d bytes, want at most 150", each)
	}
}

func TestN04_SendersAreReadAsTheyWereStored(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(4, 0))
	for range 300 {
		list := make([]record.Sender, random.IntN(6))
		for i := range list {
			list[i] = record.Sender{ID: random.Int64(), Epoch: int16(random.IntN(30_000)), Generation: random.IntN(9), Cluster: "c"}
			for _, topic := range []string{"a.b", "c"} {
				// Few values, so that places are often equal to those of the sender before.
				for p := range int32(random.IntN(3) * 3) {
					if random.IntN(4) > 0 {
						list[i].Open = append(list[i].Open, record.TopicPartition{Topic: topic, Partition: p})
					}
				}
				if random.IntN(2) == 0 {
					if list[i].EndOffsets == nil {
						list[i].EndOffsets = map[string][]int64{}
					}
					list[i].EndOffsets[topic] = [][]int64{{-1, 9}, {0, 0, 1 << 40}}[random.IntN(2)]
				}
			}
		}

		var stored SenderTable
		if err := bson.Unmarshal(marshalSenders(t, list), &stored); err != nil {
			t.Fatal(err)
		}
		if got := stored.listSenders(); len(got) != len(list) || len(list) > 0 && !reflect.DeepEqual(got, list) {
			t.Fatalf("read %+v, want %+v", got, list)
		}

		// An operator may remove senders.
		stored.List = stored.List[:len(list)/2]
		if got := stored.listSenders(); len(got) != len(list)/2 || len(got) > 0 && !reflect.DeepEqual(got, list[:len(list)/2]) {
			t.Fatalf("read %+v of a shorter list, want %+v", got, list[:len(list)/2])
		}
	}
}
