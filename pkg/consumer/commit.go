package consumer

import (
	"fmt"
	"time"
)

// CommitMode says when the offsets of what is finished are committed to the group. Whatever it is, an offset is committed
// only when everything below it is finished, and what is finished is committed at a drain.
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

// CommitEach commits whenever a message lets the offset advance; those that finish during a commit share the next one.
func CommitEach() CommitMode { return CommitMode{kind: commitEach} }

// CommitCount commits when the offset has advanced over n messages.
func CommitCount(n int) CommitMode { return CommitMode{kind: commitCount, n: n} }

// CommitInterval commits at that interval, if anything is new.
func CommitInterval(d time.Duration) CommitMode { return CommitMode{kind: commitInterval, every: d} }

// CommitOnDrain commits at a stop and at a rebalance alone, and where Consumer.Commit is called. After a crash everything
// since then is delivered again, for the inbox to refuse.
func CommitOnDrain() CommitMode { return CommitMode{kind: commitDrain} }

// String names the mode.
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
		return fmt.Errorf("the commit mode is none of CommitEach, CommitCount, CommitInterval, CommitOnDrain")
	case m.kind == commitCount && m.n < 1:
		return fmt.Errorf("commit after %d messages: it must be positive", m.n)
	case m.kind == commitInterval && m.every <= 0:
		return fmt.Errorf("commit every %v: it must be positive", m.every)
	}
	return nil
}
