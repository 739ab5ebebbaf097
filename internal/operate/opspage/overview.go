package opspage

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// overview is the data of the first page.
type overview struct {
	admin.Overview
	Worst    string        // ok, warn or fail: the greatest severity of the problems of the watcher
	Problems []problemCard // of the watcher, failures first
	Watching []verdict     // all watchers
	HeldLive int           // number of live slots of the watcher
	Slots    int           // number of slots of the watcher
	Own      []admin.SlotStatus
	Paused   int     // number of slots of the watcher that an operator paused
	Rates    []int32 // records of the last hour in parts of three minutes, oldest first
}

// Headline returns the state of the watcher in a few words.
func (o *overview) Headline() string {
	live := fmt.Sprintf("%d of %d slots live", o.HeldLive, o.Slots)
	switch {
	case o.Paused > 0 && o.Paused == o.Slots:
		return "paused by an operator"
	case o.Paused > 0:
		return fmt.Sprintf("%s, %d paused by an operator", live, o.Paused)
	case o.Slots > 0 && o.HeldLive == o.Slots && len(o.Problems) == 0:
		return "events flow"
	}
	return live
}

// Relays returns the nodes that run the watcher, to which it can be pinned.
func (o *overview) Relays(watcher string) []admin.Node {
	return slices.DeleteFunc(slices.Clone(o.Nodes), func(n admin.Node) bool { return !slices.Contains(n.Watchers, watcher) })
}

// Dead returns the number of dead letters of both sides that are not requeued.
func (o *overview) Dead() int64 { return o.Counts.Dead + o.Counts.HandlerDead }

// Waiting returns the number of events that wait at the relay, and of messages that handlers retry.
func (o *overview) Waiting() int64 { return o.Counts.Waiting() + o.Counts.HandlerWaiting }

// IsEmpty reports whether no event is stored or sent. Then the page shows the first steps.
func (o *overview) IsEmpty() bool {
	counts := &o.Counts
	return o.Slots == 0 || counts.Envelopes+counts.Pending+counts.Waiting()+counts.Scheduled+o.Dead()+counts.InboxHandled == 0 && o.RateS == 0
}

// LiveNodes returns the number of nodes that send heartbeats.
func (o *overview) LiveNodes() (n int) {
	for i := range o.Nodes {
		if !o.Nodes[i].Stale {
			n++
		}
	}
	return n
}

// tile is a count on the overview, with the term of the glossary that explains it.
type tile struct {
	Count             int64
	Figure, Name      string
	Parts, Link, Term string // Link is "" if there is no list
	Alert             bool   // an operator has to act on it
}

// Tiles returns the counts that an operator looks at first.
func (o *overview) Tiles(view *view) []tile {
	counts := &o.Counts
	waiting, dead := o.Waiting(), o.Dead()

	return []tile{
		{
			Count: waiting, Figure: formatNumber(waiting), Name: "waiting", Link: view.Link("/waiting"), Term: "parked", Alert: counts.Parked+counts.Retry+counts.HandlerWaiting > 0,
			Parts: joinParts(part{counts.Parked, "parked"}, part{counts.Retry, "before a retry"}, part{counts.Blocked, "blocked"}, part{counts.Queued, "queued"}, part{counts.HandlerWaiting, "at handlers"}),
		},
		{
			Count: dead, Figure: formatNumber(dead), Name: "dead letters", Link: view.Link("/dead"), Term: "dead letter", Alert: dead > 0,
			Parts: joinParts(part{counts.Dead, "of the relay"}, part{counts.HandlerDead, "of handlers"}),
		},
		{
			Count: counts.Scheduled, Figure: formatNumber(counts.Scheduled), Name: "scheduled", Link: view.Link("/scheduled"), Term: "scheduled",
			Parts: "sent when they are due",
		},
	}
}

// part is a share of a count.
type part struct {
	count int64
	text  string
}

// joinParts returns the parts that are not 0.
func joinParts(parts ...part) string {
	var texts []string
	for _, part := range parts {
		if part.count > 0 {
			texts = append(texts, formatNumber(part.count)+" "+part.text)
		}
	}
	return cmp.Or(strings.Join(texts, " · "), "none")
}

