package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/connect"
)

// The bounds of the checks of Kafka.
const (
	topicsMost    = 300 // topics that are looked at
	validatedMost = 20  // missing topics whose creation is validated
	fixesMost     = 6   // statements of one finding
	namesMost     = 5   // names in a sentence
	kafkaTimeout  = 8 * time.Second
)

// topicFacts are the topics that the relay writes, and the results of their checks.
type topicFacts struct {
	names   []string // sorted, at most topicsMost
	brokers int
	present []string // the existing topics
	layout  *kafkawire.Layout
	configs map[string]kafkawire.TopicConfig // of the topics that the user may describe
}

func (t *topicFacts) addTopic(name string) {
	if i, found := slices.BinarySearch(t.names, name); !found && len(t.names) < topicsMost {
		t.names = slices.Insert(t.names, i, name)
	}
}

// topicChecks check the topics that the relay writes.
type topicChecks struct{ *examination }

// checkTopicsExist waits until the topics are known, and reads their metadata.
func (x topicChecks) checkTopicsExist(ctx context.Context) finding {
	// Topics that depend on envelopes are known after the checks of MongoDB.
	select {
	case <-x.sampled:
	case <-ctx.Done():
		return unchecked("", "the topics are not known yet")
	}

	facts, sampled := &x.topics, x.findingOf("topics")
	switch {
	// A topic that cannot be derived is a finding of the earlier check, which is not repeated here.
	case sampled.root != "":
		return blockedBy(sampled.root)
	case len(facts.names) == 0 && sampled.status != OK:
		return blockedBy("topics")
	case len(facts.names) == 0:
		return passed("no topic is known yet")
	}

	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	var err error
	if facts.layout, err = x.brokers.Metadata(call, facts.names); err != nil {
		finding := unchecked("", "Kafka returns: %v", err)
		finding.root = "topics.exist"
		return finding
	}

	var missing, hidden, leaderless, odd []string
	for _, name := range facts.names {
		topic := facts.layout.Topics[name]
		switch {
		case errors.Is(topic.Err, kafkawire.UnknownTopicOrPartition):
			missing = append(missing, name)
			continue
		case errors.Is(topic.Err, kafkawire.TopicAuthorizationFailed):
			// Kafka does not show whether such a topic exists.
			hidden = append(hidden, name)
			continue
		case topic.Err != nil:
			odd = append(odd, kafkawire.ExplainTopic(name, topic.Err).Text())
			continue
		}

		facts.present = append(facts.present, name)
		if slices.ContainsFunc(topic.Partitions, func(layout kafkawire.PartitionLayout) bool { return layout.Leader < 0 }) {
			leaderless = append(leaderless, name)
		}
	}

	switch {
	case len(odd) > 0:
		return failed("check the topics: kafka-topics.sh "+x.bootstrapFlag()+" --describe", "%s", joinFew(odd, 3))
	case len(leaderless) > 0:
		return failed(fmt.Sprintf("start the brokers that hold their replicas: kafka-topics.sh %s --describe --unavailable-partitions", x.bootstrapFlag()),
			"partitions without a leader: %s", joinFew(leaderless, namesMost))
	case len(missing) > 0:
		return x.checkCreation(call, missing)
	case len(hidden) > 0:
		return unchecked("", "the user lacks DESCRIBE on topics: %s", joinFew(hidden, namesMost))
	}
	return passed("%s", joinFew(facts.present, namesMost))
}

// checkCreation checks whether the relay can create the missing topics.
func (x topicChecks) checkCreation(ctx context.Context, missing []string) finding {
	how := x.cfg.Topics.Create
	if how == nil {
		var fixes []string
		for _, name := range missing {
			fixes = append(fixes, connect.FormatCreation(x.cfg, name, kafkawire.TopicCreate{Partitions: 6, Replication: min(3, max(x.topics.brokers, 1))}))
		}

		return failed(joinLines(fixes, fixesMost)+"\nor set topics.create in the configuration", "missing: %s",
			joinFew(missing, namesMost))
	}

	var rejected []string
	// Each topic costs a request, so only the first ones are validated.
	for _, name := range missing[:min(len(missing), validatedMost)] {
		err := x.brokers.ValidateTopic(ctx, name, topicCreation(how))
		switch {
		case errors.Is(err, kafkawire.TopicAuthorizationFailed):
			rejected = append(rejected, fmt.Sprintf("the user may not create topic %q", name))
		case err != nil:
			rejected = append(rejected, kafkawire.ExplainTopic(name, err).Text())
		}
	}

	if len(rejected) > 0 {
		return failed(fmt.Sprintf("correct topics.create, or: kafka-acls.sh %s --add --allow-principal %s --operation CREATE --cluster", x.bootstrapFlag(), connect.Principal(x.cfg)),
			"missing, and cannot be created: %s", joinFew(rejected, 3))
	}
	return passed("missing, and will be created: %s", joinFew(missing, namesMost))
}

