// Package telemetry connects outbox and consumer to tracing and metrics systems, without their types in the API.
//
// OTel uses the global providers of OpenTelemetry. Prometheus serves a page for a Prometheus server. To use another system,
// implement Sink, and embed Discard.
//
// Blocking: a Sink must not block, because outbox and consumer call it on the path of each message. Cost: OTel
// records nothing while no reader or span processor is registered, and Discard does nothing.
package telemetry

import (
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
)

// Sink receives measurements and starts spans. Its methods are called from many goroutines and must not block. An
// implementation must embed Discard, so that later versions can add methods.
type Sink interface {
	// Measure records one measurement.
	Measure(m Measurement)
	// Start begins a span of one attempt at messages, outside of its transaction. The handler gets the context that Start
	// returns. end is called with nil, or with an error whose text is the class of the failure. The error wraps the failure
	// itself, whose text may quote the message.
	Start(ctx context.Context, a Attempt) (_ context.Context, end func(err error))
	// Inject returns the headers that carry the trace context of ctx in an event.
	Inject(ctx context.Context) []event.Header

	mustEmbedDiscard()
}

// Discard is a Sink that does nothing. Its zero value is ready to use.
type Discard struct{}

// Measure does nothing.
func (Discard) Measure(Measurement) {}

// Start returns ctx.
func (Discard) Start(ctx context.Context, _ Attempt) (context.Context, func(error)) {
	return ctx, func(error) {}
}

// Inject returns no headers.
func (Discard) Inject(context.Context) []event.Header { return nil }

func (Discard) mustEmbedDiscard() {}

// Metric names the quantity of a Measurement.
type Metric string

// The metrics. Later versions may add more.
const (
	// Handled counts messages that were handled in one attempt. Took is the time of the attempt with its commit.
	Handled Metric = "handled"
	// Duplicates counts messages that were handled before, according to the inbox.
	Duplicates Metric = "duplicates"
	// Unknown counts messages whose name no handler takes: dead letters, and with consumer.WithSkip messages that passed.
	Unknown Metric = "unknown"
	// Failed counts failed attempts. Reason is what follows.
	Failed Metric = "failed"
	// Discarded counts messages that passed without being handled.
	Discarded Metric = "discarded"
	// DeadLetters counts messages that became dead letters. Reason is the class.
	DeadLetters Metric = "dead letters"
	// Waiting is a gauge: messages of a handler that are set aside in the whole group.
	Waiting Metric = "waiting"
	// OldestWaiting is a gauge: Took is the time since the first failure of the oldest message that is set aside.
	OldestWaiting Metric = "oldest waiting"
	// Stray is a gauge: messages of a handler that are set aside for a topic, a partition or a handler that is gone. Reason is
	// "unread" or "no_handler".
	Stray Metric = "stray"
	// Connections is a gauge of a client with MonitorPool. Reason is "open" or "in_use" (connections to MongoDB) or "waiting" (calls
	// that wait for one).
	Connections Metric = "connections"
	// Checkout is a wait of a call to MongoDB for a connection, which it got. Took is its time.
	Checkout Metric = "checkout"
	// CheckoutFailed counts calls to MongoDB that got no connection. Reason is why.
	CheckoutFailed Metric = "checkout failed"
	// Lag is a gauge: offsets of a partition that are not finished. It becomes 0 when the member gives the partition up.
	Lag Metric = "lag"
	// Oldest is a gauge: Took is the age of the oldest unfinished message of a partition. It becomes 0 as Lag does.
	Oldest Metric = "oldest"
	// Held is a gauge: messages in memory.
	Held Metric = "held"
	// HeldBytes is a gauge: the size of the messages in memory.
	HeldBytes Metric = "held bytes"
	// Running is a gauge: lanes that run a handler.
	Running Metric = "running"
	// Assigned is a gauge: partitions of this member. Each measurement is the beginning of a generation of the group.
	Assigned Metric = "assigned"
	// Committed counts commits of offsets. Reason is "ok" or "failed".
	Committed Metric = "committed"
	// Suspended is a gauge: 1 while the member fetches nothing, with the Reason "paused" or "database", or while a handler
	// takes no messages, with the Reason "handler".
	Suspended Metric = "suspended"
	// RateWaiting is a gauge: lanes of a handler that wait for its rate limit.
	RateWaiting Metric = "rate waiting"
	// Appended counts events that were appended to an outbox, also by transactions that are rolled back later.
	Appended Metric = "appended"
)

// Measurement is one value with its labels. The number of label values is bounded: groups, handlers, topics, partitions and
// reasons. Labels that a metric does not have are empty.
type Measurement struct {
	Metric    Metric
	N         int64
	Took      time.Duration
	Group     string
	Handler   string // "" for messages that no handler takes or that cannot be decoded
	Topic     string
	Partition int32
	Reason    string
}

// Attempt describes an attempt at the messages of one transaction.
type Attempt struct {
	Group, Handler, Topic string
	Messages              []Message
}

// Message describes a message for a span.
type Message struct {
	ID, Name string
	Number   int // of the attempt, from 1
	Headers  []event.Header
}

// Join returns a Sink that passes everything to each of sinks, in this order. Nil ones are left out.
func Join(sinks ...Sink) Sink {
	return joined{list: slices.DeleteFunc(slices.Clone(sinks), func(sink Sink) bool { return sink == nil })}
}

type joined struct {
	Discard
	list []Sink
}

func (j joined) Measure(measurement Measurement) {
	for _, s := range j.list {
		s.Measure(measurement)
	}
}

func (j joined) Start(ctx context.Context, attempt Attempt) (context.Context, func(error)) {
	ends := make([]func(error), len(j.list))
	for i, s := range j.list {
		ctx, ends[i] = s.Start(ctx, attempt)
	}
	return ctx, func(err error) {
		for _, end := range slices.Backward(ends) {
			end(err)
		}
	}
}

func (j joined) Inject(ctx context.Context) []event.Header {
	var all []event.Header
	for _, s := range j.list {
		all = append(all, s.Inject(ctx)...)
	}
	return all
}
