package problems

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// addSlot adds the problems of a slot. The first reason why the slot has no work to do hides the symptoms that follow from it.
func (l *list) addSlot(slot *SlotStatus) {
	name := slot.object()
	l.addIncidents(slot)
	l.addOplog(slot)

	switch {
	case slot.Paused:
		fix := "outrelay resume" + l.watcherFlag(slot.Name)
		// Without the flag, the command would also end the pauses of the other slots.
		if slot.Slot != wholeSlot {
			fix += " --slot " + slot.Slot
		}
		l.addProblem(Problem{
			Kind: Paused, Severity: Warn, Watcher: slot.Name, Object: name, Title: name + " is paused", Since: slot.PausedAt,
			Detail: slot.describePause(), Fix: fix,
		})
		return

	case slot.State == "no-owner" && slot.Pin != "":
		l.addProblem(Problem{
			Kind: NoOwner, Severity: Fail, Watcher: slot.Name, Object: name, Title: "No node sends for " + name, Since: l.expiredAt(slot),
			Detail: "no process runs it: it is pinned to node " + slot.Pin + ", and other nodes wait for that node",
			Fix:    "start node " + slot.Pin + ", or run outrelay pin --off" + l.watcherFlag(slot.Name),
		})
		return

	case slot.State == "no-owner":
		problem := Problem{Kind: NoOwner, Severity: Fail, Watcher: slot.Name, Object: name, Title: "No node sends for " + name, Since: l.expiredAt(slot), Detail: "no process runs it"}
		if slot.Node != "" {
			problem.Detail += "; its last owner was node " + slot.Node
		}
		// A process that runs need not be started. It takes over within seconds, unless MongoDB does not respond to it.
		if live := l.listLive(slot.Name); len(live) > 0 {
			problem.Detail = "no process has its lease; live nodes: " + joinNames(live)
			problem.Fix = "wait some seconds for a takeover; if the problem stays, the logs of the live nodes name the step that fails"
		}
		l.addProblem(problem)
		return

	case slot.State == "halted", slot.State == "config_error":
		problem := Problem{Kind: Halted, Severity: Fail, Watcher: slot.Name, Object: name, Title: name + " is halted", Detail: slot.Reason}
		for i := range slot.Problems {
			if step := &slot.Problems[i]; step.Part == "halted" {
				problem.Since, problem.ForS = &step.Since, step.ForS
			}
		}
		l.addProblem(problem)
		return
	}

	// The facts have the steps of this process as they are now.
	if slot.Node != l.facts.Node || slot.Name != l.facts.Watcher {
		l.addSteps(slot.Name, name, slot.Node, slot.steps())
	}

	if slot.Gap != "" {
		l.addProblem(Problem{Kind: GapOpen, Severity: Warn, Watcher: slot.Name, Object: name, Title: "A gap of " + name + " is being swept", Detail: cmp.Or(slot.Reason, slot.Gap)})
	}
}

// lagCauses are the problems of a slot or of its node from which a lag follows.
var lagCauses = []Kind{Halted, NoOwner, Paused, MongoUnreachable, KafkaUnreachable, WriteRejected, StreamStopped, PositionStopped, StepFails, GapOpen}

// addLags adds the lags that follow from no other problem. The list has the other problems of slots, processes and nodes.
func (l *list) addLags() {
	for i := range l.facts.Slots {
		slot := &l.facts.Slots[i]
		if slot.LagS == nil || len(slot.Unwritable) > 0 || l.hasProblem(slot, lagCauses...) {
			continue
		}
		lag, name := time.Duration(*slot.LagS*float64(time.Second)), slot.object()
		if lag <= laggingAfter {
			continue
		}

		problem := Problem{
			Kind: Lagging, Severity: Warn, Watcher: slot.Name, Object: name, Title: fmt.Sprintf("%s lags by %s", name, lag.Truncate(time.Second)), ForS: *slot.LagS,
			Detail: "the stream contains an event of that age that Kafka has not acknowledged",
		}
		if lag >= lagFailsAfter {
			problem.Severity = Fail
		}
		l.addProblem(problem)
	}
}

// listLive returns the names of the nodes that run the watcher and send heartbeats, sorted.
func (l *list) listLive(watcher string) (names []string) {
	for i := range l.facts.Nodes {
		if node := &l.facts.Nodes[i]; slices.Contains(node.Watchers, watcher) && node.Alive(nodes.StaleAfter) {
			names = append(names, node.Node)
		}
	}
	slices.Sort(names)
	return names
}

// expiredAt returns when the lease of a killed owner expired, or nil if the owner has released it.
func (l *list) expiredAt(slot *SlotStatus) *time.Time {
	if slot.Owner == "" || slot.ExpiresInMS >= 0 {
		return nil
	}
	at := l.facts.Now.Add(time.Duration(slot.ExpiresInMS) * time.Millisecond)
	return &at
}

// steps returns the steps that the owner has stored.
func (w *SlotStatus) steps() []readiness.Problem {
	steps := make([]readiness.Problem, len(w.Problems))
	for i, problem := range w.Problems {
		steps[i] = readiness.Problem{
			Part:   problem.Part,
			Object: problem.Object,
			Text:   problem.Text,
			Since:  problem.Since,
			For:    time.Duration(problem.ForS * float64(time.Second)),
		}
	}
	return steps
}

// wholeSlot is the slot of a watcher with one slot.
const wholeSlot = "0of1"

// object returns the name of the watcher or, with several slots, of the slot.
func (w *SlotStatus) object() string {
	if w.Slot == wholeSlot {
		return w.Name
	}
	return w.Name + "/" + w.Slot
}

