package kafkawire

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// FetchFrom is a partition and the first offset to fetch.
type FetchFrom struct {
	record.TopicPartition
	Offset int64
	// TopicID is the id that Client.TopicID has returned for the topic, or "". If all partitions have one, and the broker supports it (Kafka
	// 3.1), records of another topic of that name are not returned: the code is UnknownTopicID or InconsistentTopicID.
	TopicID string
}

// FetchLimits bound a Fetch. A broker sends the first batch whole, even if it is larger.
type FetchLimits struct {
	MaxBytes          int           // of the response
	MaxPartitionBytes int           // of one partition in it
	MaxWait           time.Duration // how long the broker waits for the first record
	Timeout           time.Duration // of the response, beyond MaxWait; at least 5 s and a millisecond for each partition
	Committed         bool          // leave out records of open transactions, and list the aborted ones
	Rack              string        // of this client, for which the leader may name a replica; "" for none
}

// correlation numbers the requests that are not written by protocol.Conn.
var correlation atomic.Int32

// Fetch reads partitions from the broker at addr, which leads them or has a replica. It blocks for at most MaxWait more
// than other requests, and before that, as long as a quota requires (KIP-219).
func (c *Client) Fetch(
	ctx context.Context, addr string, from []FetchFrom, limits FetchLimits,
) (*fetched.Response, error) {
	// In the protocol, -1 means here: no replica, no fetch session, and no check of the leader epoch.
	req := &fetch.Request{
		ReplicaID:    -1,
		MaxWaitTime:  int32(limits.MaxWait.Milliseconds()),
		MinBytes:     1,
		MaxBytes:     int32(limits.MaxBytes),
		SessionEpoch: -1,
		RackID:       limits.Rack,
	}
	if limits.Committed {
		req.IsolationLevel = int8(kafkago.ReadCommitted)
	}

	topicIndex, ids := map[string]int{}, map[string]string{}
	byID := true
	for _, f := range from {
		ids[f.Topic] = f.TopicID
		byID = byID && f.TopicID != ""
		i, ok := topicIndex[f.Topic]
		if !ok {
			i = len(req.Topics)
			topicIndex[f.Topic] = i
			req.Topics = append(req.Topics, fetch.RequestTopic{Topic: f.Topic})
		}
		req.Topics[i].Partitions = append(req.Topics[i].Partitions, fetch.RequestPartition{
			Partition:          f.Partition,
			CurrentLeaderEpoch: -1,
			FetchOffset:        f.Offset,
			LogStartOffset:     -1,
			PartitionMaxBytes:  int32(limits.MaxPartitionBytes),
		})
	}

	if wait := c.Throttled(addr); wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, fmt.Errorf("fetching: waiting for a quota: %w", context.Cause(ctx))
		}
	}

	var response *fetched.Response
	// A broker without records delays its response for MaxWait.
	timeout := max(limits.Timeout, timeoutFor(adminTimeout, len(from))) + limits.MaxWait
	err := c.useLink(ctx, addr, timeout, func(link *Link) (err error) {
		if byID && link.highest[protocol.Fetch] >= fetched.WithIDs {
			response, err = link.fetchByID(req, ids)
			return err
		}
		version, id := link.versions[protocol.Fetch], correlation.Add(1)
		err = protocol.WriteRequest(link.conn, version, id, link.clientID, req)
		if err == nil {
			response, err = fetched.Read(link.reader, version, id)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("fetching: %w", err)
	}
	c.NoteThrottle(addr, response.Throttle)
	return response, nil
}
