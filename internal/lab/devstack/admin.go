package devstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/base/retry"
)

// checkBroker returns nil if the broker at addr responds and lists at least n live brokers. If id is above 0, the
// list must include id.
func checkBroker(ctx context.Context, addr string, id, n int) error {
	conn, err := (&kafka.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if moment, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(moment)
	}

	brokers, err := conn.Brokers()
	if err != nil {
		return err
	}

	// A broker may respond before it has received the whole cluster.
	if len(brokers) < n {
		return fmt.Errorf("the controller has registered %d of %d brokers", len(brokers), n)
	}
	if id > 0 && !slices.ContainsFunc(brokers, func(broker kafka.Broker) bool { return broker.ID == id }) {
		return fmt.Errorf("broker %d is not part of the cluster yet", id)
	}
	return nil
}

// newClient returns a client of the brokers, and the function that closes it.
func newClient(brokers []string) (client *kafka.Client, closeClient func()) {
	tr := &kafka.Transport{MetadataTTL: 100 * time.Millisecond}
	client = &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr, Timeout: 10 * time.Second}
	return client, tr.CloseIdleConnections
}

// readPartition reads the metadata of one partition.
func readPartition(ctx context.Context, cl *kafka.Client, topic string, partition int) (kafka.Partition, error) {
	res, err := cl.Metadata(ctx, &kafka.MetadataRequest{Topics: []string{topic}})
	if err != nil {
		return kafka.Partition{}, fmt.Errorf("reading the metadata of topic %s: %w", topic, err)
	}

	for _, t := range res.Topics {
		if t.Error != nil {
			return kafka.Partition{}, fmt.Errorf("topic %s: %w", topic, t.Error)
		}
		for _, q := range t.Partitions {
			if q.ID == partition {
				return q, nil
			}
		}
	}
	return kafka.Partition{}, fmt.Errorf("topic %s has no partition %d", topic, partition)
}

// retryFor is how long requests to brokers that do not respond are retried, each time over a new connection.
const retryFor = time.Minute

// readPartitionRetrying is readPartition with retries. A broker may respond late on a busy machine.
func (s *Stack) readPartitionRetrying(ctx context.Context, topic string, partition int) (kafka.Partition, error) {
	ctx, cancel := context.WithTimeout(ctx, retryFor)
	defer cancel()

	var read kafka.Partition
	err := retryWhile(ctx, func() (err error) {
		cl, done := newClient(s.Brokers())
		defer done()
		read, err = readPartition(ctx, cl, topic, partition)
		return err
	}, isTransient)
	return read, err
}

// isTransient reports whether a retry may succeed: a broker was slow, or has not found its controller yet.
func isTransient(err error) bool {
	var slow net.Error
	return errors.As(err, &slow) && slow.Timeout() || isAway(err)
}

// isAway reports whether err comes from a broker that has just started and has not found its controller yet.
func isAway(err error) bool { return errors.Is(err, kafka.BrokerNotAvailable) }

// retryWhile repeats do while isTransient returns true for its error and ctx has not ended. It returns the last
// error of do.
func retryWhile(ctx context.Context, do func() error, isTransient func(error) bool) error {
	for {
		err := do()
		if err == nil || !isTransient(err) || retry.Sleep(ctx, tailRetry) != nil {
			return err
		}
	}
}

// Leader returns the broker that leads the partition. It returns an error while there is no leader.
func (s *Stack) Leader(ctx context.Context, topic string, partition int) (*Member, error) {
	read, err := s.readPartitionRetrying(ctx, topic, partition)
	if err != nil {
		return nil, err
	}

	if member := s.brokerByID(read.Leader.ID); member != nil {
		return member, nil
	}
	return nil, fmt.Errorf("partition %s/%d has no leader", topic, partition)
}

// MoveLeader makes the broker with the id leader the leader of a partition. If the broker is not a replica yet,
// it becomes one in place of another replica first. MoveLeader blocks until one broker reports the new
// leader; another one may report it later.
func (s *Stack) MoveLeader(ctx context.Context, topic string, partition, leader int) error {
	read, err := s.readPartitionRetrying(ctx, topic, partition)
	if err != nil {
		return err
	}

	cl, done := newClient(s.Brokers())
	defer done()

	// The first replica is the preferred leader.
	order := []int{leader}
	for _, r := range read.Replicas {
		if r.ID != leader && len(order) < len(read.Replicas) {
			order = append(order, r.ID)
		}
	}

	moved, err := cl.AlterPartitionReassignments(ctx, &kafka.AlterPartitionReassignmentsRequest{
		Topic: topic, Timeout: 10 * time.Second,
		Assignments: []kafka.AlterPartitionReassignmentsRequestAssignment{{PartitionID: partition, BrokerIDs: order}},
	})
	if err == nil {
		err = moved.Error
	}
	if err == nil && len(moved.PartitionResults) > 0 {
		err = moved.PartitionResults[0].Error
	}
	if err != nil {
		return fmt.Errorf("reassigning %s/%d to %v: %w", topic, partition, order, err)
	}
	return awaitLeader(ctx, cl, topic, partition, leader)
}

