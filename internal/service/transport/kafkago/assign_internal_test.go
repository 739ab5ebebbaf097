package kafkago

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go"
	"pgregory.net/rapid"
)

func TestExclusiveGivesAllToOne(t *testing.T) {
	t.Parallel()
	data := func(p int32) []byte {
		b, err := exclusive{p}.UserData()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}

	members := []kafka.GroupMember{
		{ID: "a", Topics: []string{"x"}, UserData: data(1)},
		{ID: "c", Topics: []string{"x", "y"}, UserData: data(5)},
		{ID: "b", Topics: []string{"x"}, UserData: data(5)},
		{ID: "d", Topics: []string{"z"}, UserData: data(-1)},
	}

	var parts []kafka.Partition
	for _, topic := range []string{"x", "y", "z"} {
		for i := range 2 {
			parts = append(parts, kafka.Partition{Topic: topic, ID: i})
		}
	}

	want := kafka.GroupMemberAssignments{
		"a": {}, "b": {"x": {0, 1}}, "c": {"y": {0, 1}}, "d": {"z": {0, 1}},
	}
	if d := cmp.Diff(want, exclusive{}.AssignGroups(members, parts)); d != "" {
		t.Error(d)
	}
}

func TestPartitionsOfAllTopicsAreSpreadEvenly(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		names := []string{"a", "b", "c", "d"}
		var members []kafka.GroupMember
		for i := range rapid.IntRange(1, 5).Draw(t, "members") {
			members = append(members, kafka.GroupMember{ID: fmt.Sprint("m", i), Topics: names})
		}
		var parts []kafka.Partition
		for _, topic := range names {
			for i := range rapid.IntRange(0, 6).Draw(t, topic) {
				parts = append(parts, kafka.Partition{Topic: topic, ID: i})
			}
		}
		got := spread{}.AssignGroups(members, parts)
		if d := cmp.Diff(got, spread{}.AssignGroups(members, rapid.Permutation(parts).Draw(t, "order"))); d != "" {
			t.Fatal("it depends on the order: ", d)
		}
		seen := map[string]bool{}
		least, most := len(parts), 0
		for _, m := range members {
			n := 0
			for topic, ids := range got[m.ID] {
				for _, id := range ids {
					seen[fmt.Sprint(topic, id)] = true
					n++
				}
			}
			least, most = min(least, n), max(most, n)
		}
		if len(seen) != len(parts) || most-least > 1 {
			t.Fatalf("%d of %d partitions, from %d to %d for a member", len(seen), len(parts), least, most)
		}
	})

	got := spread{}.AssignGroups([]kafka.GroupMember{{ID: "a", Topics: []string{"x"}}, {ID: "b", Topics: []string{"y"}}},
		[]kafka.Partition{{Topic: "x"}, {Topic: "x", ID: 1}, {Topic: "z"}})
	if d := cmp.Diff(kafka.GroupMemberAssignments{"a": {"x": {0, 1}}, "b": {}}, got); d != "" {
		t.Error(d)
	}
}