// AllCounts returns every count.
func (o *overview) AllCounts(view *view) []tile {
	counts := &o.Counts
	list := []tile{
		{Count: counts.Parked, Term: "parked", Link: view.Link("/waiting", "reason", "parked")},
		{Count: counts.Retry, Term: "retry", Link: view.Link("/waiting", "reason", "retry")},
		{Count: counts.Blocked, Term: "blocked", Link: view.Link("/waiting", "reason", "blocked")},
		{Count: counts.Queued, Term: "queued", Link: view.Link("/waiting", "reason", "queued")},
		{Count: counts.HandlerWaiting, Term: "retry", Parts: "messages of handlers", Link: view.Link("/waiting/handlers")},
		{Count: counts.BlockedKeys, Term: "key", Parts: "wait", Link: view.Link("/waiting")},
		{Count: counts.Dead, Term: "dead letters", Parts: "of the relay", Link: view.Link("/dead")},
		{Count: counts.HandlerDead, Term: "dead letters", Parts: "of handlers", Link: view.Link("/dead", "source", admin.FromHandler)},
		{Count: counts.Scheduled, Term: "scheduled", Link: view.Link("/scheduled")},
		{Count: counts.Pending, Term: "position", Parts: "after it"},
		{Count: counts.Envelopes, Term: "outbox", Parts: "stored"},
		{Count: counts.InboxHandled, Term: "inbox", Parts: "handled", Link: view.Link("/inbox")},
		{Count: counts.InboxClaimed, Term: "claimed", Link: view.Link("/inbox")},
		{Count: counts.Sagas, Term: "sagas", Link: view.Link("/sagas")},
	}

	for i := range list {
		list[i].Figure = formatNumber(list[i].Count)
		if list[i].Term == "position" && counts.PendingMore {
			list[i].Figure += "+"
		}
	}
	return list
}

// verdict is the state of one watcher.
type verdict struct {
	Name, Status string
	Rates        []int32 // records of the last hour in parts of three minutes, oldest first; nil if they were not read
}

// newVerdict returns the greatest severity of the problems of a watcher.
func newVerdict(list []admin.Problem, watcher string) verdict {
	return verdict{Name: watcher, Status: worstOf(slices.DeleteFunc(slices.Clone(list), func(problem admin.Problem) bool { return problem.Watcher != watcher }))}
}

// worstOf returns ok, or the greatest severity of the problems.
func worstOf(list []admin.Problem) string { return cmp.Or(string(problems.Worst(list)), "ok") }

// problemCard is a problem as the overview shows it, with its link or action.
type problemCard struct {
	admin.Problem
	Link, LinkText     string // to the affected entries; "" if there are none
	Action, ActionText string // of the page; "" if there is none
	Fields             []row  // of the form of the action
}

// Facts states how many are affected, and since when.
func (p problemCard) Facts() string {
	var facts []string
	if p.Count > 0 {
		facts = append(facts, formatNumber(p.Count)+" "+p.Unit)
	}
	switch {
	case p.Acknowledge != "":
		facts = append(facts, formatSpan(p.ForS)+" ago")
	case p.ForS > 0:
		facts = append(facts, "for "+formatSpan(p.ForS))
	}
	return strings.Join(facts, " · ")
}

// newProblemCard adds the next step on the page to a problem.
func newProblemCard(problem admin.Problem, view *view) problemCard {
	card := problemCard{Problem: problem}
	switch problem.Kind {
	case problems.TopicUnwritable:
		card.Link, card.LinkText = view.Link("/waiting", "topic", problem.Object), "Show "+countNoun(problem.Count, "event")
		// Only a topic that the action can repair has a command.
		if problem.Command != "" {
			card.Action, card.ActionText, card.Fields = "topic-create", "Create the topic", []row{{"topic", problem.Object}}
			if problem.Partitions > 0 {
				card.ActionText = "Restore the topic"
				card.Fields = append(card.Fields, row{"partitions", strconv.Itoa(problem.Partitions)})
			}
		}
	case problems.WaitingStuck:
		card.Link, card.LinkText = view.Link("/waiting"), "Show the waiting events"
	case problems.HandlerRetries:
		card.Link, card.LinkText = view.Link("/waiting/handlers"), "Show the messages"
	case problems.DeadLetters:
		card.Link, card.LinkText = view.Link("/dead"), "Show "+countNoun(problem.Count, "dead letter")
	case problems.ScheduledOverdue:
		card.Link, card.LinkText = view.Link("/scheduled"), "Show the scheduled events"
	case problems.NoStandby, problems.NodeStale, problems.Clock, problems.MongoUnreachable, problems.KafkaUnreachable, problems.NoOwner:
		card.Link, card.LinkText = view.Link("/nodes"), "Show the nodes"
	case problems.Halted, problems.StreamStopped, problems.WriteRejected, problems.PositionStopped, problems.StepFails:
		card.Link, card.LinkText = view.Link("/log", "of", problem.Watcher), "Show the audit log"
		if problem.Kind == problems.StreamStopped {
			card.setSlotAction("skip", "Pass over the event")
		}
	case problems.GapOpen:
		// The detail is the progress, and the overview refreshes it.
		card.Fix = "wait: this card shows the number of swept events until the sweep is done. Then the audit log has gap_closed"
		card.Link, card.LinkText = view.Link("/log", "of", problem.Watcher, "kind", string(nodes.GapFound)+" "+string(nodes.GapClosed)), "Show the gaps in the audit log"
	case problems.Paused:
		card.setSlotAction("resume", "Resume")
	case problems.Lagging:
		card.Link, card.LinkText = view.Link("/topics"), "Show the topics"
	case problems.OplogUsed, problems.OutboxNotReadable, problems.PurgeFails, problems.CountsFail:
		// Their fix is outside of the page, and this command explains it.
		card.Command = cmp.Or(problem.Command, "outrelay doctor")
	case problems.LostHistoryFound, problems.EventsDiscarded:
		// Its action is the acknowledgement.
	}

	if problem.Acknowledge != "" {
		card.Action, card.ActionText = "acknowledge", "Acknowledge"
		card.Fields = []row{{"problem", problem.Acknowledge}}
	}
	return card
}

