package connect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// TopicOrder is a topic that an operator creates, or extends.
type TopicOrder struct {
	Topic string
	// Needed is the number of partitions that the relay needs. A topic that exists with fewer gets them; 0 changes no topic that exists.
	Needed int
	// Earlier is the number of partitions that the topic had when the relay wrote to it. If it was deleted, it gets at least so many again.
	Earlier int
	// Partitions and Replication replace the numbers of topics.create; 0 keeps them. If neither sets a number, the default of the brokers
	// applies.
	Partitions, Replication int
	DryRun                  bool // let a broker check the creation, and create nothing
}

// NewTopic is the result of a [TopicOrder], or with a dry run the expected one.
type NewTopic struct {
	Partitions, Replication int    // 0: the default of the brokers
	Extended                bool   // the topic exists, and has fewer partitions
	Command                 string // of kafka-topics.sh, which does the same
}

// The errors of CreateTopic that callers distinguish. Their texts contain the fix.
var (
	ErrTopicExists    = errors.New("the topic exists already")
	ErrTopicForbidden = errors.New("the Kafka login of the relay may not create or extend the topic")

	errTopicInvalid = errors.New("the topic cannot be created")
)

// CreateTopic creates a topic to which the relay may write, with the settings of topics.create. A topic that exists with fewer partitions than
// the relay needs gets exactly the needed number, because each further partition would move keys.
func (c Cluster) CreateTopic(ctx context.Context, order TopicOrder) (NewTopic, error) {
	how := newTopicCreate(c.cfg, order)
	created := NewTopic{how.Partitions, how.Replication, false, FormatCreation(c.cfg, order.Topic, how)}
	if rejection := routing.CheckTopic(order.Topic, c.cfg.Topics.Allow); rejection != nil {
		return created, fmt.Errorf("%w: %s", errTopicInvalid, rejection.Reason)
	}

	client, err := c.open()
	if err != nil {
		return created, err
	}
	defer client.Close()

	// Kafka reports a topic that exists only to users who may describe it; the others get the error of the creation.
	layout, err := client.Metadata(ctx, []string{order.Topic})
	if err != nil {
		return created, err
	}
	switch existing := len(layout.Topics[order.Topic].Partitions); {
	case existing >= max(order.Needed, 1):
		return created, fmt.Errorf("%w: topic %s", ErrTopicExists, order.Topic)
	case existing > 0:
		err = client.ExtendTopic(ctx, order.Topic, order.Needed, order.DryRun)
		return NewTopic{order.Needed, 0, true, formatExtension(c.cfg, order.Topic, order.Needed)}, explainCreation(c.cfg, order.Topic, "ALTER", err)
	}

	// With fewer partitions, events of a key would follow in another partition.
	if order.Partitions > 0 && order.Partitions < order.Earlier {
		return created, fmt.Errorf("%w with %d partitions: the relay wrote to %d partitions of topic %s before it was deleted; use at least so many",
			errTopicInvalid, order.Partitions, order.Earlier, order.Topic)
	}
	if order.DryRun {
		err = client.ValidateTopic(ctx, order.Topic, how)
	} else {
		err = client.CreateTopic(ctx, order.Topic, how)
	}
	return created, explainCreation(c.cfg, order.Topic, "CREATE", err)
}

// newTopicCreate returns the settings of a new topic.
func newTopicCreate(cfg config.Config, order TopicOrder) (how kafkawire.TopicCreate) {
	if create := cfg.Topics.Create; create != nil {
		how = kafkawire.TopicCreate{Partitions: create.Partitions, Replication: create.Replication, Configs: create.Configs}
	}
	if order.Partitions > 0 {
		how.Partitions = order.Partitions
	}
	how.Partitions = max(how.Partitions, order.Needed, order.Earlier)
	if order.Replication > 0 {
		how.Replication = order.Replication
	}
	return how
}

// explainCreation returns the error of a creation or extension with its fix. operation is the right that it needs.
func explainCreation(cfg config.Config, topic, operation string, err error) error {
	switch code, known := errors.AsType[kafkawire.Code](err); {
	case err == nil || !known:
		return err
	case code == kafkawire.TopicAuthorizationFailed || code == kafkawire.ClusterAuthorizationFailed:
		return fmt.Errorf("%w %s: %w; as an administrator, run: kafka-acls.sh --bootstrap-server %s --add --allow-principal '%s' --operation %s --topic '%s'",
			ErrTopicForbidden, topic, code, strings.Join(cfg.Kafka.Brokers, ","), Principal(cfg), operation, topic)
	default:
		return fmt.Errorf("%w: %s", errTopicInvalid, kafkawire.ExplainTopic(topic, err).Text())
	}
}

// Principal returns the name of the relay's login in ACLs, for the fix of a problem. It is a placeholder if the configuration does not
// contain the name.
func Principal(cfg config.Config) string {
	return cmp.Or(ConfiguredPrincipal(cfg), "User:<the relay's user>")
}

// ConfiguredPrincipal returns the name of the relay's login in ACLs, or "" if the configuration does not contain it: only a login by SASL
// has its name there.
func ConfiguredPrincipal(cfg config.Config) string {
	if sasl := cfg.Kafka.SASL; sasl != nil && sasl.Username != "" {
		return "User:" + sasl.Username
	}
	return ""
}

// FormatCommand returns the command of kafka-topics.sh that ends the obstacle of a topic: it adds partitions to a too small topic, and creates
// another one with the settings of topics.create. The topic gets the given number of partitions unless that is 0.
func (c Cluster) FormatCommand(topic, kind string, partitions int) string {
	if kind == kafkawire.TopicTooSmall {
		return formatExtension(c.cfg, topic, partitions)
	}
	return FormatCreation(c.cfg, topic, newTopicCreate(c.cfg, TopicOrder{Partitions: partitions}))
}

// formatExtension returns the command of kafka-topics.sh that adds partitions to the topic until it has the given number.
func formatExtension(cfg config.Config, topic string, partitions int) string {
	return fmt.Sprintf("kafka-topics.sh --bootstrap-server %s --alter --topic %s --partitions %d", strings.Join(cfg.Kafka.Brokers, ","), topic, partitions)
}

// FormatCreation returns the command of kafka-topics.sh that creates the topic. A number of 0 leaves the choice to the brokers.
func FormatCreation(cfg config.Config, topic string, how kafkawire.TopicCreate) string {
	command := fmt.Sprintf("kafka-topics.sh --bootstrap-server %s --create --topic %s", strings.Join(cfg.Kafka.Brokers, ","), topic)
	if how.Partitions > 0 {
		command += fmt.Sprintf(" --partitions %d", how.Partitions)
	}
	if how.Replication > 0 {
		command += fmt.Sprintf(" --replication-factor %d", how.Replication)
	}
	for _, name := range slices.Sorted(maps.Keys(how.Configs)) {
		command += fmt.Sprintf(" --config '%s=%s'", name, how.Configs[name])
	}
	return command
}
