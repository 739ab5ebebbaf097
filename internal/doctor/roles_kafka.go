package doctor

import (
	"slices"
	"strings"
)

// acls are those of the relay, and of consumers where a group is named.
func (m *roleMaker) acls() []ACL {
	relay := m.who.Principal
	if relay == "" && m.cfg.Kafka.SASL != nil {
		relay = "User:" + m.cfg.Kafka.SASL.Username
	}
	if relay == "" {
		relay = "User:<relay>"
	}
	operations := []string{"WRITE", "READ", "DESCRIBE", "DESCRIBE_CONFIGS"}
	why := "records, reading them back at a take-over, partitions, limits"
	if m.cfg.Topics.Create != nil {
		operations, why = append(operations, "CREATE"), why+", and topics on demand"
	}
	var out []ACL
	for _, t := range m.targets() {
		out = append(out, ACL{For: "relay", Principal: relay, Resource: "topic", Name: t.name, Pattern: t.pattern, Operations: operations, Why: why})
	}
	out = append(out, ACL{For: "relay", Principal: relay, Resource: "transactional-id", Name: "outrelay.", Pattern: "prefixed", Operations: []string{"WRITE", "DESCRIBE"}, Why: "fencing of predecessors"})
	if m.who.Group == "" {
		return out
	}
	service := m.who.Consumer
	if service == "" {
		service = "User:<service>"
	}
	for _, t := range m.targets() {
		out = append(out, ACL{For: "consumer", Principal: service, Resource: "topic", Name: t.name, Pattern: t.pattern, Operations: []string{"READ", "DESCRIBE"}, Why: "records"})
	}
	return append(out, ACL{For: "consumer", Principal: service, Resource: "group", Name: m.who.Group, Pattern: "literal", Operations: []string{"READ", "DESCRIBE"}, Why: "members and positions of the group"})
}

type topicPattern struct{ name, pattern string }

// targets are the topics that the configuration lets the relay write: those of topics.allow or, without it, those of the
// template and the rules. An envelope that names a topic of its own is not foreseen here: allow is the place to say which.
func (m *roleMaker) targets() (out []topicPattern) {
	names := slices.Clone(m.cfg.Topics.Allow)
	if len(names) == 0 {
		names = append(names, m.cfg.Topics.Template)
		for _, r := range m.cfg.Topics.Rules {
			names = append(names, r.To...)
		}
	}
	for _, name := range names {
		t := topicPattern{name, "literal"}
		if at := strings.IndexAny(name, "*?{"); at >= 0 {
			t = topicPattern{name[:at], "prefixed"}
		}
		if t.name == "" {
			t = topicPattern{"*", "literal"} // Kafka's word for all
		}
		if !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	return out
}
