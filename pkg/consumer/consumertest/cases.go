package consumertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

func bytesArrive(t *testing.T, f Fixture) {
	tr, topic := f.Transport(t), f.Topic(t, 1)
	sent := []*consumer.Message{
		{Key: []byte("k"), Value: []byte{0, 255, 10}, Headers: []consumer.Header{{Key: "id", Value: []byte("7")}, {Key: "dup", Value: []byte{0}}, {Key: "dup", Value: []byte("b")}, {Key: "empty", Value: []byte{}}}},
		{Key: []byte("k"), Value: nil},
		{Key: []byte("k"), Value: []byte{}},
		{Key: nil, Value: []byte("no key")},
	}
	publishAll(t, tr, topic, sent)
	m := join(t, tr, groupName(), topic)
	g := m.next()
	records, _ := g.read(t, len(sent))
	m.leave(g)
	got := records[consumer.TopicPartition{Topic: topic}]
	if len(got) != len(sent) {
		t.Fatalf("%d records, want %d", len(got), len(sent))
	}
	for i, r := range got {
		if r.Topic != topic || r.Partition != 0 || r.Offset != int64(i) {
			t.Errorf("record %d is at %s/%d, offset %d", i, r.Topic, r.Partition, r.Offset)
		}
		if !bytes.Equal(r.Key, sent[i].Key) || (r.Key == nil) != (sent[i].Key == nil) {
			t.Errorf("record %d has the key %q", i, r.Key)
		}
		if !bytes.Equal(r.Value, sent[i].Value) || (r.Value == nil) != (sent[i].Value == nil) {
			t.Errorf("record %d has the value %q, nil %t", i, r.Value, r.Value == nil)
		}
		if r.Time.IsZero() {
			t.Errorf("record %d has no time", i)
		}
	}
	var headers []string
	for _, h := range got[0].Headers {
		headers = append(headers, fmt.Sprintf("%s=%q", h.Key, h.Value))
	}
	equal(t, "headers", headers, []string{`id="7"`, `dup="\x00"`, `dup="b"`, `empty=""`})
}

func orderOfKey(t *testing.T, f Fixture) {
	const partitions, keys, each = 3, 7, 20
	tr, topic := f.Transport(t), f.Topic(t, partitions)
	for i := range each {
		for k := range keys {
			publish(t, tr, topic, fmt.Sprint("key-", k), fmt.Sprint(i))
		}
	}
	m := join(t, tr, groupName(), topic)
	g := m.next()
	records, _ := g.read(t, keys*each)
	m.leave(g)
	count := map[string]int{}
	for tp, list := range records {
		for i, r := range list {
			key := string(r.Key)
			if want := int32(event.Murmur2(r.Key)&0x7fffffff) % partitions; tp.Partition != want || r.Partition != want {
				t.Fatalf("%s is in partition %d, want %d", key, tp.Partition, want)
			}
			if string(r.Value) != fmt.Sprint(count[key]) {
				t.Fatalf("%s of %s came as number %d", r.Value, key, count[key])
			}
			if i > 0 && list[i-1].Offset >= r.Offset {
				t.Fatalf("offset %d follows %d", r.Offset, list[i-1].Offset)
			}
			count[key]++
		}
	}
	if len(count) != keys {
		t.Errorf("%d keys came, want %d", len(count), keys)
	}
}

func goesOnWhereCommitted(t *testing.T, f Fixture) {
	tr, topic, group := f.Transport(t), f.Topic(t, 1), groupName()
	tp := consumer.TopicPartition{Topic: topic}
	publish(t, tr, topic, "k", "a", "b", "c")
	m := join(t, tr, group, topic)
	g := m.next()
	if off := g.Partitions()[0].Offset; off != 0 {
		t.Errorf("a new group begins at %d", off)
	}
	g.read(t, 3)
	g.commit(t, map[consumer.TopicPartition]int64{tp: 2})
	m.leave(g)
	m = join(t, f.Transport(t), group, topic)
	g = m.next()
	if off := g.Partitions()[0].Offset; off != 2 {
		t.Errorf("it goes on at %d, want 2", off)
	}
	records, _ := g.read(t, 1)
	m.leave(g)
	equal(t, "what came", values(records), once("c"))
}

