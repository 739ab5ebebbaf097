package consumer

import (
	"context"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// The settings of a handler override the settings of New, in both directions.
func TestSettingsOfAHandlerOverrideThoseOfAll(t *testing.T) {
	t.Parallel()
	cl, err := mongo.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cl.Disconnect(context.WithoutCancel(t.Context())) })
	c, err := New("group", cl.Database("db"), WithBrokers("127.0.0.1:1"), WithTopics("t"), WithMode(Claimed))
	if err != nil {
		t.Fatal(err)
	}

	nothing := Func(func(context.Context, *Message) error { return nil }, "*")
	for name, opts := range map[string][]HandlerOption{
		"a": nil, "b": {WithMode(Transactional)}, "c": {WithMode(AtLeastOnceInTransaction)},
	} {
		if err := c.Handle(name, nothing, opts...); err != nil {
			t.Fatal(err)
		}
	}

	modes := map[string]Mode{}
	for _, r := range c.reg.snapshot().all {
		modes[r.name] = r.mode
	}
	if d := cmp.Diff(map[string]Mode{"a": Claimed, "b": Transactional, "c": AtLeastOnceInTransaction}, modes); d != "" {
		t.Error(d)
	}
}

// The rules of a handler come before the rules of New.
func TestRulesOfAHandlerComeBeforeThoseOfAll(t *testing.T) {
	t.Parallel()
	cl, err := mongo.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cl.Disconnect(context.WithoutCancel(t.Context())) })
	c, err := New("group", cl.Database("db"), WithBrokers("127.0.0.1:1"), WithTopics("t"),
		WithRetryFor(ErrorIs(errTest), NoRetry()), WithRetryFor(ErrorIs(io.EOF), NoRetry()))
	if err != nil {
		t.Fatal(err)
	}
	f := func(context.Context, *Message) error { return nil }
	if err := c.Handle("h", Func(f, "*"), WithRetryFor(ErrorIs(errTest), Retry{MaxAttempts: 1, Then: ThenDiscard})); err != nil {
		t.Fatal(err)
	}

	d := &c.reg.snapshot().all[0].decider
	for err, want := range map[error]action{errTest: actDiscard, io.EOF: actDeadLetter, io.ErrNoProgress: actRetry} {
		if v := decideAfter(d, err, 1, 0); v.Action != want {
			t.Errorf("%v: got %s, want %s", err, v.Action, want)
		}
	}
}
