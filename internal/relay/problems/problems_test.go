package problems

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

var now = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func ago(age time.Duration) *time.Time {
	at := now.Add(-age)
	return &at
}

func lagOf(seconds float64) *float64 { return &seconds }

func liveNode(name string) nodes.Node {
	return nodes.Node{Node: name, Watchers: []string{"orders"}, KafkaReachable: true, SeenAt: now}
}

func liveSlot(change func(*SlotStatus)) SlotStatus {
	slot := SlotStatus{Name: "orders", Slot: "0of1", Owner: "n1/1", Node: "n1", ExpiresInMS: 4000, State: "live"}
	if change != nil {
		change(&slot)
	}
	return slot
}

// Each fact gives its problems, and what follows from one of them is not in the list.
func TestFactsAndTheirProblems(t *testing.T) {
	t.Parallel()
	two := []nodes.Node{liveNode("n1"), liveNode("n2")}
	of := func(change func(*SlotStatus)) Facts { return Facts{Slots: []SlotStatus{liveSlot(change)}, Nodes: two} }
	rule := func(id string, status health.Status, n int64) *health.Report {
		return &health.Report{Checks: []health.Check{{ID: id, Status: status, Detail: "x", N: n}}}
	}

	for name, c := range map[string]struct {
		facts Facts
		want  []string
	}{
		"nothing is known": {Facts{}, nil},
		"all is well":      {of(nil), nil},
		"paused":           {of(func(s *SlotStatus) { s.Paused, s.LagS = true, lagOf(100) }), []string{"warn paused/orders"}},
		"no owner":         {of(func(s *SlotStatus) { s.State, s.LagS = "no-owner", lagOf(100) }), []string{"fail no_owner/orders"}},
		"halted, and its step": {of(func(s *SlotStatus) {
			s.State, s.Problems = "halted", []SlotProblem{{Part: "halted", Text: "x", ForS: 90}}
		}), []string{"fail halted/orders"}},
		"one of two slots": {of(func(s *SlotStatus) { s.Slot, s.State = "1of2", "no-owner" }), []string{"fail no_owner/orders/1of2"}},
		"lag":              {of(func(s *SlotStatus) { s.LagS = lagOf(11) }), []string{"warn lagging/orders"}},
		"a long lag":       {of(func(s *SlotStatus) { s.LagS = lagOf(301) }), []string{"fail lagging/orders"}},
		"a lag that a topic explains": {of(func(s *SlotStatus) {
			s.LagS, s.Unwritable = lagOf(100), []UnwritableTopic{{Topic: "a", Reason: "r", ForS: 100}}
			s.Problems = []SlotProblem{{Part: "stuck", Text: "topic a", ForS: 100}}
		}), []string{"warn topic_unwritable/a"}},
		"a topic of two slots": {Facts{Nodes: two, Slots: []SlotStatus{
			liveSlot(func(s *SlotStatus) {
				s.Slot, s.Unwritable = "0of2", []UnwritableTopic{{Topic: "a", Since: *ago(time.Hour), ForS: 3600}}
			}),
			liveSlot(func(s *SlotStatus) {
				s.Slot, s.Unwritable = "1of2", []UnwritableTopic{{Topic: "a", Since: now}, {Topic: "b"}}
			}),
		}}, []string{"fail topic_unwritable/a", "warn topic_unwritable/b"}},
		"steps": {of(func(s *SlotStatus) {
			for _, part := range []string{"ledger", "stream", "standstill", "mongodb", "kafka reachable", "sweep"} {
				s.Problems = append(s.Problems, SlotProblem{Part: part, Text: "x", ForS: 31})
			}
			s.Problems = append(s.Problems, SlotProblem{Part: "lease", Text: "a failover", ForS: 5})
		}), []string{
			"fail mongodb_unreachable/orders", "fail kafka_unreachable/n1", "fail stream_stopped/orders", "fail write_rejected/orders", "fail position_stopped/orders",
			"fail step_fails/orders",
		}},
		"a purge that fails": {of(func(s *SlotStatus) {
			s.Problems = []SlotProblem{{Part: "purge", Object: "shop.outbox", Text: "x", ForS: 31}, {Part: "purge", Object: "shop.other", Text: "x", ForS: 31}}
		}), []string{"warn purge_fails/shop.other", "warn purge_fails/shop.outbox"}},
		"a purge that fails in an outage": {of(func(s *SlotStatus) {
			s.Problems = []SlotProblem{{Part: "mongodb", Text: "x", ForS: 31}, {Part: "purge", Object: "shop.outbox", Text: "x", ForS: 31}}
		}), []string{"fail mongodb_unreachable/orders"}},
		"the steps of this process replace the stored ones": {Facts{
			Watcher: "orders", Nodes: two, Node: "n1", Slots: of(func(s *SlotStatus) { s.Problems = []SlotProblem{{Part: "ledger", Text: "x", ForS: 31}} }).Slots,
			Own: []OwnSteps{{Object: "orders", Steps: []readiness.Problem{{Part: "lease", Text: "y", Fatal: true}}}},
		}, []string{"fail step_fails/orders"}},
		"the steps of a standby do not replace those of the owner": {Facts{
			Watcher: "orders", Nodes: two, Node: "n2", Slots: of(func(s *SlotStatus) { s.Problems = []SlotProblem{{Part: "ledger", Text: "x", ForS: 31}} }).Slots,
			Own: []OwnSteps{{Object: "orders"}},
		}, []string{"fail write_rejected/orders"}},
		"a gap": {of(func(s *SlotStatus) { s.Gap, s.LagS = "oplog", lagOf(100) }), []string{"warn gap_open/orders"}},
		"oplog": {Facts{Nodes: two, Oplog: Oplog{Oldest: *ago(10 * time.Hour), Newest: now}, Slots: []SlotStatus{
			liveSlot(func(s *SlotStatus) { s.Slot, s.PositionAt = "0of3", ago(4*time.Hour) }),
			liveSlot(func(s *SlotStatus) { s.Slot, s.PositionAt = "1of3", ago(6*time.Hour) }),
			liveSlot(func(s *SlotStatus) { s.Slot, s.PositionAt = "2of3", ago(11*time.Hour) }),
		}}, []string{"fail oplog_used/orders/2of3", "warn oplog_used/orders/1of3"}},
		"an oplog that is not full": {Facts{Nodes: two, Oplog: Oplog{*ago(10 * time.Hour), now, true}, Slots: []SlotStatus{
			liveSlot(func(s *SlotStatus) { s.PositionAt = ago(11 * time.Hour) }),
		}}, []string{}},
		"one node": {Facts{Slots: of(nil).Slots, Nodes: two[:1]}, []string{"warn no_standby/orders"}},
		"no node":  {Facts{Nodes: []nodes.Node{}}, []string{"fail no_owner/orders"}},
		"sick nodes": {Facts{Slots: of(nil).Slots, Nodes: []nodes.Node{
			{Node: "n1", Watchers: []string{"orders"}},
			{Node: "n2", Watchers: []string{"orders"}, KafkaReachable: true, ClockAheadMS: -2500},
			{Node: "n5", Watchers: []string{"orders"}, LastAck: ago(5 * time.Second), SeenAt: now},
			{Node: "n3", Watchers: []string{"orders"}, AgeMS: 60_000},
			{Node: "n4", Watchers: []string{"other"}, AgeMS: 60_000},
		}}, []string{"warn kafka_unreachable/n1", "warn node_stale/orders", "warn clock/n2"}},
		"letters":    {Facts{Letters: &Letters{Relay: 2, Handlers: 3}}, []string{"warn dead_letters/orders"}},
		"no letters": {Facts{Letters: &Letters{}}, nil},
		"handlers that fail": {Facts{Retries: []Retry{{Group: "g", Handler: "h", Messages: 3, Since: *ago(time.Hour)}, {Group: "g", Handler: "new", Since: *ago(time.Minute)}}}, []string{
			"warn handler_retries/orders",
		}},
		"handlers that fail since a moment": {Facts{Retries: []Retry{{Group: "g", Handler: "h", Messages: 3, Since: *ago(14 * time.Minute)}}}, nil},
		"many letters":                      {Facts{Letters: &Letters{Relay: 2}, Health: rule(health.DeadLettersRule, health.Degraded, 0)}, []string{"fail dead_letters/orders"}},
		"outboxes": {Facts{Unreadable: []outboxes.Finding{{NS: "a.b", Cause: "c", Fatal: true}, {NS: "a.c", Cause: "c"}}}, []string{
			"fail outbox_not_readable/a.b", "warn outbox_not_readable/a.c",
		}},
		"a missing name": {Facts{Unreadable: []outboxes.Finding{
			{NS: "a.b", Kind: outboxes.IsMissing, Cause: "c", NothingToRead: true, Since: *ago(5 * time.Minute)},
			{NS: "a.c", Kind: outboxes.IsMissing, Cause: "c", NothingToRead: true, Since: *ago(time.Minute)},
			{NS: "a.d", Kind: outboxes.IsMissing, Cause: "c", NothingToRead: true},
			{NS: "a.e", Kind: outboxes.IsMissing, Cause: "c", Since: *ago(time.Hour)},
		}}, []string{
			"fail outbox_not_readable/a.b", "warn outbox_not_readable/a.c", "warn outbox_not_readable/a.d", "warn outbox_not_readable/a.e",
		}},
		"counting":  {Facts{Health: rule(health.CountingRule, health.Unhealthy, 0)}, []string{"fail counts_fail/orders"}},
		"no counts": {Facts{CountsFail: "x"}, []string{"warn counts_fail/orders"}},
		"waiting":   {Facts{Health: rule(health.WaitingRule, health.Degraded, 4)}, []string{"warn waiting_stuck/orders"}},
		"few wait":  {Facts{Health: rule(health.WaitingRule, health.OK, 4)}, nil},
		"overdue":   {Facts{Health: rule(health.OverdueRule, health.Degraded, 1)}, []string{"warn scheduled_overdue/orders"}},
		"both losses": {of(func(s *SlotStatus) {
			s.Incidents = []Incident{{ID: "1", At: now, Lost: &LostHistory{To: now}}, {ID: "2", At: now, Lost: &LostHistory{To: now}}}
		}), []string{"warn lost_history/1", "warn lost_history/2"}},
		"a drop": {of(func(s *SlotStatus) {
			s.Incidents = []Incident{{ID: "1", At: now, Discarded: &Discarded{NS: "shop.outbox", Events: 1}}}
		}), []string{
			"warn events_discarded/1",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.facts.Now, c.facts.Watcher = now, "orders"
			var got []string
			for _, p := range List(c.facts) {
				got = append(got, string(p.Severity)+" "+p.ID)
				spec := SpecOf(p.Kind)
				if p.Title == "" || p.Consequence == "" || p.Fix == "" || !slices.Contains(spec.Severities, p.Severity) {
					t.Errorf("%+v", p)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// An outage of Kafka hides the lag and the topics that follow from it, in the list of the owner as in the list of a command, from its first
// heartbeat to the failed steps.
func TestAnOutageOfKafkaHidesItsSymptomsInEachList(t *testing.T) {
	t.Parallel()
	away := liveNode("n1")
	away.KafkaReachable = false

	for age, want := range map[time.Duration]string{
		11 * time.Second: "warn kafka_unreachable/n1",
		20 * time.Second: "warn kafka_unreachable/n1",
		40 * time.Second: "fail kafka_unreachable/n1",
	} {
		step := readiness.Problem{Part: "kafka reachable", Text: "no broker responds", Since: now.Add(-age), For: age}
		slot := liveSlot(func(s *SlotStatus) {
			s.LagS = lagOf(age.Seconds())
			s.Problems = []SlotProblem{{Part: step.Part, Text: step.Text, Since: step.Since, ForS: age.Seconds()}}
		})
		if age > 15*time.Second {
			slot.Unwritable = []UnwritableTopic{{Topic: "a", Kind: kafkawire.TopicUnreachable, Reason: "r", ForS: 20}}
		}

		command := Facts{Watcher: "orders", Now: now, Slots: []SlotStatus{slot}, Nodes: []nodes.Node{away, liveNode("n2")}}
		owner := command
		owner.Node, owner.Own = "n1", []OwnSteps{{Object: "orders", Steps: []readiness.Problem{step}}}
		for name, facts := range map[string]Facts{"command": command, "owner": owner} {
			var got []string
			for _, problem := range List(facts) {
				got = append(got, string(problem.Severity)+" "+problem.ID)
			}
			if !slices.Equal(got, []string{want}) {
				t.Errorf("%s after %s: got %q, want %q", name, age, got, want)
			}
		}
	}
}

// The problem has the age of each node, and its fix names all of them. No name is at the begin of a sentence, where the page would change
// its first letter.
func TestSilentNodesAreNamedWithTheirAge(t *testing.T) {
	t.Parallel()
	silent := func(name string, age time.Duration) nodes.Node {
		return nodes.Node{Node: name, Watchers: []string{"orders"}, AgeMS: age.Milliseconds(), SeenAt: now.Add(-age)}
	}
	first, second := silent("vm-ad28", 90*time.Second), silent("vm-d466", 447*time.Second)

	for _, c := range []struct {
		nodes       []nodes.Node
		detail, fix string
	}{
		{[]nodes.Node{first}, "no heartbeat from vm-ad28 for 1m30s", "start it again, or run outrelay nodes remove vm-ad28 if it is gone permanently"},
		{
			[]nodes.Node{first, second},
			"no heartbeat from vm-ad28 for 1m30s, vm-d466 for 7m27s",
			"start them again, or run outrelay nodes remove for each that is gone permanently: vm-ad28, vm-d466",
		},
	} {
		list := List(Facts{Now: now, Watcher: "orders", Slots: []SlotStatus{liveSlot(nil)}, Nodes: append([]nodes.Node{liveNode("n1"), liveNode("n2")}, c.nodes...)})
		if len(list) != 1 || list[0].Detail != c.detail || list[0].Fix != c.fix || list[0].Count != int64(len(c.nodes)) {
			t.Errorf("%+v, want %q, %q", list, c.detail, c.fix)
		}
	}
}

// The list has the slots of all watchers, and a command acts on the configured watcher unless it names another.
func TestTheFixForAnotherWatcherNamesIt(t *testing.T) {
	t.Parallel()
	for fix, change := range map[string]func(*SlotStatus){
		"outrelay resume --watcher bills --slot 1of2":                                 func(s *SlotStatus) { s.Paused, s.Slot = true, "1of2" },
		"start node n7, or run outrelay pin --off --watcher bills":                    func(s *SlotStatus) { s.State, s.Pin = "no-owner", "n7" },
		"wait; outrelay status shows the progress; run commands with --watcher bills": func(s *SlotStatus) { s.Gap = "oplog" },
		"let the watcher continue, or make the oplog larger (replSetResizeOplog)":     func(s *SlotStatus) { s.PositionAt = ago(11 * time.Hour) },
		"check consumers without an inbox, then run outrelay problems acknowledge 1 --watcher bills": func(s *SlotStatus) {
			s.Incidents = []Incident{{ID: "1", Lost: &LostHistory{}}}
		},
	} {
		slot := liveSlot(change)
		slot.Name = "bills"
		bills := liveNode("n2")
		bills.Watchers = []string{"bills"}

		list := List(Facts{
			Now: now, Watcher: "orders", Slots: []SlotStatus{liveSlot(nil), slot}, Oplog: Oplog{Oldest: *ago(10 * time.Hour), Newest: now},
			Nodes: []nodes.Node{liveNode("n1"), liveNode("n3"), bills, bills},
		})
		if len(list) != 1 || list[0].Fix != fix {
			t.Errorf("%+v, want the fix %q", list, fix)
		}
	}
}

// The number of waiting events is that of the store, which also has the events after them.
func TestATopicCountsWhatWaits(t *testing.T) {
	t.Parallel()
	slot := liveSlot(func(s *SlotStatus) {
		s.Unwritable = []UnwritableTopic{{Topic: "a", Reason: `topic "a" does not exist; create it`, Since: *ago(time.Minute), ForS: 60, Count: 3}}
	})
	list := List(Facts{Now: now, Watcher: "orders", Slots: []SlotStatus{slot}, Waiting: map[string]Waiting{"a": {Events: 48}}})
	if len(list) != 1 || list[0].Count != 48 || list[0].Detail != "it does not exist; create it" || !list[0].Since.Equal(*ago(time.Minute)) || list[0].ForS != 60 {
		t.Errorf("%+v", list)
	}
}

// The fix and the command of a topic that was deleted or has too few partitions contain the number that it needs.
func TestTheFixOfATopicNamesItsPartitions(t *testing.T) {
	t.Parallel()
	facts := Facts{Now: now, Watcher: "orders", TopicCommand: func(topic, kind string, partitions int) string { return fmt.Sprint(topic, " ", kind, " ", partitions) }}

	for _, c := range []struct {
		topic        UnwritableTopic
		fix, command string
	}{
		{UnwritableTopic{Topic: "a", Kind: "missing"}, "outrelay topics create a, or let the relay create missing topics with topics.create", "a missing 0"},
		{UnwritableTopic{Topic: "a", Kind: "missing", Partitions: 6}, "outrelay topics create a --partitions 6, or grant DESCRIBE if the topic exists", "a missing 6"},
		{UnwritableTopic{Topic: "a", Kind: "too_small", Partitions: 6}, "outrelay topics create a --partitions 6, which adds the missing partitions", "a too_small 6"},
		{UnwritableTopic{Topic: "a", Kind: "forbidden"}, SpecOf(TopicUnwritable).Fix, ""},
	} {
		facts.Slots = []SlotStatus{liveSlot(func(s *SlotStatus) { s.Unwritable = []UnwritableTopic{c.topic} })}
		list := List(facts)
		if len(list) != 1 || list[0].Fix != c.fix || list[0].Command != c.command || list[0].Partitions != c.topic.Partitions {
			t.Errorf("%+v: %+v", c.topic, list)
		}
	}
}

// A process that runs need not be started: a slot between two owners names the nodes that can take over, and a slot without any node its
// last owner.
func TestAMissingOwnerNamesTheNextStep(t *testing.T) {
	t.Parallel()
	slot := liveSlot(func(s *SlotStatus) { s.State, s.ExpiresInMS = "no-owner", -2000 })
	gone := liveNode("n1")
	gone.AgeMS = 60_000

	for _, c := range []struct {
		nodes       []nodes.Node
		detail, fix string
	}{
		{[]nodes.Node{gone}, "no process runs it; its last owner was node n1", "start outrelay run"},
		{
			[]nodes.Node{gone, liveNode("n3"), liveNode("n2")},
			"no process has its lease; live nodes: n2, n3",
			"wait some seconds for a takeover; if the problem stays, the logs of the live nodes name the step that fails",
		},
	} {
		list := List(Facts{Now: now, Watcher: "orders", Slots: []SlotStatus{slot}, Nodes: c.nodes})
		if list[0].Kind != NoOwner || list[0].Detail != c.detail || list[0].Fix != c.fix {
			t.Errorf("got %+v, want %q and %q", list[0], c.detail, c.fix)
		}
	}
}

// The unit follows the count as in speech.
func TestAUnitAgreesWithItsCount(t *testing.T) {
	t.Parallel()
	for letters, want := range map[Letters]string{{Relay: 1}: "dead letter", {Relay: 1, Handlers: 1}: "dead letters"} {
		if list := List(Facts{Now: now, Watcher: "orders", Letters: &letters}); list[0].Unit != want {
			t.Errorf("%+v: got %q, want %q", letters, list[0].Unit, want)
		}
	}
	for plural, singular := range singularUnits {
		if singular == plural || singular == "" {
			t.Errorf("%q: %q", plural, singular)
		}
	}
}

// Problems of one kind and object are one problem, whose detail has all causes.
func TestDetailsOfProblemsNameEveryCause(t *testing.T) {
	t.Parallel()
	steps := func(name string, ages ...float64) SlotStatus {
		return liveSlot(func(slot *SlotStatus) {
			slot.Slot, slot.Node = name, "n1"
			for i, part := range []string{"ledger", "transactions", "kafka reachable"}[:len(ages)] {
				slot.Problems = append(slot.Problems, SlotProblem{Part: part, Text: part + " fails", ForS: ages[i]})
			}
		})
	}

	for name, c := range map[string]struct {
		facts Facts
		want  []string
	}{
		"two parts of a slot":   {Facts{Slots: []SlotStatus{steps("0of1", 40, 50)}}, []string{"ledger: ledger fails; transactions: transactions fails"}},
		"one part of two slots": {Facts{Slots: []SlotStatus{steps("0of2", 0, 0, 40), steps("1of2", 0, 0, 60)}}, []string{"kafka reachable: kafka reachable fails"}},
		"many new letters": {Facts{
			Letters: &Letters{Relay: 2, Handlers: 3},
			Health:  &health.Report{Checks: []health.Check{{ID: health.DeadLettersRule, Status: health.Degraded, Detail: "120 new within 60s"}}},
		}, []string{"2 of the relay, 3 of handlers, neither requeued nor discarded; 120 new within 60s"}},
		"two handlers": {Facts{Retries: []Retry{
			{Group: "shop", Handler: "invoice", Messages: 3, Since: *ago(125 * time.Minute)}, {Group: "shop", Handler: "mail", Messages: 1, Since: *ago(time.Hour)},
		}}, []string{"handler invoice of group shop for 2h5m0s, handler mail of group shop for 1h0m0s"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.facts.Now, c.facts.Watcher = now, "orders"
			var got []string
			for _, problem := range List(c.facts) {
				got = append(got, problem.Detail)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// TestAnOldCountIsShownWithItsAge: a problem that is a count has its age, if the count is not of the present.
func TestAnOldCountIsShownWithItsAge(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]string{5 * time.Second: "discarded", 45 * time.Second: "; counted 45s ago"} {
		list := List(Facts{Now: now, Watcher: "orders", CountedAt: now.Add(-age), Letters: &Letters{Relay: 1}})
		if len(list) != 1 || !strings.HasSuffix(list[0].Detail, want) {
			t.Errorf("%s: %+v", age, list)
		}
	}
}
