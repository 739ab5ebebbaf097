package adopt

import (
	"context"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkalog"
)

// maxFetch is the size of one response while the topic is read.
const maxFetch = 4 << 20

// readOffsetTopic reads the offset topic of Kafka Connect in distributed mode from its beginning to its present end. Of each key it
// returns the last value. A tombstone removes the key.
func readOffsetTopic(ctx context.Context, wire *kafkawire.Client, topic string) ([]rawOffset, error) {
	layout, err := wire.Metadata(ctx, []string{topic})
	if err != nil {
		return nil, fmt.Errorf("reading topic %s: %w", topic, err)
	}
	found := layout.Topics[topic]
	if found.Err != nil {
		return nil, fmt.Errorf("reading topic %s: %w; pass the topic of offset.storage.topic", topic, found.Err)
	}

	reader := (&kafkalog.Client{Config: transport.Config{MaxWait: 500 * time.Millisecond}, Wire: wire}).Reader([]string{topic})
	var keys []string
	last := map[string][]byte{}
	for p := range found.Partitions {
		tp := record.TopicPartition{Topic: topic, Partition: int32(p)}
		// Compaction may have removed the first offsets.
		at, err := wire.LeaderOffset(ctx, layout.LeaderAddr(tp), tp, kafkawire.LogStart)
		if err != nil {
			return nil, fmt.Errorf("reading topic %s: %w", topic, err)
		}

		for next, end := at.Offset, int64(-1); end < 0 || next < end; {
			got, err := reader.Fetch(ctx, transport.TopicPartition(tp), transport.FetchFrom{Offset: next}, maxFetch)
			if err != nil {
				return nil, fmt.Errorf("reading topic %s: %w", topic, err)
			}
			// Connect may still write: only the end at the first response counts.
			if end < 0 {
				end = got.End
			}
			for _, r := range got.Records {
				if _, known := last[string(r.Key)]; !known {
					keys = append(keys, string(r.Key))
				}
				last[string(r.Key)] = r.Value
			}
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			next = got.Next
		}
	}

	var list []rawOffset
	// The order of the first appearance makes the messages repeatable.
	for _, k := range keys {
		if last[k] != nil {
			list = append(list, rawOffset{key: []byte(k), value: last[k]})
		}
	}
	return list, nil
}
