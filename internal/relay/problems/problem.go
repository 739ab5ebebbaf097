// Package problems has the one list of everything that is wrong with a deployment. `outrelay status`, its exit code, /readyz, the
// metrics, the API and the page show this list, and the alerts and docs/troubleshooting.md name its kinds.
//
// [List] is pure: it makes the list from [Facts], which its caller has read. [ReadStatus] reads the facts about the slots.
//
// Order: a list begins with failures, and has a fixed order, so that it does not jump between two reads. Blocking: [List] does not
// block, and [ReadStatus] blocks until MongoDB responds. Cost: ReadStatus reads one document for each slot.
package problems

import (
	"slices"
	"time"
)

// Kind is the kind of a problem. Programs may compare it: a kind keeps its name and its meaning.
type Kind string

// The kinds.
const (
	Halted            Kind = "halted"
	NoOwner           Kind = "no_owner"
	Paused            Kind = "paused"
	NoStandby         Kind = "no_standby"
	NodeStale         Kind = "node_stale"
	Clock             Kind = "clock"
	MongoUnreachable  Kind = "mongodb_unreachable"
	KafkaUnreachable  Kind = "kafka_unreachable"
	TopicUnwritable   Kind = "topic_unwritable"
	WriteRejected     Kind = "write_rejected"
	StreamStopped     Kind = "stream_stopped"
	PositionStopped   Kind = "position_stopped"
	StepFails         Kind = "step_fails"
	LostHistoryFound  Kind = "lost_history"
	EventsDiscarded   Kind = "events_discarded"
	GapOpen           Kind = "gap_open"
	OplogUsed         Kind = "oplog_used"
	Lagging           Kind = "lagging"
	DeadLetters       Kind = "dead_letters"
	HandlerRetries    Kind = "handler_retries"
	WaitingStuck      Kind = "waiting_stuck"
	ScheduledOverdue  Kind = "scheduled_overdue"
	OutboxNotReadable Kind = "outbox_not_readable"
	PurgeFails        Kind = "purge_fails"
	CountsFail        Kind = "counts_fail"
)

// Severity is the weight of a problem.
type Severity string

// The severities.
const (
	Warn Severity = "warn" // an operator should look in working hours
	Fail Severity = "fail" // events do not arrive, or are about to be lost: an operator must act now
)

// Problem is one thing that is wrong.
type Problem struct {
	ID       string     `json:"id"` // kind/object: the same as long as the problem lasts
	Kind     Kind       `json:"kind"`
	Severity Severity   `json:"severity"`          // warn or fail
	Watcher  string     `json:"watcher,omitempty"` // "" if the problem is about the whole deployment
	Object   string     `json:"object"`            // the topic, slot, node, outbox or watcher with the problem
	Title    string     `json:"title"`             // a sentence without a full stop, with the object
	Since    *time.Time `json:"since,omitempty"`   // nil if unknown
	ForS     float64    `json:"for_s"`             // seconds since then; 0 if unknown
	Count    int64      `json:"count"`             // how many Units; 0 if the problem has no number
	Unit     string     `json:"unit,omitempty"`    // such as "events wait"
	Detail   string     `json:"detail"`            // the cause, with its values
	// Consequence states the effect on events and services if nobody acts.
	Consequence string `json:"consequence"`
	Fix         string `json:"fix"` // the next step of the operator
	// Command is a command of another tool that fixes it, such as kafka-topics.sh; "" if there is none.
	Command string `json:"command,omitempty"`
	// Partitions is the number of partitions that a topic needs; 0 if the problem does not depend on it.
	Partitions int `json:"partitions,omitempty"`
	// Acknowledge is the id for the acknowledgement that ends the problem; "" if only the end of the cause ends it.
	Acknowledge string `json:"acknowledge,omitempty"`
}

// Spec describes a kind.
type Spec struct {
	Kind        Kind
	Severities  []Severity // that its problems may have
	Title       string     // of the kind, for documents
	Consequence string
	Fix         string // unless a problem has a more exact one
}

// incidentsFor is how long an incident stays a problem if no operator acknowledges it.
const incidentsFor = 7 * 24 * time.Hour

// Specs returns the kinds, the most urgent first.
func Specs() []Spec { return slices.Clone(specs) }

