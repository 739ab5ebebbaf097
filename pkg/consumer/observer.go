package consumer

import (
	"context"
	"time"
)

// Observer receives the measurements of a consumer, for metrics. Its methods are called from many
// goroutines and must not block. Labels are bounded: names of handlers, topics and partitions,
// actions. handler is "" for messages that no handler takes or that cannot be decoded.
type Observer interface {
	// Handled reports that n messages were handled in one attempt, and how long it took with its commit.
	Handled(handler string, n int, took time.Duration)
	// Duplicates reports n messages that were handled before, according to the inbox.
	Duplicates(handler string, n int)
	// Dropped reports n messages that were dropped by Discard or skipped without being handled.
	Dropped(handler string, n int)
	// Failed reports a failed attempt and what follows, as in HandlerError.Next.
	Failed(handler, next string)
	// Lag reports how many offsets of the partition are not finished. It is called with each fetch,
	// and every few seconds for a partition that is not fetched.
	Lag(topic string, partition int32, n int64)
	// Oldest reports the age of the partition's oldest message that was fetched and is not
	// finished; 0 if there is none. It is called every few seconds.
	Oldest(topic string, partition int32, age time.Duration)
	// Held reports how many messages of all partitions are in memory, and their bytes.
	Held(messages, bytes int64)
	// Running reports how many lanes run a handler.
	Running(n int)
	// Assigned reports that this member has so many partitions in a new generation.
	Assigned(partitions int)
	// Committed reports a commit of offsets, or its error.
	Committed(err error)
	// Suspended reports that fetching has stopped (on) or has resumed. The reason is "paused" or
	// "database".
	Suspended(reason string, on bool)
}

// Unobserved is an Observer that does nothing. Embed it to implement only some of the methods.
type Unobserved struct{}

var _ Observer = Unobserved{}

// Handled does nothing.
func (Unobserved) Handled(string, int, time.Duration) {}

// Duplicates does nothing.
func (Unobserved) Duplicates(string, int) {}

// Dropped does nothing.
func (Unobserved) Dropped(string, int) {}

// Failed does nothing.
func (Unobserved) Failed(string, string) {}

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

// Tracer is called before each attempt at the messages of one transaction, outside of the
// transaction. The handler gets the context that it returns. end is called with the attempt's
// error.
type Tracer func(ctx context.Context, handler string, ms []*Message) (_ context.Context, end func(err error))
