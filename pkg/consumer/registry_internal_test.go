package consumer

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// The settings of a handler override those of New, in both directions.
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
		"a": nil, "b": {WithMode(Transactional)}, "c": {WithMode(AtLeastOnce), InTransaction()},
	} {
		if err := c.Handle(name, nothing, opts...); err != nil {
			t.Fatal(err)
		}
	}

	modes := map[string]Mode{}
	for _, r := range c.reg.snapshot().all {
		modes[r.name] = r.mode
	}
	if d := cmp.Diff(map[string]Mode{"a": Claimed, "b": Transactional, "c": AtLeastOnce}, modes); d != "" {
		t.Error(d)
	}
}
