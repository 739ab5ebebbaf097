package deadletter_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	driverevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestALetterIsRequeuedForItsHandlerAlone(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		first := newLetter(1, "h", "A")
		first.ID.Delivery = 2
		g.bury(first, newLetter(2, "h", "B"), newLetter(1, "other", "A"))
		edit := func(l *deadletter.Letter) error {
			l.Value = []byte("edited")
			l.Headers = append(l.Headers, event.Header{Key: "mended", Value: []byte("yes")})
			return nil
		}

		q := deadletter.Query{Handler: "h", Name: "A"}
		g.requeue(q, deadletter.RequeueOptions{Actor: "ann", Note: "fixed", Edit: edit}, 1)
		m := g.handedBack("h", first.Key)
		if m == nil {
			g.Fatal("no message waits for the handler")
		}
		headers := map[string]string{}
		for _, h := range m.Headers {
			headers[h.Key] = string(h.Value)
		}
		if string(m.Value) != "edited" || headers["mended"] != "yes" || headers["id"] != "m1" || headers[record.HeaderDelivery] != "3" || m.Offset != 1 || !m.Requested {
			g.Errorf("the message that waits: got %+v with the headers %v", m, headers)
		}
		if n := g.countHandedBack("h") + g.countHandedBack("other"); n != 1 {
			g.Errorf("messages that wait: got %d, want 1", n)
		}

		l, err := g.Get(g.Context(), first.ID)
		if err != nil {
			g.Fatal(err)
		}
		if l.Requeued == nil || l.Requeued.Actor != "ann" || l.Requeued.Note != "fixed" || !l.Requeued.Waiting || l.Requeued.At.IsZero() {
			g.Errorf("requeued: got %+v", l.Requeued)
		}
		if !bytes.Equal(l.Value, []byte{255, 1}) || len(l.Headers) != 3 {
			g.Errorf("the letter was changed by the edit: %+v", l)
		}

		// A second call has nothing to do, also after the message was handled.
		if _, err := g.waiting.Remove(g.Context(), m); err != nil {
			g.Fatal(err)
		}
		g.requeue(q, deadletter.RequeueOptions{}, 0)
		if l, err := g.Get(g.Context(), first.ID); err != nil || l.Requeued.Waiting {
			g.Errorf("requeued after the message was handled: got %+v (%v)", l.Requeued, err)
		}

		// It is given up again: this is another letter.
		again := newLetter(1, "h", "A")
		again.ID.Delivery = 3
		g.bury(again)
		if n, err := g.Count(g.Context(), deadletter.Query{Handler: "h", Messages: []string{"m1"}}); n != 2 || err != nil {
			g.Errorf("letters of the message: got %d (%v), want 2", n, err)
		}
	})
}

// The running members of the group have no handler of the name, so the message would wait for it without an end.
func TestARequeueToAnUnknownHandlerIsRejected(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		renamed, good := newLetter(1, "renamed", "A"), newLetter(2, "h", "A")
		g.bury(renamed, good)
		requeue := func(q deadletter.Query, handlers []string, want int64, reason string) {
			g.Helper()
			n, err := g.Requeue(g.Context(), q, deadletter.RequeueOptions{Handlers: handlers})
			rejected, isRejected := errors.AsType[*deadletter.RejectedError](err)
			if n != want || isRejected != (reason != "") || isRejected && rejected.Reason != reason {
				g.Errorf("requeue to %q: got %d (%v), want %d and %q", handlers, n, err, want, reason)
			}
		}

		member := setaside.Member{Group: "g", ID: "a", Handlers: []string{"h", "other"}}
		noneUnread := func(context.Context, []setaside.Place) ([]setaside.Place, error) { return nil, nil }
		if _, err := g.waiting.Census(g.Context(), member, noneUnread); err != nil {
			g.Fatal(err)
		}
		const fix = "; its handlers are h, other: name one of them, or start a member with the handler first"
		requeue(deadletter.Query{Handler: "h"}, []string{"nosuch"}, 0, "group g has no handler nosuch"+fix)
		requeue(deadletter.Query{All: true}, nil, 1, "group g has no handler renamed"+fix)
		requeue(deadletter.Query{Handler: "renamed"}, []string{"other"}, 1, "")
	})
}

