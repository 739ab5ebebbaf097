package inbox

import (
	"cmp"
	"slices"
)

// The watermark of PartitionLane belongs to the partition: its generation is the current one, and
// watermarks of an older generation have no effect. So one write begins a generation, regardless of
// the lanes that exist and of concurrent writes. N29

// Marks contains the stored watermarks of some lanes.
type Marks map[LaneKey]Mark

// entryPartition returns the partition of an entry, which must have a place.
func entryPartition(entry Entry) Partition {
	return Partition{entry.Key.Consumer, entry.Place.Topic, entry.Place.Partition}
}

// entryLane returns the lane of an entry, which must have a place.
func entryLane(entry Entry) LaneKey { return LaneKey{entryPartition(entry), entry.Place.Lane} }

// lanesOf returns the lanes of the entries and those of their partitions, without repetitions.
func lanesOf(list []Entry) []LaneKey {
	var lanes []LaneKey
	seen := make(map[LaneKey]struct{})

	for _, e := range list {
		if e.Place.Topic == "" {
			continue
		}

		for _, l := range []LaneKey{entryLane(e), {entryPartition(e), PartitionLane}} {
			if _, ok := seen[l]; !ok {
				seen[l] = struct{}{}
				lanes = append(lanes, l)
			}
		}
	}
	return lanes
}

// currentGeneration returns the current generation of the lane's partition. If the watermark of the
// partition is missing, that of the lane determines it.
func (m Marks) currentGeneration(lane LaneKey) int64 {
	return max(m[LaneKey{lane.Partition, PartitionLane}].Generation, m[lane].Generation)
}

// nextOffset returns the first offset of a lane that was not handled in this generation.
func (m Marks) nextOffset(lane LaneKey, generation int64) int64 {
	if mark, ok := m[lane]; ok && mark.Generation == generation {
		return mark.Next
	}
	return 0
}

// collectMoves returns one move for each lane of the entries.
func (m Marks) collectMoves(list []Entry) []Move {
	to := make(map[LaneKey]Mark)
	for _, e := range list {
		if e.Place.Topic == "" {
			continue
		}

		lane := entryLane(e)
		mark, ok := to[lane]
		if !ok {
			mark = Mark{Generation: m.currentGeneration(lane), Epoch: -1}
		}

		mark.Next = max(mark.Next, e.Place.Offset+1)
		mark.Epoch = max(mark.Epoch, e.Place.LeaderEpoch)
		to[lane] = mark
	}

	all := make([]Move, 0, len(to))
	for l, w := range to {
		if w.Next > m.nextOffset(l, w.Generation) {
			all = append(all, Move{l, w})
		}
	}

	// All batches write in the same order. So two batches with common lanes conflict at the first
	// one, and cannot deadlock.
	slices.SortFunc(all, func(a, b Move) int {
		return cmp.Or(
			cmp.Compare(a.Consumer, b.Consumer),
			cmp.Compare(a.Topic, b.Topic),
			cmp.Compare(a.Number, b.Number),
			cmp.Compare(a.Lane, b.Lane))
	})
	return all
}