var specs = []Spec{
	{
		Kind: Halted, Severities: []Severity{Fail}, Title: "A slot is halted",
		Consequence: "no event of the slot is sent until the cause is fixed; nothing is lost while the oplog lasts",
		Fix:         "remove the named cause; outrelay doctor has details",
	},
	{
		Kind: NoOwner, Severities: []Severity{Fail}, Title: "A slot has no owner",
		Consequence: "no event of the slot is sent",
		Fix:         "start outrelay run",
	},
	{
		Kind: MongoUnreachable, Severities: []Severity{Fail}, Title: "A node does not reach MongoDB",
		Consequence: "the node cannot own a slot; if it owned one, another node takes over",
		Fix:         "check members, network and credentials with outrelay doctor",
	},
	{
		Kind: KafkaUnreachable, Severities: []Severity{Warn, Fail}, Title: "A node does not reach Kafka",
		Consequence: "events wait in MongoDB, and are lost to the stream only if the oplog does not last",
		Fix:         "check brokers, network and credentials with outrelay doctor",
	},
	{
		Kind: StreamStopped, Severities: []Severity{Fail}, Title: "The change stream makes no progress",
		Consequence: "no new event of the slot is sent",
		Fix:         "remove the named cause; if one event is the cause, outrelay recover --skip passes it",
	},
	{
		Kind: WriteRejected, Severities: []Severity{Fail}, Title: "MongoDB rejects a write",
		Consequence: "the step is repeated; events after it are sent, and the position waits",
		Fix:         "remove the named cause: a missing right, a validator, a full disk; outrelay doctor has details",
	},
	{
		Kind: PositionStopped, Severities: []Severity{Fail}, Title: "The position does not move",
		Consequence: "events are sent, and a takeover would read back all of them since the position",
		Fix:         "remove the named cause; outrelay doctor has details",
	},
	{
		Kind: StepFails, Severities: []Severity{Fail}, Title: "A step of the owner is repeated",
		Consequence: "the slot may wait for the step",
		Fix:         "remove the named cause; outrelay doctor has details",
	},
	{
		Kind: TopicUnwritable, Severities: []Severity{Warn, Fail}, Title: "A topic cannot be written",
		Consequence: "its events wait in order, and other topics get theirs",
		Fix:         "make the topic writable; the waiting events are then sent automatically",
	},
	{
		Kind: OutboxNotReadable, Severities: []Severity{Warn, Fail}, Title: "An outbox cannot be read",
		Consequence: "its events are not sent, or may get lost",
		Fix:         "remove the named cause",
	},
	{
		Kind: OplogUsed, Severities: []Severity{Warn, Fail}, Title: "The position nears the end of the oplog",
		Consequence: "beyond the end, history is lost, and the outboxes are swept instead",
		Fix:         "let the watcher continue, or make the oplog larger (replSetResizeOplog)",
	},
	{
		Kind: LostHistoryFound, Severities: []Severity{Warn}, Title: "History was lost",
		Consequence: "no event is lost, but some may have been sent twice; consumers without an inbox may have handled these twice",
		Fix:         "check consumers without an inbox; then acknowledge with outrelay problems acknowledge ID; outrelay problems list has the id",
	},
	{
		Kind: EventsDiscarded, Severities: []Severity{Warn}, Title: "Waiting events were discarded",
		Consequence: "these events will never be sent",
		Fix: "if the drop was a mistake, restore the collection from a backup: outrelay sends every restored event; " +
			"then acknowledge with outrelay problems acknowledge ID; outrelay problems list has the id",
	},
	{
		Kind: GapOpen, Severities: []Severity{Warn}, Title: "A gap is being swept",
		Consequence: "new events wait until the sweep is done",
		Fix:         "wait; outrelay status shows the progress",
	},
	{
		Kind: Lagging, Severities: []Severity{Warn, Fail}, Title: "The lag is high",
		Consequence: "consumers work on old data",
		Fix:         "outrelay topics shows which topics are slow; if all are, check MongoDB and Kafka with outrelay doctor, or use more slots",
	},
	{
		Kind: DeadLetters, Severities: []Severity{Warn, Fail}, Title: "Dead letters need a decision",
		Consequence: "these events are neither sent nor handled until they are requeued",
		Fix:         "outrelay dead summary groups them by cause; then requeue or discard them",
	},
	{
		Kind: HandlerRetries, Severities: []Severity{Warn}, Title: "Handlers of consumers fail",
		Consequence: "later messages of the same keys wait; after the last retry, each message becomes a dead letter",
		Fix:         "outrelay waiting list --source handler shows the reasons; fix the cause",
	},
	{
		Kind: WaitingStuck, Severities: []Severity{Warn}, Title: "Waiting events do not decrease",
		Consequence: "events of the same keys wait as well",
		Fix:         "outrelay waiting summary shows the reasons",
	},
	{
		Kind: ScheduledOverdue, Severities: []Severity{Warn}, Title: "Scheduled events are overdue",
		Consequence: "these events are sent late",
		Fix:         "check the topic, and the index on dueAt with outrelay setup --dry-run",
	},
	{
		Kind: PurgeFails, Severities: []Severity{Warn}, Title: "The purge fails",
		Consequence: "its delivered events stay and use space; sending is not affected",
		Fix:         "remove the named cause, such as a missing right or a validator that rejects ts; the purge is repeated within 10 minutes",
	},
	{
		Kind: Paused, Severities: []Severity{Warn}, Title: "An operator paused a slot",
		Consequence: "no event of the slot is sent until outrelay resume",
		Fix:         "outrelay resume",
	},
	{
		Kind: NoStandby, Severities: []Severity{Warn}, Title: "There is no standby",
		Consequence: "if the only node fails, no event is sent until it is back",
		Fix:         "start outrelay run on another machine",
	},
	{
		Kind: NodeStale, Severities: []Severity{Warn}, Title: "A node sends no heartbeat",
		Consequence: "it cannot take over",
		Fix:         "start it again, or run outrelay nodes remove NODE if it is gone permanently",
	},
	{
		Kind: Clock, Severities: []Severity{Warn}, Title: "The clock of a node is wrong",
		Consequence: "times in its log and figures are wrong; leases, due times and expiries follow the clock of MongoDB",
		Fix:         "synchronize the clock by NTP: timedatectl set-ntp true",
	},
	{
		Kind: CountsFail, Severities: []Severity{Warn, Fail}, Title: "Counting fails",
		Consequence: "the figures and the list of problems are incomplete",
		Fix:         "run outrelay doctor to check MongoDB and the privileges of the user",
	},
}

// SpecOf returns the description of a kind.
func SpecOf(kind Kind) Spec {
	i := slices.IndexFunc(specs, func(spec Spec) bool { return spec.Kind == kind })
	return specs[i]
}

// Worst returns the greatest severity in the list, or "" if the list is empty.
func Worst(list []Problem) Severity {
	var worst Severity
	for i := range list {
		if list[i].Severity == Fail {
			return Fail
		}
		worst = Warn
	}
	return worst
}
