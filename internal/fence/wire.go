package fence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
	"github.com/outrelay/outrelay/internal/record"
)

// direct sends a request to a broker of our choice (any, if negative) and reads the answer itself: kafka-go routes by its
// cached layout, and answers Metadata from the cache.
type direct struct {
	broker  int32
	client  string
	req     protocol.Message
	read    func(r io.Reader, version int16) (protocol.Message, error)
	version int16
}

var correlation atomic.Int32

func (d *direct) ApiKey() protocol.ApiKey { return d.req.ApiKey() }

// Broker routes the request.
func (d *direct) Broker(cluster protocol.Cluster) (protocol.Broker, error) {
	if d.broker < 0 {
		return protocol.Broker{ID: -1}, nil
	}
	b, ok := cluster.Brokers[d.broker]
	if !ok {
		return protocol.Broker{}, kafka.BrokerNotAvailable
	}
	return b, nil
}

// Required asks kafka-go to leave the exchange to us; it gets the versions that the connection has negotiated.
func (d *direct) Required(versions map[protocol.ApiKey]int16) bool {
	d.version = versions[d.ApiKey()]
	return true
}

// RawExchange writes the request and reads the answer. Nobody else uses the connection meanwhile.
func (d *direct) RawExchange(rw io.ReadWriter) (protocol.Message, error) {
	id := correlation.Add(1)
	if err := protocol.WriteRequest(rw, d.version, id, d.client, d.req); err != nil {
		return nil, err
	}
	if d.read != nil {
		return d.read(rw, d.version)
	}
	got, msg, err := protocol.ReadResponse(rw, d.ApiKey(), d.version)
	if err == nil && got != id {
		err = fmt.Errorf("answer %d to request %d", got, id)
	}
	if err != nil {
		return nil, err
	}
	return answer{msg}, nil
}

// answer hides the type of a response from kafka-go, which acts on some.
type answer struct{ protocol.Message }

func (c *Client) send(ctx context.Context, broker int32, items int, req protocol.Message) (protocol.Message, error) {
	m, err := c.roundTrip(ctx, items, &direct{broker: broker, client: c.Transport.ClientID, req: req})
	if err != nil {
		return nil, err
	}
	return m.(answer).Message, nil
}

// refresh makes kafka-go fetch the cluster's layout anew. A Metadata request for a name that no topic can have is the only
// request that always ends in a refresh: the name is refused, so it never creates anything, and unlike CreateTopics it
// does not depend on the controller that the old layout names.
func (c *Client) refresh(ctx context.Context) {
	_, _ = c.roundTrip(ctx, 1, &metadata.Request{TopicNames: []string{"/"}, AllowAutoTopicCreation: true})
}

// edge is the offset of one end of each partition.
type edge int64

const (
	first edge = -2 // the start of the log
	last  edge = -1 // the high watermark
)

// offset asks the leader of one partition.
func (c *Client) offset(ctx context.Context, leader int32, tp record.TopicPartition, at edge) (int64, error) {
	m, err := c.send(ctx, leader, 1, &listoffsets.Request{ReplicaID: -1, Topics: []listoffsets.RequestTopic{{
		Topic: tp.Topic, Partitions: []listoffsets.RequestPartition{{Partition: tp.Partition, CurrentLeaderEpoch: -1, Timestamp: int64(at)}},
	}}})
	if err != nil {
		return 0, err
	}
	res := m.(*listoffsets.Response)
	if len(res.Topics) != 1 || len(res.Topics[0].Partitions) != 1 {
		return 0, errors.New("answer without the partition")
	}
	p := res.Topics[0].Partitions[0]
	if p.ErrorCode != 0 {
		return 0, kafka.Error(p.ErrorCode)
	}
	return p.Offset, nil
}

// The sizes of one Fetch. A batch that is larger is sent whole all the same.
const (
	fetchBytes     = 8 << 20
	partitionBytes = 1 << 20
	fetchWaitMS    = 100
)

type fetchFrom struct {
	record.TopicPartition
	offset int64
}

// fetch asks one broker for several partitions, uncommitted records included, about `each` bytes of each.
func (c *Client) fetch(ctx context.Context, leader int32, from []fetchFrom, each int32) (*fetched.Answer, error) {
	req := &fetch.Request{ReplicaID: -1, MaxWaitTime: fetchWaitMS, MinBytes: 1, MaxBytes: fetchBytes, SessionEpoch: -1}
	at := map[string]int{}
	for _, f := range from {
		i, ok := at[f.Topic]
		if !ok {
			i = len(req.Topics)
			at[f.Topic] = i
			req.Topics = append(req.Topics, fetch.RequestTopic{Topic: f.Topic})
		}
		req.Topics[i].Partitions = append(req.Topics[i].Partitions, fetch.RequestPartition{
			Partition: f.Partition, CurrentLeaderEpoch: -1, FetchOffset: f.offset, LogStartOffset: -1, PartitionMaxBytes: each,
		})
	}
	m, err := c.roundTrip(ctx, len(from), &direct{broker: leader, client: c.Transport.ClientID, req: req, read: fetched.Read})
	if err != nil {
		return nil, err
	}
	return m.(*fetched.Answer), nil
}
