package devstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"
)

// checkBroker is nil once the broker at addr answers, sees at least n live brokers and, with an id
// above 0, itself among them.
func checkBroker(ctx context.Context, addr string, id, n int) error {
	conn, err := (&kafka.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if d, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(d)
	}
	brokers, err := conn.Brokers()
	if err != nil {
		return err
	}
	if len(brokers) < n {
		return fmt.Errorf("knows %d of %d brokers", len(brokers), n)
	}
	if id > 0 && !slices.ContainsFunc(brokers, func(b kafka.Broker) bool { return b.ID == id }) {
		return fmt.Errorf("broker %d is not part of the cluster yet", id)
	}
	return nil
}

// newClient talks to the brokers over their plain listeners; the returned function ends it.
func (s *Stack) newClient() (*kafka.Client, func()) {
	tr := &kafka.Transport{MetadataTTL: 100 * time.Millisecond}
	return &kafka.Client{Addr: kafka.TCP(s.Brokers()...), Transport: tr, Timeout: 10 * time.Second}, tr.CloseIdleConnections
}

// readPartition is the cluster's present view of one partition.
func readPartition(ctx context.Context, cl *kafka.Client, topic string, p int) (kafka.Partition, error) {
	res, err := cl.Metadata(ctx, &kafka.MetadataRequest{Topics: []string{topic}})
	if err != nil {
		return kafka.Partition{}, fmt.Errorf("asking for topic %s: %w", topic, err)
	}
	for _, t := range res.Topics {
		if t.Error != nil {
			return kafka.Partition{}, fmt.Errorf("topic %s: %w", topic, t.Error)
		}
		for _, q := range t.Partitions {
			if q.ID == p {
				return q, nil
			}
		}
	}
	return kafka.Partition{}, fmt.Errorf("topic %s has no partition %d", topic, p)
}

// retryFor is how long brokers that do not answer are asked for a partition, each time over a connection of its own.
const retryFor = time.Minute

// readPartitionRetrying is partition, again where a broker does not answer in time, as on a machine with much else to do.
func (s *Stack) readPartitionRetrying(ctx context.Context, topic string, p int) (kafka.Partition, error) {
	ctx, cancel := context.WithTimeout(ctx, retryFor)
	defer cancel()
	var q kafka.Partition
	err := retryWhile(ctx, func() (err error) {
		cl, done := s.newClient()
		defer done()
		q, err = readPartition(ctx, cl, topic, p)
		return err
	}, isTransient)
	return q, err
}

// isTransient reports whether it is worth asking again: a broker was slow, or does not know its controller yet.
func isTransient(err error) bool {
	var slow net.Error
	return errors.As(err, &slow) && slow.Timeout() || isAway(err)
}

// isAway is what brokers answer that have just started, or were away, and do not know their controller yet.
func isAway(err error) bool { return errors.Is(err, kafka.BrokerNotAvailable) }

// retryWhile calls do until it has no error that passes, or ctx ends, and returns its last one.
func retryWhile(ctx context.Context, do func() error, passes func(error) bool) error {
	for {
		err := do()
		if err == nil || !passes(err) || !waited(ctx, tailRetry) {
			return err
		}
	}
}

// Leader is the broker that leads the partition; an error while there is none.
func (s *Stack) Leader(ctx context.Context, topic string, p int) (*Member, error) {
	q, err := s.readPartitionRetrying(ctx, topic, p)
	if err != nil {
		return nil, err
	}
	if m := s.brokerByID(q.Leader.ID); m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("partition %s/%d has no leader", topic, p)
}

// MoveLeader makes a broker the leader of a partition of which it is a live replica, or makes it a
// replica in place of the leader first. It returns when the cluster says so.
func (s *Stack) MoveLeader(ctx context.Context, topic string, p, to int) error {
	q, err := s.readPartitionRetrying(ctx, topic, p)
	if err != nil {
		return err
	}
	cl, done := s.newClient()
	defer done()
	order := []int{to}
	for _, r := range q.Replicas {
		if r.ID != to && len(order) < len(q.Replicas) {
			order = append(order, r.ID)
		}
	}
	moved, err := cl.AlterPartitionReassignments(ctx, &kafka.AlterPartitionReassignmentsRequest{
		Topic: topic, Timeout: 10 * time.Second,
		Assignments: []kafka.AlterPartitionReassignmentsRequestAssignment{{PartitionID: p, BrokerIDs: order}},
	})
	if err == nil {
		err = moved.Error
	}
	if err == nil && len(moved.PartitionResults) > 0 {
		err = moved.PartitionResults[0].Error
	}
	if err != nil {
		return fmt.Errorf("reassigning %s/%d to %v: %w", topic, p, order, err)
	}
	return awaitLeader(ctx, cl, topic, p, to)
}

// awaitLeader asks for the preferred leader until it leads: the election is refused while the new
// replica is not in sync.
func awaitLeader(ctx context.Context, cl *kafka.Client, topic string, p, to int) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := cl.ElectLeaders(ctx, &kafka.ElectLeadersRequest{Topic: topic, Partitions: []int{p}, Timeout: 5 * time.Second})
		if q, qerr := readPartition(ctx, cl, topic, p); qerr == nil && q.Leader.ID == to {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("broker %d does not lead %s/%d: %w (last answer: %w)", to, topic, p, context.Cause(ctx), err)
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

// SetTopic changes one setting of a topic, by Kafka's name for it; an empty value takes the brokers' default again. It
// returns when a broker says that it has the change.
func (s *Stack) SetTopic(ctx context.Context, topic, setting, value string) error {
	ctx, cancel := context.WithTimeout(ctx, retryFor)
	defer cancel()
	err := retryWhile(ctx, func() error {
		cl, done := s.newClient()
		defer done()
		return alterTopic(ctx, cl, topic, setting, value)
	}, isTransient)
	if err == nil {
		err = retryWhile(ctx, func() error {
			cl, done := s.newClient()
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
	res, err := cl.IncrementalAlterConfigs(ctx, &kafka.IncrementalAlterConfigsRequest{Resources: []kafka.IncrementalAlterConfigsRequestResource{{
		ResourceType: kafka.ResourceTypeTopic, ResourceName: topic,
		Configs: []kafka.IncrementalAlterConfigsRequestConfig{{Name: setting, Value: value, ConfigOperation: op}},
	}}})
	for i := 0; err == nil && i < len(res.Resources); i++ {
		err = res.Resources[i].Error
	}
	return err
}

// errNotApplied says that a broker has not heard of a change.
var errNotApplied = errors.New("the broker that was asked does not have it yet")

// topicSource is the source of a setting that the topic has of its own, as Kafka's protocol numbers them.
const topicSource = 1

// hasSetting is [errNotApplied] while the topic has another value of its own, or has one although value is empty.
func hasSetting(ctx context.Context, cl *kafka.Client, topic, setting, value string) error {
	res, err := cl.DescribeConfigs(ctx, &kafka.DescribeConfigsRequest{Resources: []kafka.DescribeConfigRequestResource{{
		ResourceType: kafka.ResourceTypeTopic, ResourceName: topic, ConfigNames: []string{setting},
	}}})
	if err != nil {
		return err
	}
	for _, r := range res.Resources {
		if r.Error != nil {
			return r.Error
		}
		for _, c := range r.ConfigEntries {
			if own := c.ConfigSource == topicSource; own != (value != "") || own && c.ConfigValue != value {
				return fmt.Errorf("%w: it says %q", errNotApplied, c.ConfigValue)
			}
			return nil
		}
	}
	return fmt.Errorf("topic %s has no setting %s", topic, setting)
}