// While no member runs, the handlers of the group are unknown.
func TestARequeueToANameThatNoHandlerCanHaveIsRejected(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		g.bury(newLetter(1, "h", "A"))
		for _, names := range [][]string{{"h", ""}, {"a/b"}, {"h", "g/h"}} {
			n, err := g.Requeue(g.Context(), deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{Handlers: names})
			if n != 0 || !isRejected(err) {
				g.Errorf("requeue to %q: got %d (%v), want a RejectedError", names, n, err)
			}
		}
		g.requeue(deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{Handlers: []string{"h", "other"}}, 1)
	})
}

// A requeued letter does not hide a later failure of its record, which Kafka may deliver again.
func TestARequeuedLetterIsReplacedByALaterFailure(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		first := newLetter(1, "h", "A")
		g.bury(first)
		repeated := newLetter(1, "h", "A")
		repeated.Reason = "not stored: the letter is there"
		g.bury(repeated)
		if l, err := g.Get(g.Context(), first.ID); err != nil || l.Reason != first.Reason {
			g.Errorf("after a repetition: %q, %v", l.Reason, err)
		}

		g.requeue(deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{Actor: "ann"}, 1)
		later := newLetter(1, "h", "A")
		later.Reason = "once more"
		g.bury(later)
		if l, err := g.Get(g.Context(), first.ID); err != nil || l.Requeued != nil || l.Reason != "once more" {
			g.Errorf("after a later failure: %+v, %v", l, err)
		}
	})
}

// No handler took the message, so nothing has failed when Kafka delivers its record again.
func TestALetterWithoutAHandlerKeepsTheDecisionOfTheOperator(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		requeued, discarded := newLetter(1, "", "A"), newLetter(2, "", "B")
		g.bury(requeued, discarded)
		g.requeue(deadletter.Query{Name: "A"}, deadletter.RequeueOptions{Handlers: []string{"h"}}, 1)
		if n, err := g.Discard(g.Context(), deadletter.Query{Name: "B"}, deadletter.DiscardOptions{}); n != 1 || err != nil {
			g.Fatalf("discarded %d (%v), want 1", n, err)
		}

		g.bury(newLetter(1, "", "A"), newLetter(2, "", "B"))
		if letter, err := g.Get(g.Context(), requeued.ID); err != nil || letter.Requeued == nil {
			g.Errorf("the requeued letter: got %+v, %v; want its mark", letter, err)
		}
		if letter, err := g.Get(g.Context(), discarded.ID); err != nil || letter.Archived == nil || letter.ExpireAt == nil {
			g.Errorf("the discarded letter: got %+v, %v; want it in the archive", letter, err)
		}
	})
}

func TestTwoWhoRequeueAtOnceShareNothing(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		const letters = 30
		for n := range letters {
			g.bury(newLetter(n, "h", "A"))
		}

		var wg sync.WaitGroup
		var total atomic.Int64
		for range 3 {
			wg.Go(func() {
				n, err := g.Requeue(g.Context(), deadletter.Query{All: true}, deadletter.RequeueOptions{})
				if err != nil {
					g.Error(err)
				}
				total.Add(n)
			})
		}

		wg.Wait()
		if n := g.countHandedBack("h"); total.Load() != letters || n != letters {
			g.Errorf("requeued %d letters, and %d messages wait; want %d", total.Load(), n, letters)
		}
	})
}

func TestALetterWithoutAHandlerNeedsTheNameOfOne(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		unknown := newLetter(1, "", "Z")
		unknown.Class = deadletter.ClassUnknown
		g.bury(unknown, newLetter(2, "h", "A"))

		n, err := g.Requeue(g.Context(), deadletter.Query{All: true}, deadletter.RequeueOptions{})
		if n != 1 || !isRejected(err) {
			g.Errorf("requeued %d (%v), want the other letter and a RejectedError", n, err)
		}
		g.requeue(deadletter.Query{Class: deadletter.ClassUnknown}, deadletter.RequeueOptions{Handlers: []string{"new", "audit"}}, 1)
		if g.handedBack("new", unknown.Key) == nil || g.handedBack("audit", unknown.Key) == nil {
			g.Error("the message does not wait for both handlers")
		}
	})
}

