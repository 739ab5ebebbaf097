package consumer

import (
	"context"
	"time"
)

// Observer gets what metrics are made of. Its methods are called from many goroutines and must not block. Labels are
// bounded: names of handlers, topics and partitions, actions. handler is "" for messages that no handler took or that could
// not be decoded.
type Observer interface {
	// Handled: n messages were handled in one go that took so long, the commit included.
	Handled(handler string, n int, took time.Duration)
	// Duplicates: the inbox knew n messages.
	Duplicates(handler string, n int)
	// Dropped: n messages were dropped by ErrDrop, or were let pass unhandled.
	Dropped(handler string, n int)
	// Failed: an attempt failed, and what the policy decided.
	Failed(handler string, action Action)
	// Lag: how many offsets the partition has beyond those that are finished. It is told with each fetch, and every few
	// seconds of a partition that is not fetched.
	Lag(topic string, partition int32, n int64)
	// Oldest: how long ago the oldest message of the partition that is not finished was written; 0 if all that was fetched
	// is finished. It is told every few seconds.
	Oldest(topic string, partition int32, age time.Duration)
	// Held: how many messages of all partitions are held in memory, and their bytes.
	Held(messages, bytes int64)
	// Running: how many lanes run.
	Running(n int)
	// Assigned: a new generation gave that many partitions to this member.
	Assigned(partitions int)
	// Committed: offsets were committed, or could not be.
	Committed(err error)
	// Suspended: nothing is fetched any more, or again; the reason is "paused" or "database".
	Suspended(reason string, on bool)
}

// Unobserved is an Observer that does nothing, to embed in one that does something.
type Unobserved struct{}

var _ Observer = Unobserved{}

// Handled does nothing.
func (Unobserved) Handled(string, int, time.Duration) {}

// Duplicates does nothing.
func (Unobserved) Duplicates(string, int) {}

// Dropped does nothing.
func (Unobserved) Dropped(string, int) {}

// Failed does nothing.
func (Unobserved) Failed(string, Action) {}

// Lag does nothing.
func (Unobserved) Lag(string, int32, int64) {}

// Oldest does nothing.
func (Unobserved) Oldest(string, int32, time.Duration) {}

// Held does nothing.
func (Unobserved) Held(int64, int64) {}

// Running does nothing.
func (Unobserved) Running(int) {}

// Assigned does nothing.
func (Unobserved) Assigned(int) {}

// Committed does nothing.
func (Unobserved) Committed(error) {}

// Suspended does nothing.
func (Unobserved) Suspended(string, bool) {}

// Tracer is called before each attempt at the messages of one transaction, outside of it. The context it returns is that
// of the handler; end is called with the attempt's outcome.
type Tracer func(ctx context.Context, handler string, ms []*Message) (_ context.Context, end func(err error))