// checkACLs checks the operations that the user may perform on each topic.
func (x topicChecks) checkACLs(ctx context.Context) finding {
	// Kafka returns no operations for a topic that does not exist.
	names := slices.DeleteFunc(slices.Clone(x.topics.names), func(name string) bool {
		return errors.Is(x.topics.layout.Topics[name].Err, kafkawire.UnknownTopicOrPartition)
	})
	if len(names) == 0 {
		return passed("no topic exists yet")
	}

	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	allowed, err := x.brokers.Authorized(call, names)
	if errors.Is(err, kafkawire.ErrOperationsUnknown) {
		return unchecked("", "the brokers do not return ACLs; Kafka 2.3 or later does")
	}
	if err != nil {
		return unchecked("", "Kafka returns: %v", err)
	}

	var said, fixes []string
	for _, name := range names {
		var missing []string
		for _, op := range kafkawire.TopicOperations() {
			if !slices.Contains(allowed[name], op) {
				missing = append(missing, string(op))
			}
		}

		if len(missing) > 0 {
			said = append(said, fmt.Sprintf("%s on %s", strings.Join(missing, ", "), name))
			fixes = append(fixes,
				fmt.Sprintf("kafka-acls.sh %s --add --allow-principal %s --operation %s --topic %s", x.bootstrapFlag(), connect.Principal(x.cfg), strings.Join(missing, " --operation "), name))
		}
	}

	if len(said) > 0 {
		return failed(joinLines(fixes, fixesMost), "missing: %s", joinFew(said, namesMost))
	}
	return passed("WRITE, READ, DESCRIBE, DESCRIBE_CONFIGS on %s", joinFew(names, namesMost))
}

func (x topicChecks) checkReplication(context.Context) finding {
	var single, behind []string
	for _, name := range x.topics.present {
		parts := x.topics.layout.Topics[name].Partitions
		switch {
		case slices.ContainsFunc(parts, func(layout kafkawire.PartitionLayout) bool { return layout.Replicas < 2 }):
			single = append(single, name)
		case slices.ContainsFunc(parts, func(layout kafkawire.PartitionLayout) bool { return layout.ISR < layout.Replicas }):
			behind = append(behind, name)
		}
	}

	switch {
	case len(single) > 0:
		return warned(fmt.Sprintf("kafka-reassign-partitions.sh %s --execute --reassignment-json-file <plan with 3 replicas>", x.bootstrapFlag()),
			"one replica: %s", joinFew(single, namesMost))
	case len(behind) > 0:
		return warned(fmt.Sprintf("start the missing broker; to find it: kafka-topics.sh %s --describe --under-replicated-partitions", x.bootstrapFlag()),
			"replicas out of sync: %s", joinFew(behind, namesMost))
	}
	return x.goodTopics("replicated and in sync")
}

// goodTopics is the finding of a check that all existing topics pass.
func (x topicChecks) goodTopics(what string) finding {
	if len(x.topics.present) == 0 {
		return passed("no topic exists yet")
	}
	return passed("%s: %s", what, joinFew(x.topics.present, namesMost))
}

// readConfigs reads the configurations of the topics once, for all checks of settings.
func (x topicChecks) readConfigs(ctx context.Context) {
	if x.topics.configs != nil || len(x.topics.present) == 0 {
		return
	}
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	configs, err := x.brokers.DescribeTopics(call, x.topics.present)
	if err != nil || configs == nil {
		configs = map[string]kafkawire.TopicConfig{}
	}
	x.topics.configs = configs
}

