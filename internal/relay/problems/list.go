package problems

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// The limits from which a fact is a problem.
const (
	topicFailsAfter = 5 * time.Minute  // an unwritable topic fails from this age on
	emptyFailsAfter = 5 * time.Minute  // a watcher without any outbox fails from this age on
	stepFailsAfter  = 30 * time.Second // a step that is repeated is a problem from this age on; a failover takes less
	laggingAfter    = 10 * time.Second
	lagFailsAfter   = 5 * time.Minute
	retriesWarn     = 15 * time.Minute // a handler fails for so long; most outages of its services are shorter
	clockOffAfter   = 2 * time.Second
	countsOldAfter  = 10 * time.Second // counts of this age are shown with it
	oplogWarns      = 0.5              // used part of the oplog
	oplogFails      = 0.9
)

// Facts are what is known about a deployment. Facts that are not known are zero, and cause no problem.
type Facts struct {
	Now     time.Time
	Watcher string       // of all facts except the slots
	Slots   []SlotStatus // of all watchers
	Nodes   []nodes.Node // nil: unknown

	Node string     // this process, if it runs a relay
	Own  []OwnSteps // the steps of this process and of its slots as they are now, which replace the stored ones of the slots that it owns

	StepFailsAfter time.Duration // age from which a step that is repeated is a problem; default 30 s

	CountedAt time.Time          // of the facts that are counts: all that follow
	Waiting   map[string]Waiting // waiting events by topic
	// TopicCommand returns the command that creates a missing topic, or adds partitions to a too small one; nil: unknown.
	TopicCommand func(topic, kind string, partitions int) string
	Letters      *Letters // nil: unknown
	Retries      []Retry
	Oplog        Oplog
	Unreadable   []outboxes.Finding
	Health       *health.Report // nil: the rules are not evaluated
	CountsFail   string         // why facts are missing; "" if they are not
}

// OwnSteps are the steps of a process or of a slot that fail and are repeated.
type OwnSteps struct {
	Object string // the node; or the watcher or, with several slots, the slot
	Steps  []readiness.Problem
}

// Waiting are the waiting events of a topic.
type Waiting struct {
	Events int64
	Oldest *time.Time // when the oldest one was committed
}

// Letters are the dead letters that are neither requeued nor discarded.
type Letters struct {
	Relay, Handlers int64
	Oldest          *time.Time // when the oldest one died; nil if unknown
}

// Count returns the number of letters of both kinds.
func (l Letters) Count() int64 { return l.Relay + l.Handlers }

// String returns the number of each kind, such as "2 of the relay, 3 of handlers".
func (l Letters) String() string {
	return fmt.Sprintf("%d of the relay, %d of handlers", l.Relay, l.Handlers)
}

// Retry describes the messages of a handler that failed and wait for another attempt.
type Retry struct {
	Group, Handler string
	Messages       int64     // with the later messages of their keys
	Since          time.Time // of the first failure
}

// Oplog describes MongoDB's oplog.
type Oplog struct {
	Oldest, Newest time.Time // the times of its ends
	Whole          bool      // nothing was cut off yet, so how far it will reach back is unknown
}

// list collects problems.
type list struct {
	facts    *Facts
	problems []Problem
}

// List returns the problems, failures first. Problems of one severity have the order of [Specs].
func List(facts Facts) []Problem {
	collected := &list{facts: &facts, problems: []Problem{}}
	for i := range facts.Slots {
		collected.addSlot(&facts.Slots[i])
	}
	// The steps of this process are a more exact report than its heartbeat.
	for _, own := range facts.Own {
		collected.addSteps(facts.Watcher, own.Object, facts.Node, own.Steps)
	}
	collected.addNodes()
	collected.addLags()
	collected.addTopics()
	collected.addOutboxes()
	collected.addLetters()
	collected.addRetries()
	collected.addRules()

	rank := func(problem *Problem) int {
		return slices.IndexFunc(specs, func(spec Spec) bool { return spec.Kind == problem.Kind })
	}
	slices.SortStableFunc(collected.problems, func(a, b Problem) int {
		// Fail comes before Warn in the alphabet.
		if a.Severity != b.Severity {
			return strings.Compare(string(a.Severity), string(b.Severity))
		}
		return cmp.Or(rank(&a)-rank(&b), strings.Compare(a.Object, b.Object))
	})
	return collected.problems
}

// singularUnits are the units of one thing.
var singularUnits = map[string]string{
	"dead letters":                    "dead letter",
	"events may have been sent twice": "event may have been sent twice",
	"events were discarded":           "event was discarded",
	"events wait":                     "event waits",
	"messages wait":                   "message waits",
	"nodes":                           "node",
	"outboxes":                        "outbox",
}

