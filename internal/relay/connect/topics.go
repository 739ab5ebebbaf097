package connect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// TopicOrder is a topic that an operator creates.
type TopicOrder struct {
	Topic string
	// Partitions and Replication replace the numbers of topics.create; 0 keeps them. If neither sets a number, the default of the brokers
	// applies.
	Partitions, Replication int
	DryRun                  bool // let a broker check the creation, and create nothing
}

// NewTopic is the result of a [TopicOrder], or with a dry run the expected one.
type NewTopic struct {
	Partitions, Replication int    // 0: the default of the brokers
	Command                 string // of kafka-topics.sh, which does the same
}

// The errors of CreateTopic that callers distinguish. Their texts contain the fix.
var (
	ErrTopicExists    = errors.New("the topic exists already")
	ErrTopicForbidden = errors.New("the Kafka login of the relay may not create the topic")

	errTopicInvalid = errors.New("the topic cannot be created")
)

// topicName matches the names that Kafka accepts.
var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

// CreateTopic creates a topic to which the relay may write, with the settings of topics.create. It connects to Kafka for the call.
func CreateTopic(ctx context.Context, cfg config.Config, host KafkaHost, order TopicOrder) (NewTopic, error) {
	how := newTopicCreate(cfg, order)
	created := NewTopic{how.Partitions, how.Replication, FormatCreation(cfg, order.Topic, how)}
	if err := checkTopicName(cfg, order.Topic); err != nil {
		return created, err
	}

	client, err := NewKafka(cfg, host, slog.New(slog.DiscardHandler), metrics.New(""))
	if err != nil {
		return created, err
	}
	defer client.Close()

	// Kafka reports a topic that exists only to users who may describe it; the others get the error of the creation.
	layout, err := client.Metadata(ctx, []string{order.Topic})
	if err != nil {
		return created, err
	}
	if len(layout.Topics[order.Topic].Partitions) > 0 {
		return created, fmt.Errorf("%w: topic %s", ErrTopicExists, order.Topic)
	}

	if order.DryRun {
		err = client.ValidateTopic(ctx, order.Topic, how)
	} else {
		err = client.CreateTopic(ctx, order.Topic, how)
	}
	return created, explainCreation(cfg, order.Topic, err)
}

// newTopicCreate returns the settings of a new topic.
func newTopicCreate(cfg config.Config, order TopicOrder) (how kafkawire.TopicCreate) {
	if create := cfg.Topics.Create; create != nil {
		how = kafkawire.TopicCreate{Partitions: create.Partitions, Replication: create.Replication, Configs: create.Configs}
	}
	if order.Partitions > 0 {
		how.Partitions = order.Partitions
	}
	if order.Replication > 0 {
		how.Replication = order.Replication
	}
	return how
}

// checkTopicName returns an error unless the relay may write to a topic with this name.
func checkTopicName(cfg config.Config, topic string) error {
	isAllowed := func(pattern string) bool { return glob.Match(pattern, topic) }
	switch {
	case !topicName.MatchString(topic) || topic == "." || topic == "..":
		return fmt.Errorf("%w: %q is no name of a topic; use 1 to 249 of the characters a-z, A-Z, 0-9, dot, underscore and hyphen", errTopicInvalid, topic)
	case strings.HasPrefix(topic, "__"):
		return fmt.Errorf("%w: topics whose names begin with two underscores belong to Kafka; choose another name", errTopicInvalid)
	case len(cfg.Topics.Allow) > 0 && !slices.ContainsFunc(cfg.Topics.Allow, isAllowed):
		return fmt.Errorf("%w: topics.allow does not contain %s, so the relay never writes to it; add it to topics.allow first", errTopicInvalid, topic)
	}
	return nil
}

// explainCreation returns the error of a creation with its fix.
func explainCreation(cfg config.Config, topic string, err error) error {
	switch code, known := errors.AsType[kafkawire.Code](err); {
	case err == nil || !known:
		return err
	case code == kafkawire.TopicAuthorizationFailed || code == kafkawire.ClusterAuthorizationFailed:
		return fmt.Errorf("%w %s: %w; as an administrator, run: kafka-acls.sh --bootstrap-server %s --add --allow-principal '%s' --operation CREATE --topic '%s'",
			ErrTopicForbidden, topic, code, strings.Join(cfg.Kafka.Brokers, ","), Principal(cfg), topic)
	default:
		return fmt.Errorf("%w: %s", errTopicInvalid, kafkawire.ExplainTopic(topic, err, false).Text)
	}
}

// Principal returns the name of the relay's login in ACLs, or a placeholder if the configuration does not contain it.
func Principal(cfg config.Config) string {
	if sasl := cfg.Kafka.SASL; sasl != nil && sasl.Username != "" {
		return "User:" + sasl.Username
	}
	return "User:<the relay's user>"
}

// FormatTopicCommand returns the command of kafka-topics.sh that creates the topic with the settings of topics.create.
func FormatTopicCommand(cfg config.Config, topic string) string {
	return FormatCreation(cfg, topic, newTopicCreate(cfg, TopicOrder{}))
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