// setSlotAction sets an action on the slot of the problem.
func (p *problemCard) setSlotAction(action, text string) {
	p.Action, p.ActionText = action, text
	if _, slot, named := strings.Cut(p.Object, "/"); named {
		p.Fields = []row{{slotField, slot}}
	}
}

func newOverview(reported admin.Overview, view *view) *overview {
	watcher := view.Watcher
	overview := &overview{Overview: reported}
	// A problem without a watcher concerns the whole deployment.
	list := slices.DeleteFunc(slices.Clone(reported.Problems), func(problem admin.Problem) bool {
		return problem.Watcher != "" && problem.Watcher != watcher
	})
	overview.Worst = worstOf(list)
	for _, problem := range list {
		overview.Problems = append(overview.Problems, newProblemCard(problem, view))
	}
	overview.addUncounted()

	for i := range reported.Slots {
		reportedSlot := &reported.Slots[i]
		if !slices.ContainsFunc(overview.Watching, func(verdict verdict) bool { return verdict.Name == reportedSlot.Name }) {
			overview.Watching = append(overview.Watching, newVerdict(reported.Problems, reportedSlot.Name))
		}
		// The numbers below are about the watcher of this page; the others have only a verdict.
		if reportedSlot.Name != watcher {
			continue
		}

		overview.Slots++
		overview.Own = append(overview.Own, *reportedSlot)
		if reportedSlot.State == "live" {
			overview.HeldLive++
		}
		if reportedSlot.Paused {
			overview.Paused++
		}
	}
	return overview
}

// addUncounted adds the events that an owner holds for topics that cannot be written, and that no count has found in the store yet. So
// the tiles and the list of topics never have fewer events than the cards.
func (o *overview) addUncounted() {
	o.WaitingTopics = slices.Clone(o.WaitingTopics)
	for i := range o.WaitingTopics {
		topic := &o.WaitingTopics[i]
		card := slices.IndexFunc(o.Problems, func(card problemCard) bool {
			return card.Kind == problems.TopicUnwritable && card.Object == topic.Topic
		})
		if card < 0 {
			continue
		}

		uncounted := max(o.Problems[card].Count-topic.Retry-topic.Blocked-topic.Parked, 0)
		topic.Parked += uncounted
		o.Counts.Parked += uncounted
	}
}

func showOverview(call *call) (any, error) {
	overview, err := call.use.Operator.Overview(call.ctx)
	if err != nil {
		return nil, err
	}
	shown := newOverview(overview, call.v)
	if shown.Slots == 0 {
		return shown, nil
	}

	if shown.Rates, err = readRates(call, call.v.Watcher); err != nil {
		return nil, err
	}
	for i := range shown.Watching[:min(len(shown.Watching), shownWatchers)] {
		if other := &shown.Watching[i]; other.Name != call.v.Watcher {
			if other.Rates, err = readRates(call, other.Name); err != nil {
				return nil, err
			}
		}
	}
	return shown, nil
}

// shownWatchers is the number of watchers with a small chart: each costs a read.
const shownWatchers = 20

func readRates(call *call, watcher string) ([]int32, error) {
	minutes, err := call.use.Activity.Minutes(call.ctx, watcher, shownMinutes)
	return sumMinutes(minutes, call.v.Now), err
}

// shownMinutes is the time that the small chart of the overview shows.
const shownMinutes = 60

// sumMinutes returns the records of the last hour, in parts of three minutes.
func sumMinutes(minutes []admin.Minute, now time.Time) []int32 {
	const parts = shownMinutes / activity.RecentMinutes
	list := make([]int32, parts)
	for _, minute := range minutes {
		age := int(now.Sub(minute.At).Minutes()) / activity.RecentMinutes
		if age >= 0 && age < parts {
			list[parts-1-age] += int32(minute.Rate * 60)
		}
	}
	return list
}

