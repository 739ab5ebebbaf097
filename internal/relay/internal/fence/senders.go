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
type senders []record.Sender

// earlierSenders returns the senders of the watcher document that still matter. The last one is the
// previous owner: it may have written to every target, not only to the targets in its Open. The others are open
// in the partitions of their Open. A sender is forgotten if the stored offsets have passed its last records.
func earlierSenders(list []record.Sender, targets []record.TopicPartition, offsets map[string][]int64) senders {
	var out senders
	for i, s := range list {
		s.Open, s.EndOffsets = slices.Clone(s.Open), cloneOffsets(s.EndOffsets)
		if i == len(list)-1 {
			s.Open = slices.Clone(targets)
		} else if len(s.Open) == 0 && arePassed(s.EndOffsets, offsets) {
			continue
		}
		out = out.withSender(s)
	}
	return out
}

// withSender returns the list with sender. If it has the producer id already, the two are merged.
func (s senders) withSender(sender record.Sender) senders {
	at := slices.IndexFunc(s, func(other record.Sender) bool { return other.ID == sender.ID })
	if at < 0 {
		at, s = len(s), append(s, record.Sender{ID: sender.ID, Epoch: sender.Epoch, Generation: sender.Generation, Cluster: sender.Cluster})
	}

	merged := &s[at]
	merged.Epoch = max(merged.Epoch, sender.Epoch)
	merged.Generation = max(merged.Generation, sender.Generation)
	merged.Open = append(merged.Open, sender.Open...)
	slices.SortFunc(merged.Open, comparePartitions)
	merged.Open = slices.Compact(merged.Open)
	for topic, ends := range sender.EndOffsets {
		for p, end := range ends {
			tp := record.TopicPartition{Topic: topic, Partition: int32(p)}
			merged.EndOffsets = raiseOffset(merged.EndOffsets, tp, end)
		}
	}
	return s
}

func comparePartitions(a, b record.TopicPartition) int {
	return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
}

// arePassed reports whether the stored offsets are at or above ends everywhere.
func arePassed(ends, offsets map[string][]int64) bool {
	for topic, list := range ends {
		for p, end := range list {
			if end > 0 && storedOffset(offsets, record.TopicPartition{Topic: topic, Partition: int32(p)}) < end {
				return false
			}
		}
	}
	return true
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
		if at := slices.Index(s[i].Open, tp); at >= 0 {
			s[i].Open = slices.Delete(s[i].Open, at, at+1)
			s[i].EndOffsets = raiseOffset(s[i].EndOffsets, tp, end)
		}
	}
}

// clone returns a deep copy.
func (s senders) clone() []record.Sender {
	out := make([]record.Sender, len(s))
	for i, x := range s {
		x.Open, x.EndOffsets = slices.Clone(x.Open), cloneOffsets(x.EndOffsets)
		out[i] = x
	}
	return out
}
