package record

import (
	"strings"
	"time"
)

// Defaults and limits that packages share without importing each other.
const (
	// InboxCollection is the default name of the collection of inbox marks.
	InboxCollection = "inbox"
	// RatesCollection is the collection of the rate limits of handlers.
	RatesCollection = InboxCollection + "_rates"
	// TopicsCollection is the collection of the topics that consumer groups have added.
	TopicsCollection = InboxCollection + "_topics"
	// LetterArchive is how long discarded dead letters stay in the archive by default.
	LetterArchive = 30 * 24 * time.Hour
	// HandlerDeadLetters is the default name of the collection of the dead letters of handlers.
	HandlerDeadLetters = "inbox_dead"

	// MaxEnvelope is the default of the largest envelope, for services and for the relay. It leaves room for the
	// overhead of a record below Kafka's default limit of 1 MiB.
	MaxEnvelope = 900 << 10
	// MaxRecord is the default of the largest record that the relay sends: its payload, key and headers together.
	MaxRecord = 8 << 20
	// MaxHeaders is the largest number of headers of a record.
	MaxHeaders = 4096
	// KeptAttempts is how many failed attempts of one envelope are stored: the latest.
	KeptAttempts = 50
	// MaxResponse bounds a response of Kafka. The metadata of 500,000 partitions take about 25 MB.
	MaxResponse = 32 << 20
)

// Clip returns at most the first n bytes of a text. It replaces invalid UTF-8, which BSON and JSON do not permit.
func Clip(text string, n int) string {
	if len(text) > n {
		text = text[:n]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// Shorten is [Clip] for people: a text that was cut ends with an ellipsis.
func Shorten(text string, n int) string {
	if len(text) <= n {
		return Clip(text, n)
	}
	const ellipsis = "…"
	return strings.ToValidUTF8(text[:max(n-len(ellipsis), 0)], "") + ellipsis
}
