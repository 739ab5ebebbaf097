package inbox_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
)

// attach attaches, and again if the first result must be confirmed, with the same end.
func attach(t *testing.T, x *inbox.Inbox, end int64) (inbox.Generation, error) {
	t.Helper()
	g, err := x.Attach(t.Context(), "group/a", "orders", 0, inbox.Log{End: end, Epoch: -1})
	if errors.Is(err, inbox.ErrUnconfirmed) {
		return x.Attach(t.Context(), "group/a", "orders", 0, inbox.Log{End: end, Epoch: -1})
	}
	return g, err
}

// TestN29_AnEndThatWasReadTooEarlyIsNotBelieved: another process has handled records after the end
// was read.
func TestN29_AnEndThatWasReadTooEarlyIsNotBelieved(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// The end of the topic is 120.
	b.admit(t, b.inbox, newBatch("", 20, 100)...)
	// The consumer has read the end 120 before the next 20 messages were written.
	for _, end := range []int64{110, 120} {
		if _, err := b.inbox.Attach(t.Context(), "group/a", "orders", 0, inbox.Log{End: end, Epoch: -1}); !errors.Is(err, inbox.ErrUnconfirmed) {
			t.Fatalf("the error is %v", err)
		}
		b.admit(t, b.newInbox(t), newBatch("", 20, end+10)...)
	}

	g, err := b.inbox.Attach(t.Context(), "group/a", "orders", 0, inbox.Log{End: 500, Epoch: -1})
	if err != nil || g.Number != 0 || g.Watermark != 150 {
		t.Fatalf("%+v, %v", g, err)
	}
	// The earlier suspicion has no effect now.
	if _, err := b.inbox.Attach(t.Context(), "group/a", "orders", 0, inbox.Log{End: 50, Epoch: -1}); !errors.Is(err, inbox.ErrUnconfirmed) {
		t.Fatalf("the error is %v", err)
	}
}

func TestN29_OfManyAtOnceOneBeginsTheGeneration(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.admit(t, b.inbox, newBatch("", 32, 100)...)
	var begun atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		x := b.newInbox(t)
		wg.Go(func() {
			g, err := attach(t, x, 10)
			if err != nil || g.Number != 1 {
				t.Errorf("%+v, %v", g, err)
			}

			if g.Recreated {
				begun.Add(1)
			}
		})
	}

	wg.Wait()
	if begun.Load() != 1 {
		t.Fatalf("begun %d times", begun.Load())
	}
}

// TestN29_AGenerationIsOneDocument: the documents of the lanes do not change until a record of the
// new topic arrives.
func TestN29_AGenerationIsOneDocument(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.admit(t, b.inbox, newBatch("", 32, 100)...)
	if _, err := attach(t, b.inbox, 10); err != nil {
		t.Fatal(err)
	}
	if n := b.countDocuments(t, "inbox_offsets", bson.D{{Key: "g", Value: 1}}); n != 1 {
		t.Fatalf("%d documents have the new generation", n)
	}

	b.admit(t, b.inbox, newEntryAt("new", 3, 1))
	marks, err := b.store().Watermarks(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	var current []mongostore.Watermark
	for _, m := range marks {
		if m.Current {
			current = append(current, m)
		}
	}

	if len(marks) != inbox.Lanes || len(current) != 1 || current[0].Lane.Lane != 3 || current[0].Mark.Next != 2 || current[0].At.IsZero() {
		t.Fatalf("%d watermarks, current %+v", len(marks), current)
	}
}

// TestN29_AHaltEndsWithoutTheSetting: a process that does not halt begins the generation, and then the
// halted one goes on.
func TestN29_AHaltEndsWithoutTheSetting(t *testing.T) {
	t.Parallel()
	b := setup(t)
	x := b.newWith(t, inbox.Settings{HaltOnRecreated: true})
	b.admit(t, x, newEntryAt("1", 0, 100))
	if _, err := attach(t, x, 10); !errors.Is(err, inbox.ErrRecreated) {
		t.Fatalf("the error is %v", err)
	}

	g, err := attach(t, b.inbox, 10)
	if err != nil || g.Number != 1 || !g.Recreated {
		t.Fatalf("%+v, %v", g, err)
	}
	if g, err = attach(t, x, 10); err != nil || g.Number != 1 {
		t.Fatalf("%+v, %v", g, err)
	}
	if fresh := b.admit(t, x, newEntryAt("2", 0, 3)); !fresh[0] {
		t.Fatal("rejected by the watermark of the old topic")
	}
	if _, err := x.Attach(t.Context(), "", "", -1, inbox.Log{End: 0, Epoch: 0}); !errors.Is(err, inbox.ErrInvalid) {
		t.Fatalf("the error is %v", err)
	}
}
