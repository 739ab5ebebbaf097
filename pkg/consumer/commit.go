package consumer

import "time"

// commitMode defines when the consumer commits offsets to the group. In every mode an offset is committed only when all
// messages below it are finished, and a drain commits all finished messages.
type commitMode struct {
	count int           // commits after so many finished messages; 0 does not
	every time.Duration // commits at this interval; 0 does not
}

// WithCommitInterval sets how often offsets are committed. Defaults to 1 s. 0 commits after each message, and a negative
// interval only when partitions are given up: at a stop and at a rebalance. After a crash, Kafka delivers all messages since
// the last commit again, and the inbox rejects the messages that were handled. It replaces WithCommitCount.
func WithCommitInterval(d time.Duration) Option {
	return option(func(s *settings) {
		s.commitMode = commitMode{every: max(d, 0)}
		if d == 0 {
			s.commitMode.count = 1
		}
	})
}

// WithCommitCount commits when n messages are finished since the last commit. A negative n commits only when partitions are
// given up. It replaces WithCommitInterval.
func WithCommitCount(n int) Option {
	return option(func(s *settings) { s.commitMode = commitMode{count: max(n, 0)} })
}