// checkSetting checks one setting of every topic. bad returns the problem of a topic, or "". Setting
// key to value fixes it.
func (x topicChecks) checkSetting(ctx context.Context, good, key, value string, bad func(name string, cfg kafkawire.TopicConfig) string) finding {
	x.readConfigs(ctx)
	if len(x.topics.present) > 0 && len(x.topics.configs) == 0 {
		return unchecked("grant DESCRIBE_CONFIGS on the topics", "the user may not read the topics' configurations")
	}

	var said, fixes []string
	for _, name := range slices.Sorted(maps.Keys(x.topics.configs)) {
		if why := bad(name, x.topics.configs[name]); why != "" {
			said = append(said, fmt.Sprintf("%s: %s", name, why))
			fixes = append(fixes,
				fmt.Sprintf("kafka-configs.sh %s --alter --entity-type topics --entity-name %s --add-config %s=%s", x.bootstrapFlag(), name, key, value))
		}
	}

	if len(said) > 0 {
		return warned(joinLines(fixes, fixesMost), "%s", joinFew(said, namesMost))
	}
	return x.goodTopics(good)
}

func (x topicChecks) checkMinISR(ctx context.Context) finding {
	impossible, single := false, false
	finding := x.checkSetting(ctx, "at least 2", "min.insync.replicas", "2", func(name string, cfg kafkawire.TopicConfig) string {
		parts := x.topics.layout.Topics[name].Partitions
		if slices.ContainsFunc(parts, func(layout kafkawire.PartitionLayout) bool { return layout.Replicas < cfg.MinISR }) {
			impossible = true
			return fmt.Sprintf("min.insync.replicas is %d, above the number of replicas: writes fail", cfg.MinISR)
		}

		// With one replica, a setting of 2 would make every write fail.
		single = single || slices.ContainsFunc(parts, func(layout kafkawire.PartitionLayout) bool { return layout.Replicas < 2 })
		if cfg.MinISR < 2 {
			return fmt.Sprintf("min.insync.replicas is %d", cfg.MinISR)
		}
		return ""
	})

	// The usual fix would make the problem of such a topic worse.
	switch {
	case impossible:
		finding.status = Fail
		finding.fix = "raise the number of replicas, or lower min.insync.replicas:\n" + strings.ReplaceAll(finding.fix, "min.insync.replicas=2", "min.insync.replicas=<replicas - 1>")
	case single && finding.status == Warn:
		finding.fix = "first give the topics more than one replica, otherwise writes fail; then:\n" + finding.fix
	}
	return finding
}

func (x topicChecks) checkUncleanElection(ctx context.Context) finding {
	return x.checkSetting(ctx, "off", "unclean.leader.election.enable", "false", func(_ string, cfg kafkawire.TopicConfig) string {
		if cfg.UncleanElection {
			return "unclean.leader.election.enable is true"
		}
		return ""
	})
}

func (x topicChecks) checkMaxBytes(ctx context.Context) finding {
	most := int(x.cfg.Limits.Envelope)
	return x.checkSetting(ctx, fmt.Sprintf("above limits.envelope, %s", x.cfg.Limits.Envelope), "max.message.bytes", fmt.Sprint(most+recordOverhead), func(_ string, cfg kafkawire.TopicConfig) string {
		if cfg.MaxMessageBytes < most {
			return fmt.Sprintf("max.message.bytes is %d, below limits.envelope, %d", cfg.MaxMessageBytes, most)
		}
		return ""
	})
}

// recordOverhead is an upper bound of the bytes that a record adds to its payload and headers.
const recordOverhead = 4 << 10

// checkCleanupPolicy finds compacted topics. N10
func (x topicChecks) checkCleanupPolicy(ctx context.Context) finding {
	finding := x.checkSetting(ctx, "not compacted", "cleanup.policy", "delete", func(_ string, cfg kafkawire.TopicConfig) string {
		if cfg.Compacted() {
			return "cleanup.policy is " + cfg.CleanupPolicy
		}
		return ""
	})
	if finding.status == Warn && finding.fix != "" {
		finding.fix = "if compaction is not intended:\n" + finding.fix
	}
	return finding
}