// addProblem adds a problem, unless the list has it already. It fills in the texts of the kind.
func (l *list) addProblem(problem Problem) {
	spec := SpecOf(problem.Kind)
	// An incident may happen again before the first one is acknowledged.
	problem.ID = string(problem.Kind) + "/" + cmp.Or(problem.Acknowledge, problem.Object)
	problem.Consequence = cmp.Or(problem.Consequence, spec.Consequence)
	if problem.Fix == "" {
		problem.Fix = spec.Fix
		if flag := l.watcherFlag(problem.Watcher); flag != "" && strings.Contains(spec.Fix, "outrelay ") {
			problem.Fix += "; run commands with" + flag
		}
	}
	if singular, found := singularUnits[problem.Unit]; found && problem.Count == 1 {
		problem.Unit = singular
	}
	if problem.Since != nil && problem.ForS == 0 {
		problem.ForS = max(l.facts.Now.Sub(*problem.Since).Seconds(), 0)
	}

	if l.findSame(problem) == nil {
		l.problems = append(l.problems, problem)
	}
}

// watcherFlag returns the flag of a command that acts on a watcher, with a space before it, or "" for the configured watcher.
func (l *list) watcherFlag(watcher string) string {
	if watcher == "" || watcher == l.facts.Watcher {
		return ""
	}
	return " --watcher " + watcher
}

// findSame returns the problem in the list with the kind and the object of another one, or nil. Two watchers may write the same topic.
func (l *list) findSame(other Problem) *Problem {
	i := slices.IndexFunc(l.problems, func(known Problem) bool {
		return known.Kind == other.Kind && known.Object == other.Object && known.Acknowledge == other.Acknowledge && known.Watcher == other.Watcher
	})
	if i < 0 {
		return nil
	}
	return &l.problems[i]
}

// hasProblem reports whether the list has a problem of one of the kinds that the slot or the node of its owner has.
func (l *list) hasProblem(slot *SlotStatus, kinds ...Kind) bool {
	return slices.ContainsFunc(l.problems, func(problem Problem) bool {
		return slices.Contains(kinds, problem.Kind) && (problem.Object == slot.Node || problem.Object == slot.object())
	})
}

// addTopics adds a problem for each topic that cannot be written. Several slots may report the same topic.
func (l *list) addTopics() {
	type target struct{ watcher, topic string }
	byTopic := map[target]UnwritableTopic{}
	for i := range l.facts.Slots {
		slot := &l.facts.Slots[i]
		if slot.Paused || !slot.HasOwner() {
			continue
		}
		away := l.hasProblem(slot, KafkaUnreachable)
		for _, topic := range slot.Unwritable {
			// Each topic would be a problem, with a single cause.
			if away && topic.Kind == kafkawire.TopicUnreachable {
				continue
			}
			at := target{slot.Name, topic.Topic}
			known, more := byTopic[at]
			if more {
				topic.Count += known.Count
				topic.Partitions = max(topic.Partitions, known.Partitions)
				if known.Since.Before(topic.Since) {
					topic.Since, topic.ForS, topic.Reason, topic.Kind = known.Since, known.ForS, known.Reason, known.Kind
				}
			}
			byTopic[at] = topic
		}
	}

	for at, topic := range byTopic {
		since := topic.Since.UTC()
		problem := Problem{
			Kind: TopicUnwritable, Severity: Warn, Watcher: at.watcher, Object: at.topic, Title: "Topic " + at.topic + " cannot be written",
			Since: &since, ForS: topic.ForS, Count: int64(topic.Count), Unit: "events wait", Detail: withoutTopic(topic.Reason, at.topic),
		}
		if at.watcher != l.facts.Watcher {
			problem.Title = "Topic " + at.topic + " of watcher " + at.watcher + " cannot be written"
		}
		if fix := kafkawire.TopicFix(topic.Kind, at.topic, topic.Partitions); fix != "" && l.facts.TopicCommand != nil {
			// The reason has a general fix after its cause.
			problem.Detail, _, _ = strings.Cut(problem.Detail, ";")
			problem.Fix, problem.Partitions = fix, topic.Partitions
			problem.Command = l.facts.TopicCommand(at.topic, topic.Kind, topic.Partitions)
		}
		// The count of the stored events also has those that wait for an earlier event of their key.
		if stored, known := l.facts.Waiting[at.topic]; known && at.watcher == l.facts.Watcher {
			problem.Count = max(problem.Count, stored.Events)
		}
		if topic.ForS >= topicFailsAfter.Seconds() {
			problem.Severity = Fail
		}
		l.addProblem(problem)
	}
}

// withoutTopic removes the name of the topic from the begin of the reason, which follows the name.
func withoutTopic(reason, topic string) string {
	for _, prefix := range []string{fmt.Sprintf("topic %q ", topic), "topic " + topic + ": "} {
		if rest, ok := strings.CutPrefix(reason, prefix); ok {
			return "it " + rest
		}
	}
	return reason
}

