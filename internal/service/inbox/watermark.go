package inbox

import (
	"cmp"
	"slices"
)

// A watermark is the place of the last handled record of a lane: its leader epoch and its offset. A broker that becomes the leader
// without the latest records writes other records at their offsets, with a higher epoch. So a record is handled only if
// neither its offset nor its epoch is above the watermark. In one log, epochs grow with the offsets: of the records
// that are still there, none counts as new. N29

// covers reports whether the record with this leader epoch at this offset was handled. An unknown epoch (-1) is not compared.
func (m Mark) covers(offset int64, epoch int32) bool {
	return offset < m.Next && (epoch <= m.Epoch || m.Epoch < 0)
}

// Advance returns the watermark after next, another watermark of the lane. Within a generation it stays unchanged if it covers the last record
// of next. So it never goes back in one log, but it does to the first record of a leader that has lost handled records.
func (m Mark) Advance(next Mark) Mark {
	switch {
	case m.Generation > next.Generation, m.Generation == next.Generation && m.covers(next.Next-1, next.Epoch):
		return m
	case m.Generation == next.Generation && next.Epoch < 0:
		next.Epoch = m.Epoch
	}
	return next
}

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

// covers reports whether the watermark of the entry's lane covers the entry, which must have a place.
func (m Marks) covers(entry Entry) bool {
	lane := entryLane(entry)
	mark, ok := m[lane]
	return ok && mark.Generation == m.currentGeneration(lane) && mark.covers(entry.Place.Offset, entry.Place.LeaderEpoch)
}

// collectMoves returns one move for each lane that the entries move.
func (m Marks) collectMoves(list []Entry) []Move {
	to := make(map[LaneKey]Mark)
	for _, e := range list {
		if e.Place.Topic == "" || m.covers(e) {
			continue
		}

		lane := entryLane(e)
		next := Mark{Generation: m.currentGeneration(lane), Next: e.Place.Offset + 1, Epoch: e.Place.LeaderEpoch}
		if mark, ok := to[lane]; ok {
			next = mark.Advance(next)
		}
		to[lane] = next
	}

	all := make([]Move, 0, len(to))
	for l, w := range to {
		all = append(all, Move{l, w})
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
