package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/sink"
)

// The bounds of what is asked for.
const (
	topicsMost    = 300 // topics that are looked at
	validatedMost = 20  // missing topics whose creation is validated
	fixesMost     = 6   // statements of one finding
	namesMost     = 5   // names in a sentence
	kafkaTimeout  = 8 * time.Second
)

// topicFacts are the targets and what is known of them.
type topicFacts struct {
	names   []string // sorted, at most topicsMost
	brokers int
	present []string // those that exist
	layout  *kafkawire.Layout
	configs map[string]kafkawire.TopicConfig // of those that may be described
}

func (t *topicFacts) add(name string) {
	if i, found := slices.BinarySearch(t.names, name); !found && len(t.names) < topicsMost {
		t.names = slices.Insert(t.names, i, name)
	}
}

func (x *examination) bootstrap() string {
	return "--bootstrap-server " + strings.Join(x.cfg.Kafka.Brokers, ",")
}

func (x *examination) principal() string {
	if s := x.cfg.Kafka.SASL; s != nil {
		return "User:" + s.Username
	}
	return "User:<the relay's user>"
}

func (x *examination) reachKafka(ctx context.Context) finding {
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	err := x.brokers.Diagnose(call)
	if err == nil {
		return fine("%s answers", strings.Join(x.cfg.Kafka.Brokers, ","))
	}
	if call.Err() != nil {
		return failed("correct kafka.brokers, or open the way through firewalls and network policies", "nobody answers in time at %s", x.brokers)
	}
	said, fixes := diagnoses(err)
	if len(said) == 0 {
		return failed("check kafka in the configuration", "%v", err)
	}
	return failed(lines(fixes, 3), "%s", few(said, 3))
}

// diagnoses takes a joined error of several brokers apart.
func diagnoses(err error) (said, fixes []string) {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			s, f := diagnoses(one)
			said, fixes = append(said, s...), append(fixes, f...)
		}
		slices.Sort(fixes)
		return said, slices.Compact(fixes)
	}
	if d, ok := errors.AsType[*kafkawire.Diagnosis](err); ok {
		return []string{fmt.Sprintf("%s: %s (tried %s)", d.Broker, d.Text, d.Tried)}, []string{d.Fix}
	}
	return nil, nil
}

func (x *examination) countBrokers(ctx context.Context) finding {
	n, err := x.brokers.Health(ctx)
	if err != nil {
		return unchecked("", "Kafka answers: %v", err)
	}
	x.topics.brokers = n
	if n == 1 {
		return warned("add brokers, up to three, and raise the replication of the topics", "the cluster has one broker")
	}
	return fine("%d brokers", n)
}

// transactionalID uses an id of the doctor's own below the prefix that the ACL has to allow: the relay's is in use. Runs
// for one watcher share it, so that they do not pile up ids.
func (x *examination) transactionalID(ctx context.Context) finding {
	id := "outrelay.doctor." + x.cfg.Watcher
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	err := fence.NewClient(x.brokers).TryTransactionalID(call, id)
	switch {
	case errors.Is(err, fence.ErrIDForbidden):
		return failed(fmt.Sprintf("kafka-acls.sh %s --add --allow-principal %s --operation WRITE --operation DESCRIBE --transactional-id outrelay. --resource-pattern-type prefixed", x.bootstrap(), x.principal()),
			"missing: WRITE or DESCRIBE on transactional ids that begin with outrelay.")
	case err != nil:
		return failed("look at the brokers: the topic __transaction_state needs a leader for each partition, and as many replicas as its min.insync.replicas", "%s cannot be initialised: %v", id, err)
	}
	return fine("ids that begin with outrelay. may be used")
}

// existence waits for the topics to be known, and asks for all of them.
func (x *examination) existence(ctx context.Context) finding {
	select {
	case <-x.sampled:
	case <-ctx.Done():
		f := unchecked("", "the topics are not known yet")
		f.root = "mongodb"
		return f
	}
	t, sampled := &x.topics, x.earlier("topics")
	switch {
	case sampled.root != "":
		return because(sampled.root)
	case len(t.names) == 0 && sampled.status != OK:
		return because("topics")
	case len(t.names) == 0:
		return fine("no topic is known yet")
	}
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	var err error
	if t.layout, err = x.brokers.Metadata(call, t.names); err != nil {
		f := unchecked("", "Kafka answers: %v", err)
		f.root = "topics.exist"
		return f
	}
	var missing, hidden, leaderless, odd []string
	for _, name := range t.names {
		topic := t.layout.Topics[name]
		switch {
		case kafkawire.IsMissing(topic.Err):
			missing = append(missing, name)
			continue
		case kafkawire.IsForbidden(topic.Err):
			hidden = append(hidden, name)
			continue
		case topic.Err != nil:
			odd = append(odd, sink.TopicRefusal(name, topic.Err, false))
			continue
		}
		t.present = append(t.present, name)
		if slices.ContainsFunc(topic.Partitions, func(p kafkawire.PartitionLayout) bool { return p.Leader < 0 }) {
			leaderless = append(leaderless, name)
		}
	}
	switch {
	case len(odd) > 0:
		return failed("look at the topics: kafka-topics.sh "+x.bootstrap()+" --describe", "%s", few(odd, 3))
	case len(leaderless) > 0:
		return failed(fmt.Sprintf("start the brokers that hold their replicas: kafka-topics.sh %s --describe --unavailable-partitions", x.bootstrap()), "partitions without a leader: %s", few(leaderless, namesMost))
	case len(missing) > 0:
		return x.creation(call, missing)
	case len(hidden) > 0:
		return unchecked("", "these topics may not be described: %s", few(hidden, namesMost))
	}
	return fine("%s", few(t.present, namesMost))
}