// addNodes adds the problems of the nodes that run the watcher.
func (l *list) addNodes() {
	if l.facts.Nodes == nil {
		return
	}

	watcher := l.facts.Watcher
	live := 0
	var silent, silentFor []string
	var silentSince *time.Time
	for i := range l.facts.Nodes {
		node := &l.facts.Nodes[i]
		if !slices.Contains(node.Watchers, watcher) {
			continue
		}
		if !node.Alive(nodes.StaleAfter) {
			silent = append(silent, node.Node)
			silentFor = append(silentFor, fmt.Sprintf("%s for %s", node.Node, node.Age().Truncate(time.Second)))
			if seen := node.SeenAt.UTC(); silentSince == nil || seen.Before(*silentSince) {
				silentSince = &seen
			}
			continue
		}

		live++
		// One slow response is no outage if Kafka has acknowledged records at that time.
		sends := node.LastAck != nil && node.SeenAt.Sub(*node.LastAck) < nodes.StaleAfter
		if !node.KafkaReachable && !sends {
			l.addProblem(Problem{
				Kind: KafkaUnreachable, Severity: Warn, Watcher: watcher, Object: node.Node, Title: "A node does not reach Kafka: " + node.Node,
				Detail: "its last heartbeat found no broker",
			})
		}
		if off := time.Duration(node.ClockAheadMS) * time.Millisecond; off.Abs() > clockOffAfter {
			way := "ahead of"
			if off < 0 {
				way = "after"
			}
			l.addProblem(Problem{
				Kind: Clock, Severity: Warn, Watcher: watcher, Object: node.Node, Title: "The clock of node " + node.Node + " is wrong",
				Detail: fmt.Sprintf("it is %s %s that of MongoDB", off.Abs().Round(100*time.Millisecond), way),
			})
		}
	}

	// A slot without an owner is in the list. Without any slot, the watcher has never run.
	hasSlots := slices.ContainsFunc(l.facts.Slots, func(slot SlotStatus) bool { return slot.Name == watcher })
	switch {
	case live == 0 && !hasSlots:
		l.addProblem(Problem{
			Kind: NoOwner, Severity: Fail, Watcher: watcher, Object: watcher, Title: "No node sends for " + watcher,
			Detail: "no process has run this watcher yet",
		})
	case live == 1:
		l.addProblem(Problem{
			Kind: NoStandby, Severity: Warn, Watcher: watcher, Object: watcher, Title: "Watcher " + watcher + " has no standby", Detail: "one node is alive",
		})
	}
	if len(silent) > 0 {
		problem := Problem{
			Kind: NodeStale, Severity: Warn, Watcher: watcher, Object: watcher, Title: "Nodes of " + watcher + " send no heartbeat",
			Since: silentSince, Count: int64(len(silent)), Unit: "nodes", Detail: "no heartbeat from " + strings.Join(silentFor, ", "),
			Fix: "start it again, or run outrelay nodes remove " + silent[0] + " if it is gone permanently",
		}
		if len(silent) > 1 {
			problem.Fix = "start them again, or run outrelay nodes remove for each that is gone permanently: " + strings.Join(silent, ", ")
		}
		l.addProblem(problem)
	}
}

// addOutboxes adds the configured names that cannot be read.
func (l *list) addOutboxes() {
	for _, found := range l.facts.Unreadable {
		problem := Problem{
			Kind: OutboxNotReadable, Severity: Warn, Watcher: l.facts.Watcher, Object: found.NS, Title: "Outbox " + found.NS + " cannot be read",
			Detail: found.Cause, Fix: found.Fix,
		}
		if !found.Since.IsZero() {
			problem.Since = &found.Since
		}

		switch {
		case found.NothingToRead:
			problem.Detail += ", and no other name in watch has a collection"
			problem.Consequence = "the watcher has nothing to read, so no event is sent"
		case found.Kind == outboxes.IsMissing:
			problem.Consequence = "no event is sent from it; the other outboxes are read"
		}
		if found.Fatal || FailsEmpty(found, l.facts.Now) {
			problem.Severity = Fail
		}
		l.addProblem(problem)
	}
}

// FailsEmpty reports whether the watcher has had nothing to read for so long that its names are probably wrong.
func FailsEmpty(found outboxes.Finding, now time.Time) bool {
	return found.NothingToRead && !found.Since.IsZero() && now.Sub(found.Since) >= emptyFailsAfter
}

