package transporttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
)

func testBytesArrive(t *testing.T, fixture Fixture) {
	tr, topic := fixture.Transport(t), fixture.Topic(t, 1)
	sent := []transport.Record{
		{Key: []byte("k"), Value: []byte{0, 255, 10}, Headers: []event.Header{
			{Key: "id", Value: []byte("7")},
			{Key: "dup", Value: []byte{0}},
			{Key: "dup", Value: []byte("b")},
			{Key: "empty", Value: []byte{}},
		}},
		{Key: []byte("k"), Value: nil},
		{Key: []byte("k"), Value: []byte{}},
		{Key: nil, Value: []byte("no key")},
	}
	publishAll(t, tr, topic, sent)

	member := joinGroup(t, tr, groupName(), topic)
	generation := member.nextGeneration()
	records, _ := generation.readRecords(t, len(sent))
	member.leaveGroup(generation)

	got := records[transport.TopicPartition{Topic: topic}]
	if len(got) != len(sent) {
		t.Fatalf("got %d records, want %d", len(got), len(sent))
	}
	for i, r := range got {
		if r.Topic != topic || r.Partition != 0 || r.Offset != int64(i) {
			t.Errorf("record %d is at %s/%d, offset %d, want %s/0, offset %d", i, r.Topic, r.Partition, r.Offset, topic, i)
		}
		if !bytes.Equal(r.Key, sent[i].Key) || (r.Key == nil) != (sent[i].Key == nil) {
			t.Errorf("key of record %d: got %q, want %q", i, r.Key, sent[i].Key)
		}
		if !bytes.Equal(r.Value, sent[i].Value) || (r.Value == nil) != (sent[i].Value == nil) {
			t.Errorf("value of record %d: got %q (nil: %t), want %q", i, r.Value, r.Value == nil, sent[i].Value)
		}
		if r.Time.IsZero() {
			t.Errorf("record %d has no time", i)
		}
	}

	var headers []string
	for _, h := range got[0].Headers {
		headers = append(headers, fmt.Sprintf("%s=%q", h.Key, h.Value))
	}
	assertEqual(t, "headers", headers, []string{`id="7"`, `dup="\x00"`, `dup="b"`, `empty=""`})
}

func testKeyOrder(t *testing.T, fixture Fixture) {
	const partitions, keys, each = 3, 7, 20

	tr, topic := fixture.Transport(t), fixture.Topic(t, partitions)
	for i := range each {
		for k := range keys {
			publishValues(t, tr, topic, fmt.Sprint("key-", k), fmt.Sprint(i))
		}
	}

	member := joinGroup(t, tr, groupName(), topic)
	generation := member.nextGeneration()
	records, _ := generation.readRecords(t, keys*each)
	member.leaveGroup(generation)

	count := map[string]int{}
	for tp, list := range records {
		for i, r := range list {
			key := string(r.Key)
			if want := int32(keyhash.Murmur2(r.Key)&0x7fffffff) % partitions; tp.Partition != want || r.Partition != want {
				t.Fatalf("%s is in partition %d, want %d", key, tp.Partition, want)
			}

			if string(r.Value) != fmt.Sprint(count[key]) {
				t.Fatalf("value %s of %s was read as number %d", r.Value, key, count[key])
			}

			if i > 0 && list[i-1].Offset >= r.Offset {
				t.Fatalf("offset %d follows %d", r.Offset, list[i-1].Offset)
			}
			count[key]++
		}
	}
	if len(count) != keys {
		t.Errorf("got %d keys, want %d", len(count), keys)
	}
}