func TestAnExpiredLetterComesBackWithoutItsDeadline(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		deadline := event.Header{Key: record.HeaderDeliverBy, Value: []byte("2020-01-01T00:00:00Z")}
		expired, rejected := newLetter(1, "h", "A"), newLetter(2, "h", "A")
		expired.Class = deadletter.ClassExpired
		expired.Headers = append(expired.Headers, deadline)
		rejected.Headers = append(rejected.Headers, deadline)
		g.bury(expired, rejected)
		g.requeue(deadletter.Query{All: true}, deadletter.RequeueOptions{}, 2)

		for _, c := range []struct {
			l    *deadletter.Letter
			want bool
		}{{expired, false}, {rejected, true}} {
			has := false
			for _, h := range g.handedBack("h", c.l.Key).Headers {
				has = has || h.Key == record.HeaderDeliverBy
			}
			if has != c.want {
				g.Errorf("class %s: the message has its deadline: %v, want %v", c.l.Class, has, c.want)
			}
		}
	})
}

func TestAnEditThatFailsEndsTheRequeue(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		g.bury(newLetter(1, "h", "A"))
		r := deadletter.RequeueOptions{Edit: func(*deadletter.Letter) error { return errFlaky }}
		if n, err := g.Requeue(g.Context(), deadletter.Query{All: true}, r); n != 0 || !errors.Is(err, errFlaky) {
			g.Errorf("requeued %d (%v), want the error of the edit", n, err)
		}
		g.requeue(deadletter.Query{All: true}, deadletter.RequeueOptions{}, 1)
	})
}

// While a handler gives each message up again, each requeue ends.
func TestARequeueEndsWhileMessagesAreGivenUpAgain(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		const existing, most = 250, 1000
		for n := range existing {
			g.bury(newLetter(n, "h", "A"))
		}

		next := existing
		giveUp := func(*deadletter.Letter) error {
			if next++; next < most {
				g.bury(newLetter(next, "h", "A"))
			}
			return nil
		}
		n, err := g.Requeue(g.Context(), deadletter.Query{All: true}, deadletter.RequeueOptions{Edit: giveUp})
		// A letter of the same millisecond may exist already.
		if err != nil || n < existing || n > existing+100 {
			g.Errorf("%d letters are requeued, %v; %d existed before", n, err, existing)
		}
	})
}

// The process or its connection can end at each statement of a requeue. Then the letter is either as before, or it is marked
// and its message waits.
func TestARequeueThatIsInterruptedLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"update", "commitTransaction"} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			app := stacktest.Name(t)
			db := stacktest.Database(t, stacktest.Client(t, options.Client().SetAppName(app)))
			desk, err := deadletter.New(db)
			if err != nil {
				t.Fatal(err)
			}
			g := &graveyard{T: t, Desk: desk, waiting: setaside.New(db, setaside.DefaultCollection), db: db, count: countIn(db)}
			const letters = 4
			for n := range letters {
				g.bury(newLetter(n, "h", "A"))
			}

			reached, off := stacktest.FailAlways(t, app, bson.D{
				{Key: "failCommands", Value: bson.A{command}}, {Key: "closeConnection", Value: true},
			})
			ctx, crash := context.WithCancel(t.Context())
			defer crash()
			done := make(chan error, 1)
			go func() {
				_, err := g.Requeue(ctx, deadletter.Query{All: true}, deadletter.RequeueOptions{})
				done <- err
			}()
			reached()
			crash()
			// The driver repeats a commit for two minutes, so end the failures first.
			off()
			// A commit that the driver has begun can still succeed.
			if err := <-done; err == nil && command != "commitTransaction" {
				t.Error("the requeue survived the crash")
			}

			for _, l := range g.list(deadletter.Query{}) {
				if l.Requeued != nil && !l.Requeued.Waiting {
					t.Errorf("letter %s is marked, and no message waits", l.ID)
				}
			}
			if _, err := g.Requeue(t.Context(), deadletter.Query{All: true}, deadletter.RequeueOptions{}); err != nil {
				t.Fatal(err)
			}
			if n := g.countHandedBack("h"); n != letters {
				t.Errorf("messages that wait: got %d, want %d", n, letters)
			}
		})
	}
}

