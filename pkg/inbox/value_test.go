package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// receipt is the result of a payment.
type receipt struct {
	Number int
	Cents  int64 `json:"cents"`
}

func TestTheFirstResultIsReturned(t *testing.T) {
	t.Parallel()
	x, db := newInbox(t)
	long := inbox.Key{Scope: "payments", ID: strings.Repeat("x", 5000)}
	for _, key := range []inbox.Key{{Scope: "payments", ID: "1"}, long} {
		for i, process := range []*inbox.Inbox{x, x, another(t, db)} {
			got, repeated, err := inbox.OnceValue(t.Context(), process, key, func(ctx context.Context) (receipt, error) {
				_, err := db.Collection("effects").InsertOne(ctx, bson.D{})
				return receipt{Number: i + 7, Cents: 100}, err
			})
			if err != nil || got != (receipt{Number: 7, Cents: 100}) || repeated != (i > 0) {
				t.Errorf("call %d: %+v, repeated %t, %v", i, got, repeated, err)
			}
		}
	}
	if n, err := db.Collection("effects").CountDocuments(t.Context(), bson.D{}); n != 2 || err != nil {
		t.Errorf("%d effects, %v", n, err)
	}

	// The marker is that of Once.
	if err := x.Once(t.Context(), long, nothing); !errors.Is(err, inbox.ErrDuplicate) {
		t.Errorf("Once: %v", err)
	}
}

// A run that was rolled back leaves its value, and another process may handle the key before the next run.
func TestTheResultOfARunThatWasRolledBackLeavesNoTrace(t *testing.T) {
	t.Parallel()
	type result struct {
		Number int
		Coupon string `json:",omitempty"`
	}
	x, db := newInbox(t)
	key := inbox.Key{Scope: "payments", ID: "1"}
	other := another(t, db)

	begun := make(chan struct{})
	var begin sync.Once
	var wg sync.WaitGroup
	wg.Go(func() {
		<-begun
		if _, _, err := inbox.OnceValue(t.Context(), other, key, func(context.Context) (result, error) { return result{Number: 2}, nil }); err != nil {
			t.Error(err)
		}
	})

	got, repeated, err := inbox.OnceValue(t.Context(), x, key, func(context.Context) (result, error) {
		begin.Do(func() { close(begun) })
		return result{Number: 1, Coupon: "of this run"}, mongo.CommandError{Labels: []string{"TransientTransactionError"}}
	})
	wg.Wait()
	if err != nil || !repeated || got != (result{Number: 2}) {
		t.Errorf("%+v, repeated %t, %v; want the result of the other process", got, repeated, err)
	}
}