func comesAgain(t *testing.T, f Fixture) {
	tr, topic, group := f.Transport(t), f.Topic(t, 2), groupName()
	publish(t, tr, topic, "k1", "a", "b")
	publish(t, tr, topic, "k2", "c")
	for range 2 {
		m := join(t, tr, group, topic)
		g := m.next()
		records, _ := g.read(t, 3)
		m.leave(g)
		equal(t, "what came", values(records), once("a", "b", "c"))
	}
}

func groupsAreIndependent(t *testing.T, f Fixture) {
	tr, topic := f.Transport(t), f.Topic(t, 1)
	publish(t, tr, topic, "k", "a", "b")
	for range 2 {
		m := join(t, tr, groupName(), topic)
		g := m.next()
		records, next := g.read(t, 2)
		g.commit(t, next)
		m.leave(g)
		equal(t, "what came", values(records), once("a", "b"))
	}
}

// Two members have all partitions between them and none in common; when one leaves, the other has all again.
func membersShare(t *testing.T, f Fixture) {
	const partitions = 4
	topic, group := f.Topic(t, partitions), groupName()
	one := join(t, f.Transport(t), group, topic)
	first := one.nextWith(partitions)
	two := join(t, f.Transport(t), group, topic)
	first.ended(t)
	close(first.over)
	a, b := one.nextWith(partitions/2), two.nextWith(partitions/2)
	if a.ID() <= first.ID() || a.ID() != b.ID() {
		t.Errorf("generations %d and %d follow %d", a.ID(), b.ID(), first.ID())
	}
	have := map[consumer.TopicPartition]int{}
	for _, x := range slices.Concat(a.Partitions(), b.Partitions()) {
		have[x.TopicPartition]++
	}
	want := map[consumer.TopicPartition]int{}
	for i := range int32(partitions) {
		want[consumer.TopicPartition{Topic: topic, Partition: i}] = 1
	}
	equal(t, "partitions of both", have, want)
	two.leave(b)
	a.ended(t)
	close(a.over)
	all := one.nextWith(partitions)
	one.leave(all)
}

// When a generation is to end, what was handled can still be committed, and the next one goes on from there.
func commitAtTheEnd(t *testing.T, f Fixture) {
	tr, topic, group := f.Transport(t), f.Topic(t, 1), groupName()
	publish(t, tr, topic, "k", "a", "b", "c")
	one := join(t, tr, group, topic)
	g := one.nextWith(1)
	g.read(t, 3)
	two := join(t, f.Transport(t), group, topic)
	g.ended(t)
	g.commit(t, map[consumer.TopicPartition]int64{{Topic: topic}: 3})
	close(g.over)
	// Whichever of the two has the partition now goes on behind.
	var who *member
	var s served
	for who == nil {
		select {
		case s = <-one.gens:
			who = one
		case s = <-two.gens:
			who = two
		case <-time.After(Patience):
			t.Fatal("nobody has the partition")
		}
		if len(s.Partitions()) == 0 {
			who = nil
			defer close(s.over)
		}
	}
	if off := s.Partitions()[0].Offset; off != 3 {
		t.Errorf("it goes on at %d, want 3", off)
	}
	publish(t, tr, topic, "k", "d")
	records, _ := s.read(t, 1)
	equal(t, "what came", values(records), once("d"))
	one.stop()
	two.stop()
	close(s.over)
}

func pastGeneration(t *testing.T, f Fixture) {
	topic, group := f.Topic(t, 1), groupName()
	one := join(t, f.Transport(t), group, topic)
	past := one.nextWith(1)
	one.leave(past)
	two := join(t, f.Transport(t), group, topic)
	now := two.nextWith(1)
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	if err := past.Commit(ctx, map[consumer.TopicPartition]int64{{Topic: topic}: 7}); !errors.Is(err, consumer.ErrGenerationOver) {
		t.Errorf("a past generation commits: %v", err)
	}
	two.leave(now)
	three := join(t, f.Transport(t), group, topic)
	g := three.nextWith(1)
	if off := g.Partitions()[0].Offset; off != 0 {
		t.Errorf("it goes on at %d: what the past generation wrote counts", off)
	}
	three.leave(g)
}

