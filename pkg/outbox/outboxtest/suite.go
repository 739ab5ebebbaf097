// Package outboxtest is the contract of an outbox as tests: pkg/outbox passes them on a server, pkg/memory without one,
// and whoever writes another one, or a wrapper around one of these, can run them too.
//
//	func TestContract(t *testing.T) {
//		outboxtest.Run(t, func(t *testing.T) outboxtest.Fixture { … })
//	}
//
// The tests run in parallel, each on a fixture of its own. They wait for nothing and measure no times.
package outboxtest

import (
	"context"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Box is what an outbox offers to a service; *outbox.Box has it.
type Box interface {
	Append(ctx context.Context, events ...event.Event) error
	AppendMany(ctx context.Context, events []event.Event, opts ...outbox.CallOption) error
	Schedule(ctx context.Context, ev event.Event, at time.Time, opts ...outbox.CallOption) (event.ID, error)
	Cancel(ctx context.Context, id event.ID, opts ...outbox.CallOption) error
	Reschedule(ctx context.Context, id event.ID, at time.Time, opts ...outbox.CallOption) error
	Scheduled(ctx context.Context, q outbox.ScheduledQuery, opts ...outbox.CallOption) (outbox.ScheduledPage, error)
	SummarizeScheduled(ctx context.Context, q outbox.ScheduledQuery, opts ...outbox.CallOption) ([]outbox.ScheduledSummary, error)
	CancelScheduled(ctx context.Context, q outbox.ScheduledQuery, opts ...outbox.CallOption) (int64, error)
}

// Fixture is one empty outbox and what the tests need around it.
type Fixture struct {
	// Box takes envelopes of up to the default size and wants a transaction.
	Box Box
	// Plain is over the same outbox and takes events without a transaction too.
	Plain Box
	// Small is over the same outbox and takes envelopes of up to SmallSize bytes.
	Small Box
	// Transaction is the unit of work.
	Transaction func(ctx context.Context, fn func(ctx context.Context) error) error
	// Stored are the committed envelopes, as documents, in the order of their appending.
	Stored func(t *testing.T) [][]byte
	// Claim takes a scheduled envelope as a watcher does that is about to send it.
	Claim func(t *testing.T, id event.ID)
}

// SmallSize is the limit of Fixture.Small.
const SmallSize = 300

// Factory makes a fixture that is the test's own; it registers what has to be closed by t.Cleanup.
type Factory func(t *testing.T) Fixture

// Run tests everything that is promised.
func Run(t *testing.T, factory Factory) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"transaction is required", transactionIsRequired},
		{"plain joins what is there", plainJoins},
		{"all or nothing", allOrNothing},
		{"order is kept", orderIsKept},
		{"envelope", storedEnvelope},
		{"duplicate id", duplicateID},
		{"everything wrong at once", everythingWrong},
		{"trace context", traceContext},
		{"nested transaction joins", nestedJoins},
		{"rollback only", rollbackOnly},
		{"ended transaction", endedTransaction},
		{"transient error runs again", transientRunsAgain},
		{"context ends", contextEnds},
		{"concurrent transactions", concurrentTransactions},
		{"schedule, reschedule, cancel", scheduleAndCancel},
		{"claimed is out of reach", claimedIsOutOfReach},
		{"nonsense is refused", nonsenseIsRefused},
		{"scheduled by condition", scheduledByCondition},
		{"scheduled pages", scheduledPages},
		{"scheduled summary", scheduledSummary},
		{"cancel by query", cancelByQuery},
		{"empty calls", emptyCalls},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.test(t, factory(t))
		})
	}
}

// EventOf is an event of that type with a small payload.
func eventOf(typ string, opts ...event.Option) event.Event {
	return event.New("order", "o-1", typ, []byte("p"), opts...)
}

func (f Fixture) append(t *testing.T, events ...event.Event) {
	t.Helper()
	if err := f.Transaction(t.Context(), func(ctx context.Context) error { return f.Box.Append(ctx, events...) }); err != nil {
		t.Fatal(err)
	}
}

func (f Fixture) schedule(t *testing.T, ev event.Event, at time.Time) (id event.ID) {
	t.Helper()
	if err := f.Transaction(t.Context(), func(ctx context.Context) (err error) {
		id, err = f.Box.Schedule(ctx, ev, at)
		return err
	}); err != nil {
		t.Fatal(err)
	}

	if id != ev.ID() {
		t.Errorf("Schedule returned %s for event %s", id, ev.ID())
	}

	return id
}

// views are the stored envelopes as the relay sees them.
func (f Fixture) views(t *testing.T) []*event.View {
	t.Helper()
	var out []*event.View
	for _, doc := range f.Stored(t) {
		v := new(event.View)
		if err := event.Parse(doc, v); err != nil {
			t.Fatal(err)
		}

		out = append(out, v)
	}

	return out
}

// want compares the types of what is stored.
func (f Fixture) want(t *testing.T, types ...string) {
	t.Helper()
	got := []string{}
	for _, v := range f.views(t) {
		got = append(got, string(v.Type))
	}
	equal(t, "in the outbox", got, append([]string{}, types...))
}