func TestOnceValueReportsWhatItCannotReturn(t *testing.T) {
	t.Parallel()
	x, db := newInbox(t)
	text := func(ctx context.Context, id, value string, opts ...inbox.ValueOption) (string, bool, error) {
		return inbox.OnceValue(ctx, x, inbox.Key{Scope: "s", ID: id}, func(ctx context.Context) (string, error) {
			_, err := db.Collection("effects").InsertOne(ctx, bson.D{{Key: "of", Value: id}})
			return value, err
		}, opts...)
	}
	check := func(call string, err, want error, texts ...string) {
		t.Helper()
		for _, text := range texts {
			if !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v, want %v with %q", call, err, want, text)
			}
		}
	}

	_, _, err := text(t.Context(), "large", strings.Repeat("x", inbox.MaxResult))
	check("too large", err, inbox.ErrResultTooLarge, "1048578 bytes", `id "large"`, "return a reference")
	_, _, err = text(t.Context(), "", "v")
	check("no id", err, inbox.ErrInvalid, "the id of the key is empty")
	boom := errors.New("boom")
	_, _, err = inbox.OnceValue(t.Context(), x, inbox.Key{Scope: "s", ID: "failed"}, func(context.Context) (int, error) { return 1, boom })
	check("a failure", err, boom, "boom")
	_, _, err = inbox.OnceValue(t.Context(), x, inbox.Key{Scope: "s", ID: "codec"}, func(context.Context) (chan int, error) { return make(chan int), nil })
	check("no JSON", err, err, "encoding the result", `id "codec"`)
	if n, err := db.Collection("effects").CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("%d effects of calls that failed, %v", n, err)
	}

	if err := x.Once(t.Context(), inbox.Key{Scope: "s", ID: "once"}, nothing); err != nil {
		t.Fatal(err)
	}
	_, repeated, err := text(t.Context(), "once", "v")
	check("after Once", err, inbox.ErrNoResult, `id "once"`)
	if !repeated {
		t.Error("a call after Once is not repeated")
	}

	if _, _, err := text(t.Context(), "print", "v", inbox.WithFingerprint([]byte("ab"), []byte("c"))); err != nil {
		t.Fatal(err)
	}
	if got, _, err := text(t.Context(), "print", "w", inbox.WithFingerprint([]byte("ab"), []byte("c"))); got != "v" || err != nil {
		t.Errorf("the same fingerprint: %q, %v", got, err)
	}
	for _, opts := range [][]inbox.ValueOption{nil, {inbox.WithFingerprint([]byte("a"), []byte("bc"))}} {
		_, _, err = text(t.Context(), "print", "w", opts...)
		check("another fingerprint", err, inbox.ErrMismatch, `id "print"`)
	}

	if _, _, err := text(t.Context(), "raw", "v", inbox.WithCodec(codec.Raw("text/plain"))); err != nil {
		t.Fatal(err)
	}
	_, _, err = text(t.Context(), "raw", "v")
	check("another codec", err, err, "decoding the stored result")
	if got, _, err := text(t.Context(), "raw", "w", inbox.WithCodec(codec.Raw("text/plain"))); got != "v" || err != nil {
		t.Errorf("the same codec: %q, %v", got, err)
	}
	// Nil is the default.
	for _, want := range []string{"v", "v"} {
		if got, _, err := text(t.Context(), "nil", want, inbox.WithCodec(nil), nil); got != want || err != nil {
			t.Errorf("without a codec: %q, %v", got, err)
		}
	}
}

// With a claim, a call in another process is rejected while the first one runs. Without one, it waits.
func TestACallDuringTheFirstOneWaitsOrIsRejected(t *testing.T) {
	t.Parallel()
	x, db := newInbox(t)
	key := inbox.Key{Scope: "s", ID: "1"}
	call := func(process *inbox.Inbox, fn func(ctx context.Context) (int, error), opts ...inbox.ValueOption) (int, bool, error) {
		return inbox.OnceValue(t.Context(), process, key, fn, opts...)
	}
	never := func(context.Context) (int, error) { return 0, errors.New("a second call ran") }

	got, _, err := call(x, func(context.Context) (int, error) {
		for name, process := range map[string]*inbox.Inbox{"this process": x, "another": another(t, db)} {
			_, _, err := call(process, never, inbox.WithClaim(0), inbox.WithoutWaiting())
			progress, ok := errors.AsType[*inbox.InProgressError](err)
			if !ok || progress.Key != key {
				t.Errorf("%s: %v", name, err)
			}
		}
		return 5, nil
	}, inbox.WithClaim(0))
	if got != 5 || err != nil {
		t.Errorf("%d, %v", got, err)
	}

	key.ID = "2"
	const calls = 8
	var group sync.WaitGroup
	results := make([]string, calls)
	for i := range calls {
		process := another(t, db)
		group.Go(func() {
			got, _, err := call(process, func(ctx context.Context) (int, error) {
				_, err := db.Collection("race").InsertOne(ctx, bson.D{})
				return i + 100, err
			})
			results[i] = fmt.Sprint(got, err)
		})
	}
	group.Wait()
	for _, got := range results {
		if got != results[0] || !strings.HasSuffix(got, "<nil>") {
			t.Errorf("results %q", results)
		}
	}
	if n, err := db.Collection("race").CountDocuments(t.Context(), bson.D{}); n != 1 || err != nil {
		t.Errorf("%d effects, %v; results %q", n, err, results)
	}
}
