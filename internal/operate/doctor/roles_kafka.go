package doctor

import (
	"cmp"
	"slices"
	"strings"
)

// listACLs returns the ACLs of the relay, and of consumers if a group is configured.
func (m *roleMaker) listACLs() []ACL {
	relay := m.who.Principal
	if sasl := m.cfg.Kafka.SASL; relay == "" && sasl != nil && sasl.Username != "" {
		relay = "User:" + sasl.Username
	}
	// The placeholder makes the command fail until somebody fills in the name.
	if relay == "" {
		relay = "User:<relay>"
	}
	operations := []string{"WRITE", "READ", "DESCRIBE", "DESCRIBE_CONFIGS"}
	why := "write records, read them back at a takeover, describe partitions and limits"
	if m.cfg.Topics.Create != nil {
		operations, why = append(operations, "CREATE"), why+", create topics on demand"
	}

	why += "; grant WRITE to no other principal"
	var out []ACL
	add := func(role, principal, resource, name, pattern, why string, operations ...string) {
		out = append(out, ACL{
			For: role, Principal: principal, Resource: resource, Name: name, Pattern: pattern, Operations: operations, Why: why,
		})
	}
	for _, t := range m.topicPatterns() {
		add("relay", relay, "topic", t.name, t.pattern, why, operations...)
	}
	add("relay", relay, "transactional-id", "outrelay.", "prefixed", "fence previous owners", "WRITE", "DESCRIBE")
	if m.who.Group == "" {
		return out
	}

	service := cmp.Or(m.who.Consumer, "User:<service>")
	for _, t := range m.topicPatterns() {
		add("consumer", service, "topic", t.name, t.pattern, "read records", "READ", "DESCRIBE")
	}
	add("consumer", service, "group", m.who.Group, "literal", "join the group and commit its offsets", "READ", "DESCRIBE")
	return out
}

type topicPattern struct{ name, pattern string }

// topicPatterns returns the topics that the relay may write by its configuration: topics.allow, or
// without it the topics of the template and the rules. Topics that only envelopes name are not
// included unless topics.allow lists them.
func (m *roleMaker) topicPatterns() (out []topicPattern) {
	names := slices.Clone(m.cfg.Topics.Allow)
	if len(names) == 0 {
		names = append(names, m.cfg.Topics.Template)
		for _, r := range m.cfg.Topics.Rules {
			names = append(names, r.To...)
		}
	}

	for _, name := range names {
		pattern := topicPattern{name, "literal"}
		// ACLs have no pattern except a prefix, so a pattern is cut at its first variable part.
		if at := strings.IndexAny(name, "*?{"); at >= 0 {
			pattern = topicPattern{name[:at], "prefixed"}
		}
		// An empty prefix stands for all topics.
		if pattern.name == "" {
			pattern = topicPattern{"*", "literal"}
		}

		if !slices.Contains(out, pattern) {
			out = append(out, pattern)
		}
	}
	return out
}
