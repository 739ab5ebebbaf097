package process_test

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestN09_ATopicMayGrowUnderLoad: a topic gets partitions while events are appended. The relay takes over once more and uses them.
// Each event arrives once, and no event of a key is in the new partition of the key before an earlier one.
func TestN09_ATopicMayGrowUnderLoad(t *testing.T) {
	t.Parallel()
	b := setup(t)
	quiet := sync.OnceValue(b.startLoad())
	t.Cleanup(func() { quiet() })
	b.start()
	b.consume(200)

	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...), kgo.ConsumeTopics(b.topic),
		kgo.MetadataMinAge(time.Second/4), kgo.MetadataMaxAge(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	const before, after = 3, 7
	if res, err := kadm.NewClient(cl).UpdatePartitions(t.Context(), after, b.topic); err != nil || res.Error() != nil {
		t.Fatal(err, res.Error())
	}
	b.log.wait(t, fmt.Sprintf("has grown from %d to %d partitions", before, after))
	stacktest.Eventually(t, "a record is in a new partition", func() bool {
		return slices.ContainsFunc(b.poll(cl), func(r *kgo.Record) bool { return r.Partition >= before })
	})

	// A key may have records in its old and in its new partition.
	type home struct {
		key       string
		partition int32
	}
	numbers, ids := map[home][]int{}, map[string]int{}
	for _, r := range b.consume(quiet()) {
		at := 0
		if _, err := fmt.Sscan(string(r.Value), &at); err != nil {
			t.Fatal(err)
		}
		h := home{string(r.Key), r.Partition}
		numbers[h] = append(numbers[h], at)
		ids[findID(r)]++
	}
	for x, k := range ids {
		if k != 1 {
			t.Errorf("%s came %d times", x, k)
		}
	}

	byKey := map[string][][]int{}
	for h, list := range numbers {
		byKey[h.key] = append(byKey[h.key], list)
	}
	for key, lists := range byKey {
		slices.SortFunc(lists, func(a, b []int) int { return cmp.Compare(a[0], b[0]) })
		if all := slices.Concat(lists...); !slices.IsSorted(all) {
			t.Errorf("key %s: the numbers in its partitions are %v", key, lists)
		}
	}
}
