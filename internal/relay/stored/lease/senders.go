package lease

import (
	"maps"
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// SenderTable is the stored form of a list of record.Sender. It names each topic once: with the names
// of 10,000 topics for each sender, the document would be too large for MongoDB.
//
// A further sender costs about 100 bytes however many partitions it is open in, because it shares the places of
// the sender before it. Senders with an equal producer id are one sender. Package fence closes a partition for all
// earlier senders at once and with equal ends, so the senders of a topic differ at most a few times per partition.
type SenderTable struct {
	List   []record.Sender `bson:"list,omitempty"` // without Open and EndOffsets
	Topics []SenderTopic   `bson:"topics,omitempty"`
}

// SenderTopic states where the senders of a table may have records in a topic.
type SenderTopic struct {
	Topic  string         `bson:"t"`
	Places []SenderPlaces `bson:"s"`
}

// SenderPlaces are the partitions of a topic in which Count senders from List[First] on may have records.
type SenderPlaces struct {
	First int     `bson:"i"`
	Count int     `bson:"n"`
	Open  []int32 `bson:"p,omitempty"` // first and last partition of each range of Open
	Until []int64 `bson:"u,omitempty"` // EndOffsets
}

// newSenderTable returns the stored form of list.
func newSenderTable(list []record.Sender) SenderTable {
	places := map[string][]SenderPlaces{}
	for i, sender := range list {
		inTopic := map[string]SenderPlaces{}
		for topic, ends := range sender.EndOffsets {
			inTopic[topic] = SenderPlaces{Until: ends}
		}
		for topic, partitions := range groupByTopic(sender.Open) {
			inTopic[topic] = SenderPlaces{Open: findRanges(partitions), Until: sender.EndOffsets[topic]}
		}

		for topic, own := range inTopic {
			places[topic] = appendPlaces(places[topic], i, own)
		}
	}

	// The order makes an unchanged list an unchanged field, which costs nothing in the oplog.
	table := SenderTable{List: slices.Clone(list)}
	for _, topic := range slices.Sorted(maps.Keys(places)) {
		table.Topics = append(table.Topics, SenderTopic{Topic: topic, Places: places[topic]})
	}
	return table
}

// appendPlaces adds the places of sender i, which is above all senders in list.
func appendPlaces(list []SenderPlaces, i int, own SenderPlaces) []SenderPlaces {
	if last := len(list) - 1; last >= 0 {
		before := &list[last]
		if before.First+before.Count == i && slices.Equal(before.Open, own.Open) && slices.Equal(before.Until, own.Until) {
			before.Count++
			return list
		}
	}

	own.First, own.Count = i, 1
	return append(list, own)
}

// listSenders returns the list of which t is the stored form. Open is sorted by topic and partition.
func (t SenderTable) listSenders() []record.Sender {
	out := slices.Clone(t.List)
	for _, topic := range t.Topics {
		for _, places := range topic.Places {
			// An operator may have removed senders from the list.
			for i := places.First; i < min(places.First+places.Count, len(out)); i++ {
				for at := 0; at+1 < len(places.Open); at += 2 {
					for p := places.Open[at]; p <= places.Open[at+1]; p++ {
						out[i].Open = append(out[i].Open, record.TopicPartition{Topic: topic.Topic, Partition: p})
					}
				}

				if len(places.Until) > 0 {
					if out[i].EndOffsets == nil {
						out[i].EndOffsets = map[string][]int64{}
					}
					out[i].EndOffsets[topic.Topic] = slices.Clone(places.Until)
				}
			}
		}
	}
	return out
}

func groupByTopic(list []record.TopicPartition) map[string][]int32 {
	byTopic := map[string][]int32{}
	for _, tp := range list {
		byTopic[tp.Topic] = append(byTopic[tp.Topic], tp.Partition)
	}
	return byTopic
}

// findRanges returns the first and the last number of each range of consecutive partitions: [0 5] for the
// partitions 0 to 5. It sorts partitions.
func findRanges(partitions []int32) []int32 {
	slices.Sort(partitions)
	var ranges []int32
	for _, p := range partitions {
		last := len(ranges) - 1
		switch {
		case last < 0 || p > ranges[last]+1:
			ranges = append(ranges, p, p)
		default:
			ranges[last] = p
		}
	}
	return ranges
}
