package consumer

import "github.com/outrelay/outrelay/internal/contract/record"

// HeaderDedupKey is the header whose value replaces the event's id for deduplication: of two events
// with the same value, the second has no effect. Set it with event.WithDedupKey.
const HeaderDedupKey = record.HeaderDedupKey

// dedupID returns the id of m in an inbox, bounded in length.
func dedupID(m *Message) string { return boundIdentity(dedupText(m)) }

// namespaceOf returns what distinguishes the id of m from equal ids of other origins: its Source, or for a message without one the
// topic in which it was published. A Source is hexadecimal or a URI, so it never has the form of such a topic.
func namespaceOf(m *Message) string {
	if m.Source != "" {
		return m.Source
	}
	return "topic " + originOf(m).Topic
}

func dedupText(m *Message) string {
	if v, ok := m.Header(HeaderDedupKey); ok && len(v) > 0 {
		return "dedup:" + string(v)
	}
	return identity(m)
}