// creation judges missing topics: they may be created on demand, or not at all.
func (x *examination) creation(ctx context.Context, missing []string) finding {
	how := x.cfg.Topics.Create
	if how == nil {
		var fixes []string
		for _, name := range missing {
			fixes = append(fixes, fmt.Sprintf("kafka-topics.sh %s --create --topic %s --partitions 6 --replication-factor %d", x.bootstrap(), name, min(3, max(x.topics.brokers, 1))))
		}
		return failed(lines(fixes, fixesMost)+"\nor set topics.create in the configuration", "missing: %s", few(missing, namesMost))
	}
	var refused []string
	for _, name := range missing[:min(len(missing), validatedMost)] {
		err := x.brokers.ValidateTopic(ctx, name, kafkawire.TopicCreate{Partitions: max(how.Partitions, 0), Replication: max(how.Replication, 0), Configs: how.Configs})
		switch {
		case kafkawire.IsForbidden(err):
			refused = append(refused, fmt.Sprintf("this user may not create topic %q", name))
		case err != nil:
			refused = append(refused, sink.TopicRefusal(name, err, true))
		}
	}
	if len(refused) > 0 {
		return failed(fmt.Sprintf("correct topics.create, or: kafka-acls.sh %s --add --allow-principal %s --operation CREATE --cluster", x.bootstrap(), x.principal()), "missing, and cannot be created: %s", few(refused, 3))
	}
	return fine("missing, and will be created: %s", few(missing, namesMost))
}

// permissions asks what the user may do with each topic.
func (x *examination) permissions(ctx context.Context) finding {
	names := slices.DeleteFunc(slices.Clone(x.topics.names), func(name string) bool {
		return kafkawire.IsMissing(x.topics.layout.Topics[name].Err)
	})
	if len(names) == 0 {
		return fine("there is no topic to ask for")
	}
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	allowed, err := x.brokers.Authorized(call, names)
	if errors.Is(err, kafkawire.ErrOperationsUnknown) {
		return unchecked("", "the brokers are too old to tell (2.3 or later does)")
	}
	if err != nil {
		return unchecked("", "Kafka answers: %v", err)
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
			fixes = append(fixes, fmt.Sprintf("kafka-acls.sh %s --add --allow-principal %s --operation %s --topic %s", x.bootstrap(), x.principal(), strings.Join(missing, " --operation "), name))
		}
	}
	if len(said) > 0 {
		return failed(lines(fixes, fixesMost), "missing: %s", few(said, namesMost))
	}
	return fine("WRITE, READ, DESCRIBE, DESCRIBE_CONFIGS on %s", few(names, namesMost))
}

func (x *examination) replication(context.Context) finding {
	var single, behind []string
	for _, name := range x.topics.present {
		parts := x.topics.layout.Topics[name].Partitions
		switch {
		case slices.ContainsFunc(parts, func(p kafkawire.PartitionLayout) bool { return p.Replicas < 2 }):
			single = append(single, name)
		case slices.ContainsFunc(parts, func(p kafkawire.PartitionLayout) bool { return p.ISR < p.Replicas }):
			behind = append(behind, name)
		}
	}
	switch {
	case len(single) > 0:
		return warned(fmt.Sprintf("kafka-reassign-partitions.sh %s --execute --reassignment-json-file <plan with 3 replicas>", x.bootstrap()), "one replica: %s", few(single, namesMost))
	case len(behind) > 0:
		return warned(fmt.Sprintf("look for the broker that is away: kafka-topics.sh %s --describe --under-replicated-partitions", x.bootstrap()), "replicas that lag behind: %s", few(behind, namesMost))
	}
	return x.ofPresent("replicated and in sync")
}

// ofPresent is the good finding of a check of all topics that are there.
func (x *examination) ofPresent(what string) finding {
	if len(x.topics.present) == 0 {
		return fine("there is no topic to look at")
	}
	return fine("%s: %s", what, few(x.topics.present, namesMost))
}

