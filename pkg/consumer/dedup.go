package consumer

import (
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// HeaderDedupKey is the header whose value replaces the event's id for deduplication: of two events
// with the same value, the second has no effect. Set it with event.WithDedupKey.
const HeaderDedupKey = record.HeaderDedupKey

// dedupID returns the id of message in an inbox, bounded in length.
func dedupID(message *Message) string { return boundIdentity(dedupText(message)) }

// namespaceOf returns what distinguishes the id of message from equal ids of other origins: its Source, or for a message without one the
// topic in which it was published. A Source is hexadecimal or a URI, so it never has the form of such a topic.
func namespaceOf(message *Message) string {
	if message.Source != "" {
		return message.Source
	}
	return "topic " + originOf(message).Topic
}

// The prefixes of identities that are not the plain id of a message.
const (
	prefixDedupKey = "dedup:"
	prefixString   = "string:"
	prefixDigest   = "sha256:" // of boundIdentity
)

// dedupText returns the id of message in an inbox. Different messages never have the same one: a string that looks like an id of another
// type, or that begins like another identity, has a prefix.
func dedupText(message *Message) string {
	if key, ok := message.Header(HeaderDedupKey); ok && len(key) > 0 {
		return prefixDedupKey + string(key)
	}

	_, looksLikeOther := message.Header(record.HeaderIDType)
	beginsLike := func(prefix string) bool { return strings.HasPrefix(message.ID, prefix) }
	if looksLikeOther || slices.ContainsFunc([]string{prefixDedupKey, prefixString, prefixDigest}, beginsLike) {
		return prefixString + message.ID
	}
	return message.ID
}