// addIncidents adds the incidents of the slot.
func (l *list) addIncidents(slot *SlotStatus) {
	for i := range slot.Incidents {
		incident := &slot.Incidents[i]
		if discarded := incident.Discarded; discarded != nil {
			l.addProblem(Problem{
				Kind: EventsDiscarded, Severity: Warn, Watcher: slot.Name, Object: discarded.NS, Title: "Waiting events of " + discarded.NS + " were discarded",
				Since: &incident.At, Count: discarded.Events + discarded.Scheduled, Unit: "events were discarded", Acknowledge: incident.ID,
				Detail: fmt.Sprintf("%s was dropped: %d waited, and %d were scheduled in it when they were counted last", discarded.NS, discarded.Events, discarded.Scheduled),
				Fix: "if the drop was a mistake, restore " + discarded.NS + " from a backup: outrelay sends every restored event, also those sent before; " +
					"on_drop: keep sends waiting events in spite of a drop; then run outrelay problems acknowledge " + incident.ID + l.watcherFlag(slot.Name),
			})
		}

		lost := incident.Lost
		if lost == nil {
			continue
		}
		extent := "all of its history was unreadable"
		if lost.From != nil {
			extent = fmt.Sprintf("MongoDB had discarded %s of history", max(lost.To.Sub(*lost.From), time.Second))
		}

		l.addProblem(Problem{
			Kind: LostHistoryFound, Severity: Warn, Watcher: slot.Name, Object: slot.object(), Title: "History of " + slot.object() + " was lost",
			Since: &incident.At, Count: lost.Repeats, Unit: "events may have been sent twice", Acknowledge: incident.ID,
			Detail: fmt.Sprintf("%s (%s); %s sent from the outboxes; repeats are flagged outrelay-redelivered", extent, lost.Reason, wereSent(lost.Swept)),
			Fix:    "check consumers without an inbox, then run outrelay problems acknowledge " + incident.ID + l.watcherFlag(slot.Name),
		})
	}
}

func wereSent(n int64) string {
	if n == 1 {
		return "1 event was"
	}
	return fmt.Sprintf("%d events were", n)
}

// addOplog compares the position of a slot with the ends of the oplog.
func (l *list) addOplog(slot *SlotStatus) {
	oplog := l.facts.Oplog
	window := oplog.Newest.Sub(oplog.Oldest)
	if slot.PositionAt == nil || oplog.Oldest.IsZero() || oplog.Whole || window <= 0 {
		return
	}

	left := max(slot.PositionAt.Sub(oplog.Oldest), 0)
	used := 1 - left.Seconds()/window.Seconds()
	problem := Problem{
		Kind: OplogUsed, Watcher: slot.Name, Object: slot.object(), Title: "The position of " + slot.object() + " nears the end of the oplog", Since: slot.PositionAt,
		Detail: fmt.Sprintf("%.0f %% of the oplog of %s is used; %s are left", used*100, window.Truncate(time.Second), left.Truncate(time.Second)),
	}
	switch {
	case used >= oplogFails:
		problem.Severity = Fail
	case used >= oplogWarns:
		problem.Severity = Warn
	default:
		return
	}
	l.addProblem(problem)
}

// kindsOfParts are the kinds of the steps of an owner or of a process that fail and are repeated.
var kindsOfParts = map[string]Kind{
	"halted":            Halted,
	"stream":            StreamStopped,
	"standstill":        PositionStopped,
	"ledger":            WriteRejected,
	"transactions":      WriteRejected,
	"reconciler":        WriteRejected,
	"scheduled":         WriteRejected,
	"mongodb":           MongoUnreachable,
	"kafka":             KafkaUnreachable,
	"mongodb reachable": MongoUnreachable,
	"kafka reachable":   KafkaUnreachable,
	"purge":             PurgeFails,
}

// addSteps adds the steps of an owner or a process that fail for long. object is the slot, and node the process of its owner.
func (l *list) addSteps(watcher, object, node string, steps []readiness.Problem) {
	for _, step := range steps {
		// The topics that stop the position are in the list.
		if step.For < cmp.Or(l.facts.StepFailsAfter, stepFailsAfter) && !step.Fatal || step.Part == "stuck" {
			continue
		}
		kind, known := kindsOfParts[step.Part]
		if !known {
			kind = StepFails
		}

		// It follows from the outage.
		away := func(known Problem) bool {
			return known.Kind == MongoUnreachable && (known.Object == object || known.Object == node)
		}
		if kind == PurgeFails && slices.ContainsFunc(l.problems, away) {
			continue
		}

		failing := cmp.Or(step.Object, object)
		if strings.HasSuffix(step.Part, " reachable") {
			failing = node
		}
		since := step.Since.UTC()
		problem := Problem{
			Kind: kind, Severity: Fail, Watcher: watcher, Object: failing, Title: SpecOf(kind).Title + ": " + failing, Since: &since, ForS: step.For.Seconds(),
			Detail: step.Part + ": " + step.Text,
		}
		// The slot works on the other objects.
		if step.Object != "" {
			problem.Severity, problem.Detail = Warn, step.Text
		}
		// Several parts may fail in the same way. Several slots of a process report the same part.
		same := l.findSame(problem)
		if same == nil {
			l.addProblem(problem)
			continue
		}
		if !strings.Contains(same.Detail, step.Part+": ") {
			same.Detail += "; " + problem.Detail
		}
		if same.ForS < problem.ForS {
			same.Since, same.ForS = problem.Since, problem.ForS
		}
	}
}
