package consumer

import (
	"errors"
	"fmt"
	"time"
)

// CommitMode defines when the consumer commits offsets to the group. In every mode an offset is committed only when all
// messages below it are finished, and a drain commits all finished messages.
type CommitMode struct {
	kind  commitKind
	n     int
	every time.Duration
}

type commitKind uint8

const (
	commitEach commitKind = iota + 1
	commitCount
	commitInterval
	commitDrain
)

// CommitEach commits whenever a finished message lets the offset advance. Messages that finish during a commit share the
// next one.
func CommitEach() CommitMode { return CommitMode{kind: commitEach} }

// CommitCount commits when the offset has advanced over n messages.
func CommitCount(n int) CommitMode { return CommitMode{kind: commitCount, n: n} }

// CommitInterval commits at the interval d if the offset has advanced.
func CommitInterval(d time.Duration) CommitMode { return CommitMode{kind: commitInterval, every: d} }

// CommitOnDrain commits only at a stop, and at a rebalance. After a crash, Kafka delivers
// all messages since the last commit again. The inbox then rejects the messages that were handled.
func CommitOnDrain() CommitMode { return CommitMode{kind: commitDrain} }

// String returns the mode as text, such as "every 100 messages".
func (m CommitMode) String() string {
	switch m.kind {
	case commitEach:
		return "each"
	case commitCount:
		return fmt.Sprintf("every %d messages", m.n)
	case commitInterval:
		return "every " + m.every.String()
	case commitDrain:
		return "on drain"
	}
	return "none"
}

func (m CommitMode) validate() error {
	switch {
	case m.kind == 0:
		return errors.New("no commit mode: use CommitEach, CommitCount, CommitInterval or CommitOnDrain")
	case m.kind == commitCount && m.n < 1:
		return fmt.Errorf("commit after %d messages: it must be positive", m.n)
	case m.kind == commitInterval && m.every <= 0:
		return fmt.Errorf("commit every %v: it must be positive", m.every)
	}
	return nil
}
