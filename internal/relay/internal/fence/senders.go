package fence

import (
	"cmp"
	"maps"
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// senders are the identities that were allowed to send before this owner, at most one for each producer
// id. A marker above the highest epoch of an id is above all of its epochs, and a partition that is
// closed for the highest epoch is closed for the lower ones.
type senders []earlierSender

// earlierSender is a record.Sender whose open partitions can be found and closed one by one at little cost.
type earlierSender struct {
	Producer
	generation int
	cluster    string
	open       openPartitions
	endOffsets map[string][]int64
}

// earlierSenders returns the senders of the watcher document that still matter. The last one is the
// previous owner: it may have written to every target, not only to the targets in its Open. The others are open
// in the partitions of their Open. A sender is forgotten if the stored offsets have passed its last records.
func earlierSenders(list []record.Sender, targets []record.TopicPartition, offsets map[string][]int64) senders {
	var out senders
	for i, s := range list {
		s.EndOffsets = omitPassed(s.EndOffsets, offsets)
		if i == len(list)-1 {
			s.Open = targets
		} else if len(s.Open) == 0 && len(s.EndOffsets) == 0 {
			continue
		}
		out = out.withSender(s)
	}
	return out
}

// withSender returns the list with sender. If it has the producer id already, the two are merged.
func (s senders) withSender(sender record.Sender) senders {
	at := slices.IndexFunc(s, func(other earlierSender) bool { return other.ID == sender.ID })
	if at < 0 {
		at, s = len(s), append(s, earlierSender{Producer: producerOf(sender), generation: sender.Generation, cluster: sender.Cluster})
	}

	merged := &s[at]
	merged.Epoch = max(merged.Epoch, sender.Epoch)
	merged.generation = max(merged.generation, sender.Generation)
	merged.open = newOpenPartitions(append(merged.open.listPartitions(), sender.Open...))
	for topic, ends := range sender.EndOffsets {
		for p, end := range ends {
			tp := record.TopicPartition{Topic: topic, Partition: int32(p)}
			merged.endOffsets = raiseOffset(merged.endOffsets, tp, end)
		}
	}
	return s
}

// openPartitions is a set of partitions. A removal moves no other partition: to search and shorten a list for
// each of 60,000 partitions takes half a minute. A map would have to be sorted whenever the senders are saved.
type openPartitions struct {
	sorted []record.TopicPartition
	closed []bool // for each of sorted
	count  int    // of those that are not closed
}

// newOpenPartitions returns the set of the partitions in list, which it sorts and keeps.
func newOpenPartitions(list []record.TopicPartition) openPartitions {
	slices.SortFunc(list, comparePartitions)
	list = slices.Compact(list)
	return openPartitions{sorted: list, closed: make([]bool, len(list)), count: len(list)}
}

// findOpen returns the index of tp, and whether tp is open.
func (o *openPartitions) findOpen(tp record.TopicPartition) (int, bool) {
	at, found := slices.BinarySearchFunc(o.sorted, tp, comparePartitions)
	return at, found && !o.closed[at]
}

// removePartition removes tp and reports whether it was open.
func (o *openPartitions) removePartition(tp record.TopicPartition) bool {
	at, isOpen := o.findOpen(tp)
	if isOpen {
		o.closed[at] = true
		o.count--
	}
	return isOpen
}

// listPartitions returns a new list of the open partitions, sorted.
func (o *openPartitions) listPartitions() []record.TopicPartition {
	out := make([]record.TopicPartition, 0, o.count)
	for i, tp := range o.sorted {
		if !o.closed[i] {
			out = append(out, tp)
		}
	}
	return out
}

func comparePartitions(a, b record.TopicPartition) int {
	return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
}

// omitPassed returns ends without the topics in which the stored offsets are at or above all ends. A sender that is
// listed for one partition would otherwise keep its ends in all topics.
func omitPassed(ends, offsets map[string][]int64) map[string][]int64 {
	out := maps.Clone(ends)
	maps.DeleteFunc(out, func(topic string, list []int64) bool {
		for p, end := range list {
			if end > 0 && storedOffset(offsets, record.TopicPartition{Topic: topic, Partition: int32(p)}) < end {
				return false
			}
		}
		return true
	})
	return out
}

// hasEnd reports whether ends has an end offset for tp.
func hasEnd(ends map[string][]int64, tp record.TopicPartition) bool {
	list := ends[tp.Topic]
	return int(tp.Partition) < len(list) && list[tp.Partition] > 0
}

// storedOffset returns the stored offset of tp. A partition without an entry is read from its start, 0
// (N9).
func storedOffset(offsets map[string][]int64, tp record.TopicPartition) int64 {
	if list := offsets[tp.Topic]; int(tp.Partition) < len(list) {
		return list[tp.Partition]
	}
	return 0
}

func cloneOffsets(offsets map[string][]int64) map[string][]int64 {
	out := maps.Clone(offsets)
	for t, list := range out {
		out[t] = slices.Clone(list)
	}
	return out
}

// raiseOffset sets the offset of a partition unless it is higher already. It returns the map, which it
// makes if it is nil.
func raiseOffset(offsets map[string][]int64, tp record.TopicPartition, offset int64) map[string][]int64 {
	if offsets == nil {
		offsets = map[string][]int64{}
	}
	list := offsets[tp.Topic]
	for len(list) <= int(tp.Partition) {
		list = append(list, 0)
	}
	list[tp.Partition] = max(list[tp.Partition], offset)
	offsets[tp.Topic] = list
	return offsets
}

// closePartition notes that no earlier sender writes to tp any longer, and that their records in it are
// below end.
func (s senders) closePartition(tp record.TopicPartition, end int64) {
	for i := range s {
		// A sender for which tp was closed before gets the later end too. It may be listed longer for
		// that, but the document states an end only once if it is equal for all senders.
		if s[i].open.removePartition(tp) || hasEnd(s[i].endOffsets, tp) {
			s[i].endOffsets = raiseOffset(s[i].endOffsets, tp, end)
		}
	}
}

// listSenders returns the senders as the watcher document lists them. The result shares nothing with s.
func (s senders) listSenders() []record.Sender {
	out := make([]record.Sender, len(s))
	for i, x := range s {
		out[i] = record.Sender{
			ID: x.ID, Epoch: x.Epoch, Generation: x.generation, Cluster: x.cluster,
			Open: x.open.listPartitions(), EndOffsets: cloneOffsets(x.endOffsets),
		}
	}
	return out
}
