package servertest_test

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outboxtest"
	"github.com/outrelay/outrelay/pkg/relay"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// Two environments of one test have nothing in common, and the relay of one can be changed.
func TestEnvironmentsAreSeparate(t *testing.T) {
	t.Parallel()
	envs := []*servertest.Env{
		servertest.Start(t),
		servertest.Start(t, servertest.WithRelay(func(c *relay.Config) { c.Record.Preset = "cloudevents" })),
	}

	handled := make([]chan *consumer.Message, len(envs))
	for i, env := range envs {
		handled[i] = make(chan *consumer.Message, 10)
		c := env.Consumer("group", consumer.WithTopics(env.Topic("outbox.event.order")))
		err := c.Handle("all", consumer.Func(func(_ context.Context, m *consumer.Message) error {
			handled[i] <- m
			return nil
		}, "*"))
		if err != nil {
			t.Fatal(err)
		}
		env.Run(c.Run)
	}

	ids := []string{"first", "second"}
	for i, env := range envs {
		box, err := outbox.New(env.DB)
		if err != nil {
			t.Fatal(err)
		}
		err = box.Transaction(t.Context(), func(ctx context.Context) error {
			return box.Append(ctx, OrderPlaced.New(ids[i], Placed{}), event.New(event.Aggregate{Type: "other", ID: "x"}, "Other", event.Payload{}))
		})
		if err != nil {
			t.Fatal(err)
		}
		outboxtest.RequireAppended(t, box, OrderPlaced, outboxtest.WithAggregateID(ids[i]))
	}

	for i := range envs {
		m := <-handled[i]
		if _, isCloudEvent := m.Header("ce_id"); string(m.Key) != ids[i] || isCloudEvent != (i == 1) {
			t.Errorf("environment %d: got key %s, CloudEvent %t", i, m.Key, isCloudEvent)
		}
		if n := len(handled[i]); n > 0 {
			t.Errorf("environment %d: %d more messages", i, n)
		}
	}
}

// recorder is the testing.TB of a test that should fail.
type recorder struct {
	testing.TB
	cleanups []func()
	errors   []error
}

func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }

func (r *recorder) Error(args ...any) { r.errors = append(r.errors, args[0].(error)) }

func TestAnErrorOfAPartFailsTheTest(t *testing.T) {
	t.Parallel()
	r := &recorder{TB: t}
	env := servertest.Start(r)
	broken := errors.New("broken")
	env.Run(func(context.Context) error { return broken })
	for i := range r.cleanups {
		r.cleanups[len(r.cleanups)-1-i]()
	}
	if len(r.errors) != 1 || !errors.Is(r.errors[0], broken) {
		t.Errorf("errors of the test: got %v, want %v", r.errors, broken)
	}
}

// The documentation promises an integration test of at most 25 lines.
func TestTheExampleIsShort(t *testing.T) {
	t.Parallel()
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, "example_test.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}

	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || !strings.HasPrefix(f.Name.Name, "Test") {
			continue
		}
		if n := set.Position(f.Body.Rbrace).Line - set.Position(f.Body.Lbrace).Line - 1; n > 25 {
			t.Errorf("the body of %s has %d lines, want at most 25", f.Name.Name, n)
		}
	}
}