func testResumesAtCommit(t *testing.T, fixture Fixture) {
	tr, topic, group := fixture.Transport(t), fixture.Topic(t, 1), groupName()
	tp := transport.TopicPartition{Topic: topic}
	publishValues(t, tr, topic, "k", "a", "b", "c")

	member := joinGroup(t, tr, group, topic)
	generation := member.nextGeneration()
	assertEqual(t, "the start of a new group", generation.resume(t, tp), transport.Start{})
	generation.readRecords(t, 3)
	generation.commitOffsets(t, map[transport.TopicPartition]int64{tp: 2})
	member.leaveGroup(generation)

	member = joinGroup(t, fixture.Transport(t), group, topic)
	generation = member.nextGeneration()
	want := transport.Start{GroupOffset: transport.GroupOffset{Offset: 2, TopicID: topicID(topic)}}
	assertEqual(t, "the start after a commit of 2", generation.resume(t, tp), want)
	records, _ := generation.readRecords(t, 1)
	member.leaveGroup(generation)
	assertEqual(t, "values", countValues(records), eachOnce("c"))
}

func testRedelivery(t *testing.T, fixture Fixture) {
	tr, topic, group := fixture.Transport(t), fixture.Topic(t, 2), groupName()
	publishValues(t, tr, topic, "k1", "a", "b")
	publishValues(t, tr, topic, "k2", "c")
	for range 2 {
		member := joinGroup(t, tr, group, topic)
		generation := member.nextGeneration()
		records, _ := generation.readRecords(t, 3)
		member.leaveGroup(generation)
		assertEqual(t, "values", countValues(records), eachOnce("a", "b", "c"))
	}
}

func testIndependentGroups(t *testing.T, fixture Fixture) {
	tr, topic := fixture.Transport(t), fixture.Topic(t, 1)
	publishValues(t, tr, topic, "k", "a", "b")
	for range 2 {
		member := joinGroup(t, tr, groupName(), topic)
		generation := member.nextGeneration()
		records, next := generation.readRecords(t, 2)
		generation.commitOffsets(t, next)
		member.leaveGroup(generation)
		assertEqual(t, "values", countValues(records), eachOnce("a", "b"))
	}
}

// testMembersShare checks that two members share all partitions without overlap. When one leaves,
// the other has all of them.
func testMembersShare(t *testing.T, fixture Fixture) {
	const partitions = 4
	topic, group := fixture.Topic(t, partitions), groupName()
	one := joinGroup(t, fixture.Transport(t), group, topic)
	first := one.nextWithPartitions(partitions)

	two := joinGroup(t, fixture.Transport(t), group, topic)
	first.waitForEnd(t)
	close(first.finish)

	generation, servedGeneration := one.nextWithPartitions(partitions/2), two.nextWithPartitions(partitions/2)
	if generation.Changes() == nil && (generation.ID() <= first.ID() || generation.ID() != servedGeneration.ID()) {
		t.Errorf("generations of two members: got %d and %d, want equal ids above %d", generation.ID(), servedGeneration.ID(), first.ID())
	}

	have := map[transport.TopicPartition]int{}
	for _, x := range slices.Concat(generation.Partitions(), servedGeneration.Partitions()) {
		have[x]++
	}
	want := map[transport.TopicPartition]int{}
	for i := range int32(partitions) {
		want[transport.TopicPartition{Topic: topic, Partition: i}] = 1
	}
	assertEqual(t, "partitions of both", have, want)
	state := describeGroup(t, fixture.Transport(t), group)
	assertEqual(t, "members", state.Members, 2)
	for tp := range want {
		assertEqual(t, "a member with "+tp.String(), state.Assigned[tp], true)
	}

	two.leaveGroup(servedGeneration)
	generation.waitForEnd(t)
	close(generation.finish)
	all := one.nextWithPartitions(partitions)
	one.leaveGroup(all)
	assertEqual(t, "members after all have left", describeGroup(t, fixture.Transport(t), group).Members, 0)
}

// describeGroup returns the state of a group that has no rebalance.
func describeGroup(t *testing.T, tr transport.Transport, group string) transport.GroupState {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		state, err := tr.DescribeGroup(t.Context(), group)
		switch {
		case err == nil && (state.Stable || state.Members == 0):
			return state
		case time.Now().After(deadline):
			t.Fatalf("group %s is not stable: %+v (%v)", group, state, err)
		}
	}
}