// history is the data of the charts.
type history struct {
	// Points have the Unix seconds, records per second, seconds of lag, and p50 and p99 of the latency in milliseconds.
	Points [][5]float64 `json:"points"`
	Marks  []mark       `json:"marks"` // oldest first
}

// mark is an entry of the audit log that explains a chart.
type mark struct {
	At   int64  `json:"at"` // Unix seconds
	Text string `json:"text"`
	Link string `json:"link"` // to the entry
}

// markTexts are the marks of the kinds of entries.
var markTexts = map[string]string{
	string(nodes.TookOver):  "takeover",
	string(nodes.Paused):    "paused",
	string(nodes.Resumed):   "resumed",
	string(nodes.GapFound):  "gap found",
	string(nodes.GapClosed): "gap closed",
	string(nodes.Halted):    "halted",
}

// maxMarks bounds the marks of the charts.
const maxMarks = 100

// showHistory serves throughput, lag and latency of the last day, for the charts, with takeovers, pauses and gaps.
func (p *page) showHistory(response http.ResponseWriter, request *http.Request, call *call) {
	list, err := call.use.Activity.Minutes(call.ctx, call.v.Watcher, admin.AllMinutes)
	if err != nil {
		p.serveProblem(response, request, call, err)
		return
	}
	entries, err := call.use.Operator.Audit(call.ctx, admin.AuditFilter{
		Watcher: call.v.Watcher, Kinds: slices.Sorted(maps.Keys(markTexts)), From: call.v.Now.Add(-24 * time.Hour),
	}, maxMarks, "")
	if err != nil {
		p.serveProblem(response, request, call, err)
		return
	}

	shown := history{Points: make([][5]float64, len(list)), Marks: []mark{}}
	for i, minute := range list {
		shown.Points[i] = [5]float64{float64(minute.At.Unix()), minute.Rate, minute.LagS, minute.P50MS, minute.P99MS}
	}
	for _, entry := range slices.Backward(entries.Items) {
		text := cmp.Or(markTexts[entry.Kind], entry.Kind)
		if entry.Node != "" {
			text += " on " + entry.Node
		}
		shown.Marks = append(shown.Marks, mark{entry.At.Unix(), text, call.v.Link("/log/entry", "id", entry.ID)})
	}
	response.Header().Set("Content-Type", "application/json")
	// An error means that the client has disconnected.
	_ = json.NewEncoder(response).Encode(shown)
}

// waitingList is the data of the page of waiting envelopes.
type waitingList struct {
	Topics []admin.WaitingTopic
	Page   admin.Page[admin.WaitingEnvelope]
	Failed bool // an event of the list may have failed; the actions are on these
}

func showWaiting(call *call) (any, error) {
	var page waitingList
	var err error
	if page.Topics, err = call.use.Waiting.Topics(call.ctx); err == nil {
		page.Page, err = call.use.Waiting.List(call.ctx, call.waitingFilter(), call.pageLimit(), call.value("after"))
	}
	reason := call.value("reason")
	page.Failed = (reason == "" || reason == "retry") && slices.ContainsFunc(page.Topics, func(topic admin.WaitingTopic) bool { return topic.Retry > 0 })
	return page, call.ignoreFirstRun(err)
}

// ignoreFirstRun returns nil if the watcher has read no collection yet: its lists are empty then. A named collection does not exist.
func (c *call) ignoreFirstRun(err error) error {
	if errors.Is(err, admin.ErrNoCollections) && !c.isSet("collection") {
		return nil
	}
	return err
}

// nodeList is the data of the page of nodes.
type nodeList struct {
	Nodes []admin.Node
	Slots []admin.SlotStatus
}

func showNodes(call *call) (any, error) {
	overview, err := call.use.Operator.Overview(call.ctx)
	return nodeList{overview.Nodes, overview.Slots}, err
}

// control is the data of the page with the forms of actions.
type control struct {
	*overview
	Collections []string
	Replays     []admin.ReplayInfo
}

// maxListedReplays is the number of replays on the page.
const maxListedReplays = 20

func showControl(call *call) (any, error) {
	if call.refresh {
		list, err := call.use.Replays.List(call.ctx, maxListedReplays)
		return control{Replays: list}, err
	}

	overview, err := call.use.Operator.Overview(call.ctx)
	if err != nil {
		return nil, err
	}

	// A watcher that never ran has no collections and no replays.
	control := control{overview: newOverview(overview, call.v)}
	if control.Slots == 0 {
		return control, nil
	}

	// A watcher without collections can still be paused and pinned.
	control.Collections, err = call.use.Operator.Collections(call.ctx, "")
	if err != nil && !errors.Is(err, admin.ErrNoCollections) {
		return nil, err
	}
	control.Replays, err = call.use.Replays.List(call.ctx, maxListedReplays)
	return control, err
}