// addLetters adds the dead letters of both kinds.
func (l *list) addLetters() {
	letters := l.facts.Letters
	if letters == nil || letters.Count() == 0 {
		return
	}
	problem := Problem{
		Kind: DeadLetters, Severity: Warn, Watcher: l.facts.Watcher, Object: l.facts.Watcher, Title: "Dead letters of " + l.facts.Watcher + " need a decision",
		Since: letters.Oldest, Count: letters.Count(), Unit: "dead letters", Detail: letters.String() + ", neither requeued nor discarded",
	}

	// Many new ones are an outage: a writer, a routing rule or a limit has changed.
	if check := l.findRule(health.DeadLettersRule); check != nil && check.Status != health.OK {
		problem.Severity = Fail
		problem.Detail += "; " + check.Detail
	}
	problem.Detail = l.withAge(problem.Detail)
	l.addProblem(problem)
}

// addRetries adds the handlers that fail for long.
func (l *list) addRetries() {
	problem := Problem{
		Kind: HandlerRetries, Severity: Warn, Watcher: l.facts.Watcher, Object: l.facts.Watcher, Title: "Handlers of consumers fail", Unit: "messages wait",
	}
	var names []string

	for _, retry := range l.facts.Retries {
		age := l.facts.Now.Sub(retry.Since)
		if age < retriesWarn {
			continue
		}
		problem.Count += retry.Messages
		names = append(names, fmt.Sprintf("handler %s of group %s for %s", retry.Handler, retry.Group, age.Truncate(time.Minute)))
		if problem.Since == nil || retry.Since.Before(*problem.Since) {
			problem.Since = &retry.Since
		}
	}

	// No handler fails for long.
	if len(names) == 0 {
		return
	}
	problem.Detail = l.withAge(joinNames(names))
	l.addProblem(problem)
}

// findRule returns the result of a health rule, or nil.
func (l *list) findRule(id string) *health.Check {
	if l.facts.Health == nil {
		return nil
	}
	i := slices.IndexFunc(l.facts.Health.Checks, func(check health.Check) bool { return check.ID == id })
	if i < 0 {
		return nil
	}
	return &l.facts.Health.Checks[i]
}

// addRules adds the results of the other health rules.
func (l *list) addRules() {
	watcher := l.facts.Watcher
	if l.facts.CountsFail != "" {
		l.addProblem(Problem{
			Kind: CountsFail, Severity: Warn, Watcher: watcher, Object: watcher, Title: "The counts of " + watcher + " are not available", Detail: l.facts.CountsFail,
		})
	}
	if check := l.findRule(health.CountingRule); check != nil && check.Status != health.OK {
		problem := Problem{Kind: CountsFail, Severity: Warn, Watcher: watcher, Object: watcher, Title: "The counts of " + watcher + " fail", Detail: check.Detail}
		if check.Status == health.Unhealthy {
			problem.Severity = Fail
		}
		l.addProblem(problem)
	}

	// A topic that cannot be written explains why events wait, and so does an outage of Kafka.
	explained := slices.ContainsFunc(l.problems, func(problem Problem) bool {
		return (problem.Kind == TopicUnwritable || problem.Kind == KafkaUnreachable) && problem.Watcher == watcher
	})
	if check := l.findRule(health.WaitingRule); check != nil && check.Status != health.OK && !explained {
		l.addProblem(Problem{
			Kind: WaitingStuck, Severity: Warn, Watcher: watcher, Object: watcher, Title: "Waiting events of " + watcher + " do not decrease", Detail: l.withAge(check.Detail),
			Since: l.oldestWaiting(), Count: check.N, Unit: "events wait",
		})
	}
	if check := l.findRule(health.OverdueRule); check != nil && check.Status != health.OK && !explained {
		l.addProblem(Problem{
			Kind: ScheduledOverdue, Severity: Warn, Watcher: watcher, Object: watcher, Title: "Scheduled events of " + watcher + " are overdue", Detail: l.withAge(check.Detail),
			Count: check.N, Unit: "outboxes",
		})
	}
}

// oldestWaiting returns when the oldest waiting event was committed, or nil if it is unknown.
func (l *list) oldestWaiting() (oldest *time.Time) {
	for _, topic := range l.facts.Waiting {
		if topic.Oldest != nil && (oldest == nil || topic.Oldest.Before(*oldest)) {
			oldest = topic.Oldest
		}
	}
	return oldest
}

// withAge returns the detail of a problem that is a count, with the age of the count if it is not of the present.
func (l *list) withAge(detail string) string {
	age := l.facts.Now.Sub(l.facts.CountedAt)
	if l.facts.CountedAt.IsZero() || age < countsOldAfter {
		return detail
	}
	return detail + "; counted " + age.Truncate(time.Second).String() + " ago"
}

// joinNames lists the first three names, and counts the others.
func joinNames(names []string) string {
	text := strings.Join(names[:min(len(names), 3)], ", ")
	if len(names) > 3 {
		text += fmt.Sprintf(" and %d more", len(names)-3)
	}
	return text
}
