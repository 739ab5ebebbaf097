package consumer

import (
	"cmp"
	"time"
)

// commitMode defines when the consumer commits offsets to the group. In every mode an offset is committed only when all
// messages below it are finished, and a drain commits all finished messages.
type commitMode struct {
	count int           // commits after so many finished messages; not positive: does not
	every time.Duration // commits at this interval; not positive: does not
}

// WithCommitInterval sets how often offsets are committed. Defaults to 1 s: after a crash, Kafka delivers the messages since the
// last commit again, and the inbox rejects the messages that were handled, so a shorter interval saves little. A negative
// interval means none: then offsets are committed by WithCommitCount, and when partitions are given up: at a stop and at a rebalance.
func WithCommitInterval(interval time.Duration) Option {
	return option(func(settings *settings) { settings.commitMode.every = cmp.Or(interval, defaultCommitInterval) })
}

// WithCommitCount also commits when n messages are finished since the last commit; 1 commits after each message. Defaults to none,
// because each commit is a request to a broker. A negative n means none.
func WithCommitCount(n int) Option {
	return option(func(settings *settings) { settings.commitMode.count = n })
}