// A requeue after a mistake may have 100,000 letters, so each transaction has many of them. Their bytes are bounded.
func TestARequeueSharesItsTransactions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		letters, bytes, headers int
		want                    int64 // transactions
	}{
		{letters: 250, bytes: 2, want: 3},
		{letters: 9, bytes: 2 << 20, want: 5},
		{letters: 10, headers: 2 << 20, want: 5},
	} {
		t.Run(fmt.Sprint(c.letters), func(t *testing.T) {
			t.Parallel()
			var commits atomic.Int64
			monitor := &driverevent.CommandMonitor{Succeeded: func(_ context.Context, e *driverevent.CommandSucceededEvent) {
				if e.CommandName == "commitTransaction" {
					commits.Add(1)
				}
			}}
			db := stacktest.Database(t, stacktest.Client(t, options.Client().SetMonitor(monitor)))
			desk, err := deadletter.New(db)
			if err != nil {
				t.Fatal(err)
			}
			g := &graveyard{T: t, Desk: desk, waiting: setaside.New(db, setaside.DefaultCollection), db: db, count: countIn(db)}
			for n := range c.letters {
				letter := newLetter(n, "h", "A")
				letter.Value = bytes.Repeat([]byte{7}, c.bytes)
				letter.Headers = append(letter.Headers, event.Header{Key: "large", Value: bytes.Repeat([]byte{7}, c.headers)})
				g.bury(letter)
			}

			commits.Store(0)
			g.requeue(deadletter.Query{All: true}, deadletter.RequeueOptions{}, int64(c.letters))
			if n := commits.Load(); n != c.want {
				g.Errorf("transactions: got %d, want %d", n, c.want)
			}
			if n := g.countHandedBack("h"); n != c.letters {
				g.Errorf("messages that wait: got %d, want %d", n, c.letters)
			}
		})
	}
}

// A letter may have 12 MiB, and a hundred of them more than the memory of the process.
func TestARequeueHoldsOnePageOfBytes(t *testing.T) {
	t.Parallel()
	var read atomic.Int64
	monitor := &driverevent.CommandMonitor{Succeeded: func(_ context.Context, e *driverevent.CommandSucceededEvent) { read.Add(int64(len(e.Reply))) }}
	db := stacktest.Database(t, stacktest.Client(t, options.Client().SetMonitor(monitor)))
	desk, err := deadletter.New(db)
	if err != nil {
		t.Fatal(err)
	}
	g := &graveyard{T: t, Desk: desk, waiting: setaside.New(db, setaside.DefaultCollection), db: db, count: countIn(db)}

	const letters = 12
	for n := range letters {
		letter := newLetter(n, "h", "A")
		letter.Value = bytes.Repeat([]byte{7}, 4<<20)
		g.bury(letter)
	}
	read.Store(0)
	first := int64(0)
	g.requeue(deadletter.Query{All: true}, deadletter.RequeueOptions{Edit: func(*deadletter.Letter) error {
		if first == 0 {
			first = read.Load()
		}
		return nil
	}}, letters)

	if first > 24<<20 {
		t.Errorf("%d MiB are read before the first letter is requeued, want at most 24", first>>20)
	}
	if n := g.countHandedBack("h"); n != letters {
		t.Errorf("messages that wait: got %d, want %d", n, letters)
	}
}

// A letter that is discarded after a requeue has read it stays discarded, and its handler does not get the message.
func TestALetterThatIsDiscardedMeanwhileIsNotRequeued(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		first, second := newLetter(1, "h", "A"), newLetter(2, "h", "A")
		g.bury(first, second)
		// Edit is called after the page is read, and before the letters are marked.
		discardSecond := func(letter *deadletter.Letter) error {
			if letter.ID != first.ID {
				return nil
			}
			n, err := g.Discard(g.Context(), deadletter.Query{IDs: []deadletter.ID{second.ID}}, deadletter.DiscardOptions{Actor: "bob"})
			if n != 1 || err != nil {
				g.Errorf("%d discarded, %v, want 1", n, err)
			}
			return nil
		}

		n, err := g.Requeue(g.Context(), deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{Edit: discardSecond})
		waiting, countErr := g.count(g.Context(), "g/h")
		if err := errors.Join(err, countErr); n != 1 || waiting != 1 || err != nil {
			g.Errorf("%d requeued and %d waiting, %v, want 1 of each", n, waiting, err)
		}
		if letter, err := g.Get(g.Context(), second.ID); err != nil || letter.Requeued != nil || letter.Archived == nil {
			g.Errorf("the discarded letter: %+v, %v", letter, err)
		}
	})
}
