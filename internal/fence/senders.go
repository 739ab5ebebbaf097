package fence

import (
	"cmp"
	"maps"
	"slices"

	"github.com/outrelay/outrelay/internal/record"
)

// senders are the identities that were allowed to send before this owner, at most one for each producer id: a marker above
// the highest epoch of an id is above all of them, and what is closed for it is closed for the lower ones.
type senders []record.Sender

// earlier reads the list of the watcher document. Its last element is the owner before us: it may have written to every
// partition, whatever its Open says; the others are open where they say so. Those whose last records the stored offsets
// have passed are forgotten.
func earlier(list []record.Sender, targets []record.TopicPartition, offsets map[string][]int64) senders {
	var out senders
	for i, s := range list {
		s.Open, s.EndOffsets = slices.Clone(s.Open), cloneUntil(s.EndOffsets)
		if i == len(list)-1 {
			s.Open = slices.Clone(targets)
		} else if len(s.Open) == 0 && passed(s.EndOffsets, offsets) {
			continue
		}
		out = out.add(s)
	}
	return out
}

// add retires a sender.
func (s senders) add(x record.Sender) senders {
	at := slices.IndexFunc(s, func(o record.Sender) bool { return o.ID == x.ID })
	if at < 0 {
		at, s = len(s), append(s, record.Sender{ID: x.ID, Epoch: x.Epoch, Generation: x.Generation})
	}
	have := &s[at]
	have.Epoch = max(have.Epoch, x.Epoch)
	have.Generation = max(have.Generation, x.Generation)
	have.Open = append(have.Open, x.Open...)
	slices.SortFunc(have.Open, compareTP)
	have.Open = slices.Compact(have.Open)
	for topic, ends := range x.EndOffsets {
		for p, end := range ends {
			have.EndOffsets = raise(have.EndOffsets, record.TopicPartition{Topic: topic, Partition: int32(p)}, end)
		}
	}
	return s
}

func compareTP(a, b record.TopicPartition) int {
	return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
}

// passed reports whether the stored offsets are at or above until everywhere.
func passed(until, offsets map[string][]int64) bool {
	for topic, ends := range until {
		for p, end := range ends {
			if end > 0 && storedOffset(offsets, record.TopicPartition{Topic: topic, Partition: int32(p)}) < end {
				return false
			}
		}
	}
	return true
}

// storedOffset is 0 for a partition without an entry: it is read from its start (N9).
func storedOffset(offsets map[string][]int64, tp record.TopicPartition) int64 {
	if list := offsets[tp.Topic]; int(tp.Partition) < len(list) {
		return list[tp.Partition]
	}
	return 0
}

func cloneUntil(u map[string][]int64) map[string][]int64 {
	out := maps.Clone(u)
	for t, ends := range out {
		out[t] = slices.Clone(ends)
	}
	return out
}

// raise sets the end offset of a partition unless it is higher already.
func raise(u map[string][]int64, tp record.TopicPartition, end int64) map[string][]int64 {
	if u == nil {
		u = map[string][]int64{}
	}
	list := u[tp.Topic]
	for len(list) <= int(tp.Partition) {
		list = append(list, 0)
	}
	list[tp.Partition] = max(list[tp.Partition], end)
	u[tp.Topic] = list
	return u
}

// open lists the senders that may still write to tp.
func (s senders) open(tp record.TopicPartition) []record.Sender {
	var out []record.Sender
	for _, x := range s {
		if slices.Contains(x.Open, tp) {
			out = append(out, x)
		}
	}
	return out
}

// close says that no earlier sender writes to tp any more, and that their records in it stand below end.
func (s senders) close(tp record.TopicPartition, end int64) {
	for i := range s {
		if at := slices.Index(s[i].Open, tp); at >= 0 {
			s[i].Open = slices.Delete(s[i].Open, at, at+1)
			s[i].EndOffsets = raise(s[i].EndOffsets, tp, end)
		}
	}
}

// clone is a deep copy, for the caller to save.
func (s senders) clone() []record.Sender {
	out := make([]record.Sender, len(s))
	for i, x := range s {
		x.Open, x.EndOffsets = slices.Clone(x.Open), cloneUntil(x.EndOffsets)
		out[i] = x
	}
	return out
}
