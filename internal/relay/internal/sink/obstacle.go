package sink

import (
	"errors"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// Errors that end a sink.
var (
	// ErrFenced means that another process has taken the transactional id. If the owner still holds
	// the lease, it takes over again (N5).
	ErrFenced = fence.ErrFenced
	// ErrBroken means that the broker has lost the producer's state, or that a batch is too old for
	// the broker to recognize it as a duplicate. Nothing more is sent. Open a new sink, whose
	// read-back finds the records that arrived.
	ErrBroken = errors.New("the idempotent session is broken")
	// ErrReopen means that a new sink has to read back the records that arrived, or has to use
	// another transactional id. It may be opened at once.
	ErrReopen = errors.New("the sink has to be opened again")
	// errClosed means that the sink's Run has ended.
	errClosed = errors.New("the sink is closed")
)

// Kinds of obstacles. They are also the values of a metric label.
const (
	kindMissing     = kafkawire.TopicMissing
	kindTooSmall    = kafkawire.TopicTooSmall
	kindForbidden   = kafkawire.TopicForbidden
	kindNoLeader    = kafkawire.TopicNoLeader
	kindQuarantined = "quarantined"
	kindRejected    = kafkawire.TopicRejected
	kindUnreachable = kafkawire.TopicUnreachable
	kindOpening     = "opening"
	kindThrottled   = "throttled"
)

// obstacle is the reason why records wait: a kind for programs, and the cause and the fix for operators. The cause may contain a fix.
type obstacle struct{ kind, cause, fix string }

func (o obstacle) none() bool { return o.kind == "" }

// topicObstacle explains a topic's error code in metadata or in a response, with the fix.
func topicObstacle(topic string, err error) obstacle {
	o := kafkawire.ExplainTopic(topic, err)
	return obstacle{o.Kind, o.Cause, o.Fix}
}

// quarantineObstacle returns the obstacle of a partition of the topic that is in quarantine. A topic that has to be created or
// needs more partitions has the fix that it had before the takeover.
func (t *topic) quarantineObstacle(reason kafkawire.Obstacle) obstacle {
	if reason.Kind == "" {
		return obstacle{kindQuarantined, reason.Cause, ""}
	}
	return obstacle{reason.Kind, reason.Cause, kafkawire.TopicFix(reason.Kind, t.name, len(t.partitions))}
}

// logFields returns the attributes of a line about a topic that the obstacle keeps from being written.
func (o obstacle) logFields(topic string) []any {
	fields := []any{"topic", topic, "error", o.cause}
	if o.fix != "" {
		fields = append(fields, "fix", o.fix)
	}
	return fields
}

// WaitsForBroker reports whether the records wait for brokers that another node may be able to reach. It returns
// false if no node can write the target now.
func (b Unwritable) WaitsForBroker() bool { return b.Kind == kindUnreachable || b.Kind == kindNoLeader }
