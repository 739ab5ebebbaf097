package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	kafka "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/apiversions"

	"github.com/outrelay/outrelay/internal/base/retry"
)

// partitions is the number of partitions of every topic of the benchmark.
const partitions = 6

const clientID = "outrelay-bench"

// responseTime bounds the wait for a response. A broker shares the machine with the measured processes and
// with others.
const responseTime = 30 * time.Second

// broker is one connection for one goroutine. It does not use the pool of kafka-go, because the switches between the
// pool's goroutines would be visible in the latencies.
type broker struct {
	nc net.Conn
	*protocol.Conn
}

func dialBroker(ctx context.Context, addr string) (*broker, error) {
	nc, err := (&net.Dialer{Timeout: responseTime}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("kafka: %w", err)
	}

	broker := &broker{nc, protocol.NewConn(nc, clientID)}
	_ = nc.SetDeadline(time.Now().Add(responseTime))
	message, err := broker.RoundTrip(new(apiversions.Request))
	if err != nil {
		_ = nc.Close()
		return nil, fmt.Errorf("kafka at %s: reading its API versions: %w", addr, err)
	}

	versions := map[protocol.ApiKey]int16{}
	for _, k := range message.(*apiversions.Response).ApiKeys {
		key := protocol.ApiKey(k.ApiKey)
		versions[key] = key.SelectVersion(k.MinVersion, k.MaxVersion)
	}
	broker.SetVersions(versions)
	return broker, nil
}

// sendRequest sends a request and returns the response. It fails if the response is not there in time.
func (b *broker) sendRequest(within time.Duration, req protocol.Message) (protocol.Message, error) {
	_ = b.nc.SetDeadline(time.Now().Add(within))
	return b.RoundTrip(req)
}

func (b *broker) closeConnection() { _ = b.nc.Close() }

// cluster does the tasks that are not measured: topics, leaders, offsets.
type cluster struct {
	client    *kafka.Client
	transport *kafka.Transport
}

func newCluster(brokers []string) *cluster {
	transport := &kafka.Transport{ClientID: clientID, MetadataTTL: time.Second, DialTimeout: responseTime}
	return &cluster{&kafka.Client{Addr: kafka.TCP(brokers...), Transport: transport, Timeout: responseTime}, transport}
}

func (c *cluster) closeIdle() { c.transport.CloseIdleConnections() }

// createTopic creates a topic, and blocks until all its partitions have a leader that responds.
func (c *cluster) createTopic(ctx context.Context, topic string) error {
	began := time.Now()
	for {
		res, err := c.client.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{
			Topic: topic, NumPartitions: partitions, ReplicationFactor: -1,
		}}})
		if err == nil {
			err = res.Errors[topic]
		}
		if err == nil {
			break
		}
		// On a busy machine, a broker sometimes loses its controller for a moment.
		if !errors.Is(err, kafka.BrokerNotAvailable) || time.Since(began) > stall || retry.Sleep(ctx, slow) != nil {
			return fmt.Errorf("creating topic %s: %w", topic, err)
		}
	}

	var err error
	for {
		if _, err = c.partitionLeaders(ctx, topic); err == nil {
			if _, err = c.sumEndOffsets(ctx, topic); err == nil {
				return nil
			}
		}

		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (c *cluster) deleteTopic(ctx context.Context, topic string) {
	// A topic that stays only uses disk space.
	_, _ = c.client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
}

// partitionLeaders returns the partitions by the address of their leader.
func (c *cluster) partitionLeaders(ctx context.Context, topic string) (map[string][]int32, error) {
	response, err := c.client.Metadata(ctx, &kafka.MetadataRequest{Topics: []string{topic}})
	if err != nil {
		return nil, fmt.Errorf("reading the metadata of topic %s: %w", topic, err)
	}

	out, n := map[string][]int32{}, 0
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			if t.Error == nil && p.Error == nil && p.Leader.Host != "" {
				addr := net.JoinHostPort(p.Leader.Host, strconv.Itoa(p.Leader.Port))
				out[addr] = append(out[addr], int32(p.ID))
				n++
			}
		}
	}

	if n != partitions {
		return nil, fmt.Errorf("topic %s has leaders for %d of %d partitions", topic, n, partitions)
	}
	return out, nil
}

// countRecords returns the number of records in a new topic: the sum of the end offsets. On a busy machine, a broker
// sometimes loses its leadership for a moment, so countRecords retries.
func (c *cluster) countRecords(ctx context.Context, topic string) (int, error) {
	for began := time.Now(); ; {
		n, err := c.sumEndOffsets(ctx, topic)
		var code kafka.Error
		if err == nil || !errors.As(err, &code) || !code.Temporary() || time.Since(began) > stall || retry.Sleep(ctx, slow) != nil {
			return n, err
		}
	}
}

func (c *cluster) sumEndOffsets(ctx context.Context, topic string) (int, error) {
	req := &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{topic: make([]kafka.OffsetRequest, partitions)}}
	for p := range partitions {
		req.Topics[topic][p] = kafka.LastOffsetOf(p)
	}

	res, err := c.client.ListOffsets(ctx, req)
	if err != nil {
		return 0, fmt.Errorf("reading the end offsets of topic %s: %w", topic, err)
	}

	n := 0
	for _, p := range res.Topics[topic] {
		if p.Error != nil {
			return 0, fmt.Errorf("reading the end offset of %s-%d: %w", topic, p.Partition, p.Error)
		}
		n += int(p.LastOffset)
	}
	return n, nil
}
