// Package boxtest contains the contract of an outbox as tests. pkg/outbox passes them on a
// server, and internal/lab/memory without one.
//
// The tests run in parallel. They do not wait and do not depend on time.
package boxtest

import (
	"context"
	"iter"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Box contains the methods of an outbox for a service. *outbox.Box implements it. See there for
// their contracts.
type Box interface {
	Append(ctx context.Context, events ...event.Event) error

	Schedule(ctx context.Context, at time.Time, ev event.Event) (event.ID, error)
	ScheduleIn(ctx context.Context, delay time.Duration, ev event.Event) (event.ID, error)
	Cancel(ctx context.Context, id event.ID) error
	Reschedule(ctx context.Context, id event.ID, at time.Time) error

	Scheduled(ctx context.Context, q outbox.ScheduledQuery) iter.Seq2[outbox.ScheduledEvent, error]
	CancelScheduled(ctx context.Context, q outbox.ScheduledQuery) (int64, error)
}

// Fixture is an empty outbox for one test.
type Fixture struct {
	// Box accepts envelopes of up to 900 KiB and requires a transaction.
	Box Box

	// Plain is the same outbox, but it does not require a transaction.
	Plain Box

	// Small is the same outbox, but it accepts only envelopes of up to SmallSize bytes.
	Small Box

	// With returns the same outbox with middleware. It requires a transaction.
	With func(m ...outbox.Middleware) Box

	// Transaction runs fn as one unit of work, in the same way as outbox.Box.Transaction.
	Transaction func(ctx context.Context, fn func(ctx context.Context) error) error

	// Stored returns the documents of the committed envelopes, in the order of their appends.
	Stored func(t *testing.T) [][]byte

	// Claim takes a scheduled envelope out of the outbox, as a watcher does before it sends the envelope.
	Claim func(t *testing.T, id event.ID)
}

// SmallSize is the size limit of Fixture.Small in bytes.
const SmallSize = 300

// Factory returns a new fixture for one test. It must register its cleanup with t.Cleanup.
type Factory func(t *testing.T) Fixture

// Run runs the tests in parallel, each with a fixture of factory.
func Run(t *testing.T, factory Factory) {
	t.Helper()

	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"transaction is required", transactionIsRequired},
		{"plain joins the transaction", plainJoins},
		{"all or nothing", allOrNothing},
		{"order is kept", orderIsKept},
		{"envelope", storedEnvelope},
		{"duplicate id", duplicateID},
		{"everything wrong at once", everythingWrong},
		{"trace context", traceContext},
		{"cause of the context", causeOfContext},
		{"nested transaction joins", nestedJoins},
		{"joined transaction still runs", joinedStillRuns},
		{"rollback only", rollbackOnly},
		{"ended transaction", endedTransaction},
		{"transient error runs again", transientRunsAgain},
		{"context ends", contextEnds},
		{"concurrent transactions", concurrentTransactions},
		{"schedule, reschedule, cancel", scheduleAndCancel},
		{"claimed is out of reach", claimedIsOutOfReach},
		{"nonsense is rejected", nonsenseIsRejected},
		{"scheduled by condition", scheduledByCondition},
		{"scheduled in order", scheduledInOrder},
		{"scheduled after a delay", scheduledAfterADelay},
		{"cancel by query", cancelByQuery},
		{"middleware", middleware},
		{"middleware that fails", failingMiddleware},
		{"empty calls", emptyCalls},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.test(t, factory(t))
		})
	}
}

// newEvent returns an event of this type with a small payload.
func newEvent(typ string, opts ...event.Option) event.Event {
	return event.New(event.Aggregate{Type: "order", ID: "o-1"}, typ, event.Bytes("", []byte("p")), opts...)
}

// appendEvents appends the events in a transaction, which must commit.
func (f Fixture) appendEvents(t *testing.T, events ...event.Event) {
	t.Helper()
	err := f.Transaction(t.Context(), func(ctx context.Context) error { return f.Box.Append(ctx, events...) })
	if err != nil {
		t.Fatal(err)
	}
}

// scheduleEvent schedules an event in a transaction, which must commit.
func (f Fixture) scheduleEvent(t *testing.T, ev event.Event, dueAt time.Time) (id event.ID) {
	t.Helper()
	if err := f.Transaction(t.Context(), func(ctx context.Context) (err error) {
		id, err = f.Box.Schedule(ctx, dueAt, ev)
		return err
	}); err != nil {
		t.Fatal(err)
	}

	if id != ev.ID() {
		t.Errorf("Schedule returned %s for event %s", id, ev.ID())
	}

	return id
}

// parseStored returns the stored envelopes as the relay parses them.
func (f Fixture) parseStored(t *testing.T) []*envelope.View {
	t.Helper()
	var out []*envelope.View
	for _, doc := range f.Stored(t) {
		view := new(envelope.View)
		if err := envelope.Parse(doc, view); err != nil {
			t.Fatal(err)
		}
		out = append(out, view)
	}

	return out
}

// checkTypes fails the test unless the outbox contains envelopes of exactly these types.
func (f Fixture) checkTypes(t *testing.T, types ...string) {
	t.Helper()
	got := []string{}
	for _, v := range f.parseStored(t) {
		got = append(got, string(v.Type))
	}
	checkEqual(t, "in the outbox", got, append([]string{}, types...))
}