// testCommitAtEnd checks that a member can commit when it has to give a partition away, and that the next owner starts there.
func testCommitAtEnd(t *testing.T, fixture Fixture) {
	tr, topic, group := fixture.Transport(t), fixture.Topic(t, 2), groupName()
	for i := range 20 {
		publishValues(t, tr, topic, fmt.Sprint("key-", i), "old")
	}
	one := joinGroup(t, tr, group, topic)
	generation := one.nextWithPartitions(2)
	_, next := generation.readRecords(t, 20)

	two := joinGroup(t, fixture.Transport(t), group, topic)
	generation.waitForEnd(t)
	generation.commitOffsets(t, next)
	close(generation.finish)

	first, second := one.nextWithPartitions(1), two.nextWithPartitions(1)
	moved := second.Partitions()[0]
	assertEqual(t, "the offset after a commit", second.resume(t, moved).Offset, next[moved])
	for i := range 20 {
		publishValues(t, tr, topic, fmt.Sprint("key-", i), "new")
	}
	records, _ := second.readRecords(t, 1)
	if n := countValues(records)["old"]; n > 0 {
		t.Errorf("%d records were read again", n)
	}
	two.leaveGroup(second)
	one.leaveGroup(first)
}

func testPastGeneration(t *testing.T, fixture Fixture) {
	topic, group := fixture.Topic(t, 1), groupName()
	one := joinGroup(t, fixture.Transport(t), group, topic)
	past := one.nextWithPartitions(1)
	one.leaveGroup(past)

	two := joinGroup(t, fixture.Transport(t), group, topic)
	now := two.nextWithPartitions(1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := past.Commit(ctx, map[transport.TopicPartition]transport.GroupOffset{{Topic: topic}: {Offset: 7}})
	if !errors.Is(err, transport.ErrGenerationOver) {
		t.Errorf("commit of a past generation: got %v, want ErrGenerationOver", err)
	}
	two.leaveGroup(now)

	three := joinGroup(t, fixture.Transport(t), group, topic)
	generation := three.nextWithPartitions(1)
	assertEqual(t, "the start after the rejected commit", generation.resume(t, transport.TopicPartition{Topic: topic}), transport.Start{})
	three.leaveGroup(generation)
}

func testFetchBounds(t *testing.T, fixture Fixture) {
	tr, topic := fixture.Transport(t), fixture.Topic(t, 1)
	tp := transport.TopicPartition{Topic: topic}
	member := joinGroup(t, tr, groupName(), topic)
	generation := member.nextGeneration()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	// A fetch at the end of the partition waits for the next record.
	got := make(chan string, 1)
	go func() {
		for offset := int64(0); ; {
			fetched, err := generation.Fetch(ctx, tp, transport.FetchFrom{Offset: offset}, 1<<20)
			if err != nil || len(fetched.Records) > 0 {
				got <- fmt.Sprint(len(fetched.Records), " ", err)
				return
			}
			offset = fetched.Next
		}
	}()
	publishValues(t, tr, topic, "k", "a")
	if text := <-got; text != "1 <nil>" {
		t.Errorf("records and error of a fetch that waited: got %s, want 1 <nil>", text)
	}

	// Four large records need several bounded fetches.
	big := strings.Repeat("x", 100_000)
	publishValues(t, tr, topic, "k", big, big, big, big)
	seen := 0
	for offset := int64(1); seen < 4; {
		fetched, err := generation.Fetch(ctx, tp, transport.FetchFrom{Offset: offset}, 150_000)
		if err != nil {
			t.Fatal(err)
		}

		for _, r := range fetched.Records {
			if seen++; string(r.Value) != big || r.Offset < offset {
				t.Fatalf("record %d at offset %d differs from the published one", seen, r.Offset)
			}
		}

		inRecords := len(fetched.Records) > 0 && fetched.Next <= fetched.Records[len(fetched.Records)-1].Offset
		if fetched.Next < offset || inRecords || fetched.End < fetched.Next {
			t.Fatalf("inconsistent fetch: next %d, end %d after %d records from %d", fetched.Next, fetched.End, len(fetched.Records), offset)
		}
		offset = fetched.Next
	}

	log, err := generation.Log(ctx, tp)
	if err != nil || log.End != 5 {
		t.Errorf("end of the log: got %d, %v, want 5", log.End, err)
	}
	if got, err := generation.Fetch(ctx, tp, transport.FetchFrom{Offset: 3, TopicID: log.ID}, 1<<20); err != nil || len(got.Records) == 0 {
		t.Errorf("fetch by the id of the topic: got %d records, %v, want some", len(got.Records), err)
	}
	other := log.ID[:len(log.ID)-1] + string(log.ID[len(log.ID)-1]^1)
	if got, err := generation.Fetch(ctx, tp, transport.FetchFrom{Offset: 3, TopicID: other}, 1<<20); err == nil {
		t.Errorf("fetch by the id of another topic: got %d records, want an error", len(got.Records))
	}

	over, stop := context.WithCancel(ctx)
	stop()
	if _, err := generation.Fetch(over, tp, transport.FetchFrom{Offset: 5}, 1<<20); !errors.Is(err, context.Canceled) {
		t.Errorf("fetch with a canceled context: got %v, want context.Canceled", err)
	}
	member.leaveGroup(generation)
}

func testMissingOffsets(t *testing.T, fixture Fixture) {
	tr, topic := fixture.Transport(t), fixture.Topic(t, 1)
	tp := transport.TopicPartition{Topic: topic}
	publishValues(t, tr, topic, "k", "a", "b")
	member := joinGroup(t, tr, groupName(), topic)
	generation := member.nextGeneration()
	generation.readRecords(t, 2)

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := generation.Fetch(ctx, tp, transport.FetchFrom{Offset: 100}, 1<<20)
	var bad *transport.RangeError
	if !errors.As(err, &bad) || bad.TopicPartition != tp || bad.Offset != 100 || bad.Start != 0 || bad.End != 2 {
		t.Errorf("fetch above the end: got %v, want a RangeError of 0 to 2", err)
	}
	member.leaveGroup(generation)
}

func testSeveralTopics(t *testing.T, fixture Fixture) {
	tr, group := fixture.Transport(t), groupName()
	topics := []string{fixture.Topic(t, 2), fixture.Topic(t, 1)}
	for _, topic := range topics {
		publishValues(t, tr, topic, "k", topic)
	}
	member := joinGroup(t, tr, group, topics...)
	generation := member.nextWithPartitions(3)
	records, _ := generation.readRecords(t, 2)
	member.leaveGroup(generation)
	assertEqual(t, "values", countValues(records), eachOnce(topics...))
}

// testLateTopic checks that a missing topic does not block the others, and that it is read after it
// was created.
func testLateTopic(t *testing.T, fixture Fixture) {
	tr, group, there := fixture.Transport(t), groupName(), fixture.Topic(t, 1)
	later, create := fixture.Later(t)
	publishValues(t, tr, there, "k", "a")

	member := joinGroup(t, tr, group, there, later)
	generation := member.readUntil("a")

	create()
	publishValues(t, tr, later, "k", "b")
	publishValues(t, tr, there, "k", "c")
	generation.waitForEnd(t)
	close(generation.finish)
	member.leaveGroup(member.readUntil("b"))
}

func testJoinEnds(t *testing.T, fixture Fixture) {
	tr, topic, group := fixture.Transport(t), fixture.Topic(t, 1), groupName()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	fail := funcSession{t, func(context.Context, transport.Generation) error { return errStop }}
	err := tr.Join(ctx, group, []string{topic}, fail)
	if !errors.Is(err, errStop) {
		t.Errorf("Join: got %v, want the error of Serve", err)
	}

	// The same transport may join again.
	member := joinGroup(t, tr, group, topic)
	generation := member.nextWithPartitions(1)
	member.leaveGroup(generation)

	gone, leave := context.WithCancel(ctx)
	leave()
	succeed := funcSession{t, func(context.Context, transport.Generation) error { return nil }}
	if err := tr.Join(gone, group, []string{topic}, succeed); err != nil {
		t.Errorf("Join with a canceled context: got %v, want nil", err)
	}
}
