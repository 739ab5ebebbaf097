package consumer

import "github.com/outrelay/outrelay/internal/record"

// HeaderDedupKey is the header whose value replaces the event's id for deduplication: of two events
// with the same value, the second has no effect. Set it with event.WithDedupKey.
const HeaderDedupKey = record.HeaderDedupKey

// dedupID returns the id of m in an inbox, bounded in length.
func dedupID(m *Message) string { return boundIdentity(dedupText(m)) }

func dedupText(m *Message) string {
	if v, ok := m.Header(HeaderDedupKey); ok && len(v) > 0 {
		return "dedup:" + string(v)
	}
	return identity(m)
}