// describe reads the configurations once, for the checks of settings.
func (x *examination) describe(ctx context.Context) {
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

// setting judges one setting of every topic; bad describes what is wrong, or is "", and key=value mends it.
func (x *examination) setting(ctx context.Context, good, key, value string, bad func(name string, c kafkawire.TopicConfig) string) finding {
	x.describe(ctx)
	if len(x.topics.present) > 0 && len(x.topics.configs) == 0 {
		return unchecked("grant DESCRIBE_CONFIGS on the topics", "the topics' configurations may not be read")
	}
	var said, fixes []string
	for _, name := range slices.Sorted(maps.Keys(x.topics.configs)) {
		if why := bad(name, x.topics.configs[name]); why != "" {
			said = append(said, fmt.Sprintf("%s: %s", name, why))
			fixes = append(fixes, fmt.Sprintf("kafka-configs.sh %s --alter --entity-type topics --entity-name %s --add-config %s=%s", x.bootstrap(), name, key, value))
		}
	}
	if len(said) > 0 {
		return warned(lines(fixes, fixesMost), "%s", few(said, namesMost))
	}
	return x.ofPresent(good)
}

func (x *examination) minISR(ctx context.Context) finding {
	impossible, single := false, false
	f := x.setting(ctx, "at least 2", "min.insync.replicas", "2", func(name string, c kafkawire.TopicConfig) string {
		parts := x.topics.layout.Topics[name].Partitions
		if slices.ContainsFunc(parts, func(p kafkawire.PartitionLayout) bool { return p.Replicas < c.MinISR }) {
			impossible = true
			return fmt.Sprintf("min.insync.replicas is %d, above the number of replicas: nothing can be written", c.MinISR)
		}
		single = single || slices.ContainsFunc(parts, func(p kafkawire.PartitionLayout) bool { return p.Replicas < 2 })
		if c.MinISR < 2 {
			return fmt.Sprintf("min.insync.replicas is %d", c.MinISR)
		}
		return ""
	})
	switch {
	case impossible:
		f.status = Fail
		f.fix = "raise the number of replicas, or lower min.insync.replicas:\n" + strings.ReplaceAll(f.fix, "min.insync.replicas=2", "min.insync.replicas=<replicas - 1>")
	case single && f.status == Warn:
		f.fix = "first give the topics more than one replica, or nothing can be written; then:\n" + f.fix
	}
	return f
}

func (x *examination) unclean(ctx context.Context) finding {
	return x.setting(ctx, "off", "unclean.leader.election.enable", "false", func(_ string, c kafkawire.TopicConfig) string {
		if c.UncleanElection {
			return "unclean.leader.election.enable is true"
		}
		return ""
	})
}

func (x *examination) maxBytes(ctx context.Context) finding {
	most := int(x.cfg.Limits.Envelope)
	return x.setting(ctx, fmt.Sprintf("above limits.envelope, %s", x.cfg.Limits.Envelope), "max.message.bytes", fmt.Sprint(most+recordOverhead), func(_ string, c kafkawire.TopicConfig) string {
		if c.MaxMessageBytes < most {
			return fmt.Sprintf("max.message.bytes is %d, below limits.envelope, %d", c.MaxMessageBytes, most)
		}
		return ""
	})
}

// recordOverhead is what a record adds to its payload and headers, generously.
const recordOverhead = 4 << 10

// cleanup finds compacted topics. N10
func (x *examination) cleanup(ctx context.Context) finding {
	f := x.setting(ctx, "not compacted", "cleanup.policy", "delete", func(_ string, c kafkawire.TopicConfig) string {
		if c.Compacted() {
			return "cleanup.policy is " + c.CleanupPolicy
		}
		return ""
	})
	if f.status == Warn && f.fix != "" {
		f.fix = "if it is not meant to be:\n" + f.fix
	}
	return f
}

// allowed says which topics a service may name.
func (x *examination) allowed(context.Context) finding {
	if len(x.cfg.Topics.Allow) == 0 {
		m := roleMaker{cfg: x.cfg}
		var meant []string
		for _, t := range m.targets() {
			if t.name == "*" { // a template that begins with a field of the envelope says nothing
				continue
			}
			meant = append(meant, strconv.Quote(t.name+map[string]string{"prefixed": "*"}[t.pattern]))
		}
		fix := "list in topics.allow the topics that are meant for events"
		if len(meant) > 0 {
			fix += fmt.Sprintf("; those of topics.template and topics.rules are: [%s]", strings.Join(meant, ", "))
		}
		return warned(fix,
			"topics.allow is not set: an envelope may name any topic but Kafka's internal ones, also those that are not meant for events")
	}
	return fine("%s", few(x.cfg.Topics.Allow, namesMost))
}

// sizes looks for limits that contradict each other.
func (x *examination) sizes(context.Context) finding {
	l := x.cfg.Limits
	if l.Envelope > l.Memory {
		return warned(fmt.Sprintf("raise limits.memory to at least four times limits.envelope, %s", 4*l.Envelope), "limits.envelope, %s, is above limits.memory, %s: such an envelope goes alone", l.Envelope, l.Memory)
	}
	return fine("an envelope of %s, in a budget of %s", l.Envelope, l.Memory)
}
