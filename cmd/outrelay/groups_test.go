package main

import (
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// A group without members is described once, and the id of a member does not repeat that of its client.
func TestAGroupIsWrittenWithoutRepeats(t *testing.T) {
	t.Parallel()
	const library = "report@vm (github.com/segmentio/kafka-go)"
	committed := int64(3)
	partition := admin.GroupPartition{Topic: "orders", Committed: &committed}
	var out strings.Builder
	writeGroup(&out, admin.Group{Group: "g", State: "Empty", Partitions: []admin.GroupPartition{partition}})
	if strings.Count(out.String(), "no member runs") != 1 || !strings.Contains(out.String(), "orders") {
		t.Errorf("an empty group:\n%s", out.String())
	}

	out.Reset()
	partition.Member = library + "-0b1c"
	writeGroup(&out, admin.Group{
		Group: "g", State: "Stable", Partitions: []admin.GroupPartition{partition},
		Members: []admin.GroupMember{{ID: partition.Member, ClientID: library, Host: "10.0.0.7"}, {ID: "one-99", Instance: "one", ClientID: "other", Host: "10.0.0.8"}},
	})
	if strings.Count(out.String(), library) != 1 || strings.Count(out.String(), "0b1c") != 2 || strings.Contains(out.String(), "one-99") {
		t.Errorf("a group with members:\n%s", out.String())
	}
}

func TestGroupsAreShownWithMembersLagAndStops(t *testing.T) {
	t.Parallel()
	c := newClinic(t)
	c.env = append(c.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(stacktest.Brokers(t), ","))
	c.publish("OrderPlaced", "good 1", "good 2", "late 1")
	c.untilHandled("report good 1", "report good 2", "report late 1", "invoice good 1", "invoice good 2")

	show := func() (group admin.Group) {
		c.runCommand(0, &group, "groups", "show", c.group)
		return group
	}
	var group admin.Group
	stacktest.Eventually(t, "the committed offset and the message that waits", func() bool {
		group = show()
		return len(group.Partitions) == 1 && group.Lag != nil && *group.Lag == 0 && len(group.Handlers) == 1
	})
	if group.State != "Stable" || len(group.Members) != 1 || group.Members[0].Partitions != 1 || group.Members[0].Host == "" || group.Unassigned+group.Idle != 0 || group.Problem != "" {
		t.Errorf("unexpected group %+v", group)
	}
	if p := group.Partitions[0]; p.Topic != c.topic || *p.Committed != 3 || *p.End != 3 || p.Member != group.Members[0].ID {
		t.Errorf("unexpected partition %+v", p)
	}
	if h := group.Handlers[0]; h.Handler != "invoice" || h.Waiting != 1 || h.FailedAt == nil || h.Suspended+h.Paused != 0 || h.Until == nil || h.Reason != "no response" {
		t.Errorf("unexpected handler %+v", h)
	}

	// A handler that a program has paused leaves a lag.
	c.member.PauseHandler("report")
	c.publish("OrderPlaced", "good 3")
	c.untilHandled("invoice good 3")
	stacktest.Eventually(t, "the paused handler", func() bool {
		group = show()
		return slices.ContainsFunc(group.Handlers, func(h admin.GroupHandler) bool { return h.Handler == "report" && h.Paused == 1 })
	})
	text := c.runCommand(0, nil, "groups", "show", c.group)
	for _, want := range []string{"report paused in 1 member", c.topic, "invoice", group.Members[0].Name()} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in:\n%s", want, text)
		}
	}

	// The group is known from MongoDB, although no relay has reported the topic.
	for _, args := range [][]string{{"groups", "list"}, {"groups", "list", "--all"}} {
		var list admin.GroupList
		c.runCommand(0, &list, args...)
		if !slices.ContainsFunc(list.Groups, func(g admin.Group) bool { return g.Group == c.group && len(g.Members) == 1 }) || len(list.Problems) > 0 {
			t.Errorf("%v: %+v", args, list)
		}
	}
	if text := c.runCommand(0, nil, "groups", "list"); !strings.Contains(text, c.group) || strings.Count(text, "\n") > 3 {
		t.Errorf("unexpected output:\n%s", text)
	}

	c.member.ResumeHandler("report")
	c.untilHandled("report good 3")
	stacktest.Eventually(t, "the end of the pause", func() bool { return len(show().Handlers) == 1 })

	for name, args := range map[string][]string{"no group": {"show"}, "an unknown group": {"show", c.group + "-none"}} {
		if code, _, errOut := runCommand(t, c.env, append([]string{"groups"}, args...)...); code == 0 || errOut == "" {
			t.Errorf("%s: code %d, %q", name, code, errOut)
		}
	}
}

// Kafka is the cause of an outage of Kafka, and no figure is shown that was not read.
func TestAnOutageOfKafkaIsNamedInGroups(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 0)
	// The listener accepts connections, and no program responds.
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })

	for _, broker := range []string{"127.0.0.1:1", listener.Addr().String()} {
		env := append(slices.Clone(g.env), "OUTRELAY_KAFKA_BROKERS="+broker)
		for _, args := range [][]string{{"groups", "list"}, {"groups", "show", "office"}} {
			code, out, errOut := runCommand(t, env, args...)
			if code != exitTemporary || out != "" || !strings.Contains(errOut, "Kafka does not") || !strings.Contains(errOut, broker) {
				t.Errorf("%v with %s: %d\n%s%s", args, broker, code, out, errOut)
			}
		}
	}

	var out strings.Builder
	unread := admin.Group{Group: "office", Problem: "Kafka has no coordinator"}
	writeGroup(&out, unread)
	writeGroups(&out, admin.GroupList{Groups: []admin.Group{unread}})
	if text := out.String(); strings.ContainsAny(text, "0123456789") || strings.Contains(text, "read no partition") || strings.Count(text, unread.Problem) != 2 {
		t.Errorf("a group that cannot be read:\n%s", text)
	}
}