// awaitLeader requests elections of the preferred leader until it leads. The cluster rejects the election while the
// new replica is not in sync.
func awaitLeader(ctx context.Context, cl *kafka.Client, topic string, partition, leader int) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := cl.ElectLeaders(ctx, &kafka.ElectLeadersRequest{
			Topic: topic, Partitions: []int{partition}, Timeout: 5 * time.Second,
		})
		if read, qerr := readPartition(ctx, cl, topic, partition); qerr == nil && read.Leader.ID == leader {
			return nil
		}

		select {
		case <-ctx.Done():
			return fmt.Errorf("broker %d does not lead %s/%d: %w (last response: %w)", leader, topic, partition, context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}

func (s *Stack) brokerByID(id int) *Member {
	for _, m := range s.brokers {
		if m.id == id {
			return m
		}
	}
	return nil
}

// SetTopic changes one setting of a topic of the brokers, by Kafka's name. An empty value restores the default of the brokers. It
// blocks until a broker reports the change.
func SetTopic(ctx context.Context, brokers []string, topic, setting, value string) error {
	ctx, cancel := context.WithTimeout(ctx, retryFor)
	defer cancel()

	// A broker without a controller rejects the request for a while.
	err := retryWhile(ctx, func() error {
		cl, done := newClient(brokers)
		defer done()
		return alterTopic(ctx, cl, topic, setting, value)
	}, isTransient)

	if err == nil {
		err = retryWhile(ctx, func() error {
			cl, done := newClient(brokers)
			defer done()
			return hasSetting(ctx, cl, topic, setting, value)
		}, func(err error) bool { return errors.Is(err, errNotApplied) || isTransient(err) })
	}
	if err != nil {
		return fmt.Errorf("setting %s of topic %s: %w", setting, topic, err)
	}
	return nil
}

func alterTopic(ctx context.Context, cl *kafka.Client, topic, setting, value string) error {
	op := kafka.ConfigOperationSet
	if value == "" {
		op = kafka.ConfigOperationDelete
	}

	resource := kafka.IncrementalAlterConfigsRequestResource{
		ResourceType: kafka.ResourceTypeTopic, ResourceName: topic,
		Configs: []kafka.IncrementalAlterConfigsRequestConfig{{Name: setting, Value: value, ConfigOperation: op}},
	}
	res, err := cl.IncrementalAlterConfigs(ctx, &kafka.IncrementalAlterConfigsRequest{
		Resources: []kafka.IncrementalAlterConfigsRequestResource{resource},
	})
	for i := 0; err == nil && i < len(res.Resources); i++ {
		err = res.Resources[i].Error
	}
	return err
}

// errNotApplied is the error while a broker has not applied a change.
var errNotApplied = errors.New("the broker has not applied the setting yet")

// topicSource is the number in Kafka's protocol for settings of the topic itself.
const topicSource = 1

// hasSetting returns nil if the topic has the value as its own setting, or no own setting if value is empty. Until
// then it returns [errNotApplied].
func hasSetting(ctx context.Context, cl *kafka.Client, topic, setting, value string) error {
	resource := kafka.DescribeConfigRequestResource{
		ResourceType: kafka.ResourceTypeTopic, ResourceName: topic, ConfigNames: []string{setting},
	}
	res, err := cl.DescribeConfigs(ctx, &kafka.DescribeConfigsRequest{
		Resources: []kafka.DescribeConfigRequestResource{resource},
	})
	if err != nil {
		return err
	}

	for _, r := range res.Resources {
		if r.Error != nil {
			return r.Error
		}
		// Other sources are defaults of the brokers.
		for _, c := range r.ConfigEntries {
			own := c.ConfigSource == topicSource
			if own != (value != "") || own && c.ConfigValue != value {
				return fmt.Errorf("%w: it reports %q", errNotApplied, c.ConfigValue)
			}
			return nil
		}
	}
	return fmt.Errorf("topic %s has no setting %s", topic, setting)
}