func fetchWaitsAndIsBounded(t *testing.T, f Fixture) {
	tr, topic := f.Transport(t), f.Topic(t, 1)
	tp := consumer.TopicPartition{Topic: topic}
	m := join(t, tr, groupName(), topic)
	g := m.next()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	got := make(chan string, 1)
	go func() {
		for offset := int64(0); ; {
			x, err := g.Fetch(ctx, tp, offset, 1<<20)
			if err != nil || len(x.Records) > 0 {
				got <- fmt.Sprint(len(x.Records), " ", err)
				return
			}
			offset = x.Next
		}
	}()
	publish(t, tr, topic, "k", "a")
	if text := <-got; text != "1 <nil>" {
		t.Errorf("a fetch that waited: %s", text)
	}
	big := strings.Repeat("x", 100_000)
	publish(t, tr, topic, "k", big, big, big, big)
	seen := 0
	for offset := int64(1); seen < 4; {
		x, err := g.Fetch(ctx, tp, offset, 150_000)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range x.Records {
			if seen++; string(r.Value) != big || r.Offset < offset {
				t.Fatalf("record %d at %d is not what was sent", seen, r.Offset)
			}
		}
		if x.Next < offset || len(x.Records) > 0 && x.Next <= x.Records[len(x.Records)-1].Offset || x.End < x.Next {
			t.Fatalf("next %d, end %d after %d records from %d", x.Next, x.End, len(x.Records), offset)
		}
		offset = x.Next
	}
	if log, err := g.Log(ctx, tp); err != nil || log.End != 5 {
		t.Errorf("the end is %d, %v", log.End, err)
	}
	over, stop := context.WithCancel(ctx)
	stop()
	if _, err := g.Fetch(over, tp, 5, 1<<20); !errors.Is(err, context.Canceled) {
		t.Errorf("a fetch whose context has ended: %v", err)
	}
	m.leave(g)
}

func offsetsNotThere(t *testing.T, f Fixture) {
	tr, topic := f.Transport(t), f.Topic(t, 1)
	tp := consumer.TopicPartition{Topic: topic}
	publish(t, tr, topic, "k", "a", "b")
	m := join(t, tr, groupName(), topic)
	g := m.next()
	g.read(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	_, err := g.Fetch(ctx, tp, 100, 1<<20)
	var bad *consumer.RangeError
	if !errors.As(err, &bad) || bad.TopicPartition != tp || bad.Offset != 100 || bad.Start != 0 || bad.End != 2 {
		t.Errorf("an offset behind the end: %v", err)
	}
	m.leave(g)
}

func severalTopics(t *testing.T, f Fixture) {
	tr, group := f.Transport(t), groupName()
	topics := []string{f.Topic(t, 2), f.Topic(t, 1)}
	for _, topic := range topics {
		publish(t, tr, topic, "k", topic)
	}
	m := join(t, tr, group, topics...)
	g := m.nextWith(3)
	records, _ := g.read(t, 2)
	m.leave(g)
	equal(t, "what came", values(records), once(topics...))
}

// A topic that does not exist yet keeps nobody from the others, and is read when it comes.
func topicComesLater(t *testing.T, f Fixture) {
	tr, group, there := f.Transport(t), groupName(), f.Topic(t, 1)
	later, create := f.Later(t)
	publish(t, tr, there, "k", "a")
	m := join(t, tr, group, there, later)
	g := m.readUntil("a")
	create()
	publish(t, tr, later, "k", "b")
	publish(t, tr, there, "k", "c")
	g.ended(t)
	close(g.over)
	m.leave(m.readUntil("b"))
}

func joinEnds(t *testing.T, f Fixture) {
	tr, topic, group := f.Transport(t), f.Topic(t, 1), groupName()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	err := tr.Join(ctx, group, []string{topic}, session{t, func(context.Context, consumer.Generation) error { return errStop }})
	if !errors.Is(err, errStop) {
		t.Errorf("Serve's error comes back as %v", err)
	}
	m := join(t, tr, group, topic) // and it may join again
	g := m.nextWith(1)
	m.leave(g)
	gone, leave := context.WithCancel(ctx)
	leave()
	if err := tr.Join(gone, group, []string{topic}, session{t, func(context.Context, consumer.Generation) error { return nil }}); err != nil {
		t.Errorf("with a context that has ended: %v", err)
	}
}
