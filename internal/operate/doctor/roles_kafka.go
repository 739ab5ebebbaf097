package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/relay/connect"
)

// missingPrincipals are the reasons why the ACLs of a user cannot be printed, with the settings that name the user.
var missingPrincipals = map[string]string{
	forRelay:    "the Kafka principal of the relay is not known: pass --principal, such as User:relay or User:CN=relay, or set kafka.sasl.username",
	forConsumer: "the Kafka principal of the consumers is not known: pass --consumer-principal, such as User:shipping",
}

// Commands returns the commands of kafka-acls.sh. It fails if the brokers or the name of a user are not known: a placeholder would be a
// valid name, and Kafka would create ACLs for a user that does not exist.
func (r Roles) Commands(brokers []string) (string, error) {
	var builder strings.Builder
	for _, a := range r.Kafka {
		if a.Principal == "" {
			return "", fmt.Errorf("roles: %s", missingPrincipals[a.For])
		}
		fmt.Fprintf(&builder, "# the %s: %s\nkafka-acls.sh --bootstrap-server %s --command-config admin.properties --add --allow-principal '%s' --operation %s --%s '%s'", a.For, a.Why,
			strings.Join(brokers, ","), a.Principal, strings.Join(a.Operations, " --operation "), a.Resource, a.Name)
		if a.Pattern == "prefixed" {
			builder.WriteString(" --resource-pattern-type prefixed")
		}
		builder.WriteString("\n")
	}
	// A reference to a variable that is not set here is an empty broker.
	if strings.Join(brokers, "") == "" {
		return "", errors.New("roles: the brokers of Kafka are not known: set kafka.brokers, such as OUTRELAY_KAFKA_BROKERS=kafka:9092")
	}
	return builder.String(), nil
}

// typePrincipal returns a principal with its type, which kafka-acls.sh requires. Without one, it is a user.
func typePrincipal(name string) string {
	if name == "" || strings.Contains(name, ":") {
		return name
	}
	return "User:" + name
}

// listACLs returns the ACLs of the relay, and of consumers if a group is configured.
func (m *roleMaker) listACLs() []ACL {
	relay := cmp.Or(m.who.Principal, connect.ConfiguredPrincipal(m.cfg))
	operations := []string{"WRITE", "READ", "DESCRIBE", "DESCRIBE_CONFIGS"}
	why := "write records, read them back at a takeover, describe partitions and limits"
	if m.cfg.Topics.Create != nil {
		operations, why = append(operations, "CREATE"), why+", create topics on demand"
	}

	why += "; grant WRITE to no other principal"
	var out []ACL
	add := func(role, principal, resource, name, pattern, why string, operations ...string) {
		out = append(out, ACL{
			For: role, Principal: typePrincipal(principal), Resource: resource, Name: name, Pattern: pattern, Operations: operations, Why: why,
		})
	}
	for _, t := range m.topicPatterns() {
		add(forRelay, relay, "topic", t.name, t.pattern, why, operations...)
	}
	add(forRelay, relay, "transactional-id", "outrelay.", "prefixed", "fence previous owners", "WRITE", "DESCRIBE")
	if m.who.Group == "" {
		return out
	}

	for _, t := range m.topicPatterns() {
		add(forConsumer, m.who.Consumer, "topic", t.name, t.pattern, "read records", "READ", "DESCRIBE")
	}
	add(forConsumer, m.who.Consumer, "group", m.who.Group, "literal", "join the group and commit its offsets", "READ", "DESCRIBE")
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
