package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

var errFlaky = errors.New("flaky")

// decideFailures returns the verdicts of p on the first n failures of a message with err. A message
// that is moved continues in its next delivery.
func decideFailures(p *consumer.Policy, err error, n int) []consumer.Verdict {
	m := &consumer.Message{Topic: "orders", ID: "1", Group: "g", Attempt: 1}
	var a consumer.Attempts
	var out []consumer.Verdict
	for range n {
		a = a.Note(err, m, time.Unix(0, 0))
		v := p.Decide(err, m, a)
		out = append(out, v)
		if v.Uncounted {
			a.Spared++
		}

		// The message was moved, so its next failure belongs to the next delivery.
		switch v.Action {
		case consumer.RetryTopic, consumer.Requeue, consumer.Schedule:
			m.Attempt = a.Total - a.Spared + 1
			a = consumer.Attempts{}
		default:
		}
	}
	return out
}

// joinActions returns the actions of vs with their topics and delays, as one text.
func joinActions(vs []consumer.Verdict) string {
	var out []string
	for _, v := range vs {
		s := v.Action.String()
		if v.Topic != "" {
			s += ":" + v.Topic
		}
		if v.Delay != 0 {
			s += " " + v.Delay.String()
		}
		if v.Pause != 0 {
			s += " pause " + v.Pause.String()
		}
		out = append(out, s)
	}
	return strings.Join(out, ", ")
}

func TestStepsFollowEachOtherThroughAllPlaces(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rule consumer.Rule
		want string
	}{
		"inline": {consumer.On().Retry(2), "retry_inline, retry_inline, dead_letter"},
		"inline with waits, the last repeats": {
			consumer.On().Retry(3, time.Second, 2*time.Second), "retry_inline 1s, retry_inline 2s, retry_inline 2s, dead_letter",
		},
		"all": {
			consumer.On().Retry(1).RetryTopic(time.Minute, time.Hour).Requeue(1).Schedule(2 * time.Hour).
				Pause(time.Minute).PauseThenRequeue(3 * time.Minute).Then(consumer.ToDiscard),
			"retry_inline, retry_topic:orders.g.retry.1 1m0s, retry_topic:orders.g.retry.2 1h0m0s, requeue, schedule 2h0m0s, " +
				"pause 1m0s, requeue pause 3m0s, discard",
		},
		"named topics": {
			consumer.On().RetryTopics(consumer.Rung{Topic: "slow", Delay: time.Hour}).DeadTopic("graves"),
			"retry_topic:slow 1h0m0s, dead_letter:graves",
		},
		"at once":         {consumer.On().DeadLetter(), "dead_letter"},
		"park":            {consumer.On().Then(consumer.ToPark), "park"},
		"pause for good":  {consumer.On().Then(consumer.ToPause), "pause -1ns"},
		"requeue forever": {consumer.On().Then(consumer.ToRequeue), "requeue, requeue, requeue"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := consumer.NewPolicy(c.rule)
			if err := p.Validate(); err != nil {
				t.Fatal(err)
			}
			if got := joinActions(decideFailures(p, errFlaky, strings.Count(c.want, ",")+1)); got != c.want {
				t.Errorf("verdicts: got\n%s, want\n%s", got, c.want)
			}
		})
	}
}

type codeError struct{ code int }

func (e *codeError) Error() string { return fmt.Sprint("code ", e.code) }

func TestTheFirstRuleThatMatchesDecides(t *testing.T) {
	t.Parallel()
	p := consumer.NewPolicy(
		consumer.On(consumer.AsFunc(func(e *codeError) bool { return e.code == 404 })).Discard(),
		consumer.On(consumer.As[*codeError](), consumer.Is(io.EOF)).Requeue(1),
		consumer.On(consumer.All(consumer.Is(errFlaky), consumer.Not(consumer.Is(context.Canceled)))).Then(consumer.ToPause),
	)
	m := &consumer.Message{Topic: "t", Group: "g", Attempt: 1}
	for _, c := range []struct {
		err  error
		want consumer.Action
	}{
		{fmt.Errorf("wrapped: %w", &codeError{404}), consumer.Skip},
		{fmt.Errorf("wrapped: %w", &codeError{500}), consumer.Requeue},
		{io.EOF, consumer.Requeue},
		{errFlaky, consumer.PauseConsumer},
		{errors.Join(errFlaky, context.Canceled), consumer.RetryInline}, // the default's
	} {
		if v := p.Decide(c.err, m, consumer.Attempts{Failed: 1, Total: 1}); v.Action != c.want {
			t.Errorf("verdict on %v: got %s, want %s", c.err, v.Action, c.want)
		}
	}
}

func TestAHandlersPolicyBeatsTheConsumers(t *testing.T) {
	t.Parallel()
	all := consumer.NewPolicy(consumer.On(consumer.Is(errFlaky)).DeadLetter(), consumer.On(consumer.Is(io.EOF)).Then(consumer.ToPause))
	own := consumer.NewPolicy(consumer.On(consumer.Is(errFlaky)).Discard()).Or(all)
	m, a := &consumer.Message{Attempt: 1}, consumer.Attempts{Failed: 1, Total: 1}
	if v := own.Decide(errFlaky, m, a); v.Action != consumer.Skip {
		t.Errorf("rule of the handler: got %s", v.Action)
	}
	if v := own.Decide(io.EOF, m, a); v.Action != consumer.PauseConsumer {
		t.Errorf("rule of the consumer: got %s", v.Action)
	}
}

func TestDefaultPolicy(t *testing.T) {
	t.Parallel()
	p := consumer.DefaultPolicy()
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}

	got := decideFailures(p, errFlaky, 4)
	for i, most := range []time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond} {
		if v := got[i]; v.Action != consumer.RetryInline || v.Delay > most || v.Delay < most*3/4 {
			t.Errorf("failure %d: got %s after %s, want retry_inline after at most %s", i+1, v.Action, v.Delay, most)
		}
	}
	if got[3].Action != consumer.DeadLetter {
		t.Errorf("failure 4: got %s, want dead_letter", got[3].Action)
	}

	transient := mongo.CommandError{Code: 189, Labels: []string{"TransientTransactionError"}}
	for i, v := range decideFailures(p, fmt.Errorf("writing: %w", transient), 40) {
		if v.Action != consumer.RetryAfter || !v.Uncounted || v.Delay > 30*time.Second {
			t.Fatalf("transient failure %d: got %+v, want an uncounted retry_after of at most 30s", i+1, v)
		}
	}

	for _, c := range []struct {
		err  error
		want consumer.Action
	}{
		{&consumer.NoHandlerError{Type: "T"}, consumer.Park},
		{&consumer.ExpiredError{}, consumer.DeadLetter},
		{&consumer.InvalidError{}, consumer.DeadLetter},
		{&consumer.DecodeError{Err: io.EOF}, consumer.DeadLetter},
		{&inbox.DuplicateError{}, consumer.Skip},
		{&consumer.TimeoutError{Err: transient}, consumer.RetryInline},
	} {
		if v := p.Decide(c.err, &consumer.Message{Attempt: 1}, consumer.Attempts{Failed: 1, Total: 1}); v.Action != c.want {
			t.Errorf("verdict on %T: got %s, want %s", c.err, v.Action, c.want)
		}
	}
}

func TestWhatIsTransientIsToldByCodesAndLabels(t *testing.T) {
	t.Parallel()
	is := consumer.Transient()
	for _, c := range []struct {
		err  error
		want bool
	}{
		{mongo.CommandError{Code: 91}, true},
		{mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}, true},
		{mongo.CommandError{Labels: []string{"NetworkError"}}, true},
		{fmt.Errorf("x: %w", mongo.CommandError{Code: 50, Wrapped: context.DeadlineExceeded}), true},
		{mongo.WriteException{WriteErrors: mongo.WriteErrors{{Code: 11000}}}, false},
		{mongo.CommandError{Code: 13}, false},
		{context.DeadlineExceeded, false}, // whose, nobody knows
		{errors.New("NotWritablePrimary"), false},
		{&consumer.TimeoutError{Err: mongo.CommandError{Labels: []string{"NetworkError"}}}, false},
	} {
		if got := is(c.err); got != c.want {
			t.Errorf("Transient of %#v: got %t", c.err, got)
		}
	}
}

// In any order of failures, uncounted ones take no step, and counted ones end at the outcome.
func TestFailuresThatAreNotCountedSpendNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "retries")
		p := consumer.NewPolicy(consumer.On(consumer.Is(errFlaky)).Retry(n))
		m := &consumer.Message{Attempt: rapid.IntRange(1, 3).Draw(t, "attempt")}
		var a consumer.Attempts
		counted := m.Attempt - 1

		for {
			err := error(errFlaky)
			if rapid.Bool().Draw(t, "transient") {
				err = mongo.CommandError{Code: 91}
			}

			a = a.Note(err, m, time.Unix(int64(a.Failed), 0))
			v := p.Decide(err, m, a)
			if v.Uncounted {
				a.Spared++
				continue
			}

			counted++
			if dead := v.Action == consumer.DeadLetter; dead != (counted > n) {
				t.Fatalf("counted failure %d with %d retries: got %s", counted, n, v.Action)
			} else if dead {
				if len(a.History) > consumer.MaxHistory {
					t.Fatalf("kept failures: got %d, want at most %d", len(a.History), consumer.MaxHistory)
				}
				return
			}
		}
	})
}

func TestMistakesInRulesAreListedAllAtOnce(t *testing.T) {
	t.Parallel()
	p := consumer.NewPolicy(
		consumer.On().Retry(0).Jitter(2).RetryTopic(-time.Second).Pause(0).Requeue(0).RetryForever(0, 0),
		consumer.On().RetryTopic(time.Second),
		consumer.On().RetryTopic(time.Minute),
		consumer.On().Then(99),
	)
	err := p.Validate()
	if !errors.Is(err, consumer.ErrConfiguration) {
		t.Fatalf("Validate: got %v, want ErrConfiguration", err)
	}

	for _, want := range []string{
		"Retry(0)", "Jitter(2)", "-1s", "Pause", "Requeue(0)", "RetryForever", "would hold up the shorter",
		"Then(99)",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("Validate: got error %v, want it to contain %q", err, want)
		}
	}
}

func TestRulesAreValues(t *testing.T) {
	t.Parallel()
	base := consumer.On().Retry(1)
	a, b := base.RetryTopic(time.Second), base.Requeue(1)
	if got := joinActions(decideFailures(consumer.NewPolicy(a), errFlaky, 3)); got != "retry_inline, retry_topic:orders.g.retry.1 1s, dead_letter" {
		t.Error(got)
	}
	if got := joinActions(decideFailures(consumer.NewPolicy(b), errFlaky, 3)); got != "retry_inline, requeue, dead_letter" {
		t.Error(got)
	}
}

func TestRetryTopicsOfAPolicy(t *testing.T) {
	t.Parallel()
	p := consumer.NewPolicy(
		consumer.On(consumer.Is(io.EOF)).RetryTopic(time.Second, time.Minute),
		consumer.On().RetryTopic(time.Second).RetryTopics(consumer.Rung{Topic: "slow", Delay: time.Hour}),
	)
	want := []string{"orders.g.retry.1", "orders.g.retry.2", "slow"}
	if diff := cmp.Diff(want, p.Topics("g", "orders")); diff != "" {
		t.Error(diff)
	}

	// The next retry topic of a message belongs to the topic of its first record.
	origin := event.Header{Key: consumer.HeaderRetryOrigin, Value: []byte("orders/3/17")}
	m := &consumer.Message{Topic: "orders.g.retry.1", Group: "g", Attempt: 2, Headers: []event.Header{origin}}
	if v := p.Decide(io.EOF, m, consumer.Attempts{Failed: 1, Total: 2}); v.Topic != "orders.g.retry.2" {
		t.Errorf("next retry topic: got %q, want orders.g.retry.2", v.Topic)
	}
}

func TestTheConsumersOwnErrorsWait(t *testing.T) {
	t.Parallel()
	p := consumer.NewPolicy(consumer.On().RetryTopic(time.Minute).Discard())
	m, a := &consumer.Message{Topic: "orders", Group: "g", Attempt: 1}, consumer.Attempts{Failed: 1, Total: 1}

	v := p.Decide(&consumer.NotDueError{Due: time.Now().Add(time.Hour)}, m, a)
	if v.Action != consumer.RetryAfter || !v.Uncounted || v.Delay < 59*time.Minute {
		t.Errorf("not due: %+v", v)
	}
}

func TestADatabaseThatIsAwayIsTransient(t *testing.T) {
	t.Parallel()
	c, err := mongo.Connect(options.Client().ApplyURI("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=50"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Disconnect(context.WithoutCancel(t.Context())) }()
	_, err = c.Database("db").Collection("c").InsertOne(t.Context(), bson.D{})
	if !consumer.Transient()(errors.Join(errFlaky, fmt.Errorf("writing: %w", err))) {
		t.Errorf("%T: %v", err, err)
	}
}

func TestAPolicyThatTheConsumerCannotCarryOutIsRefused(t *testing.T) {
	t.Parallel()
	refused := func(name string, p *consumer.Policy) {
		t.Helper()
		c, err := consumer.New("g", nil, consumer.WithTopics("t"), consumer.WithBrokers("127.0.0.1:1"), consumer.OnFailure(p),
			consumer.Letters(nil), consumer.DeadTopics(nil), consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error { return fn(ctx) }),
			consumer.WithInbox(noInbox{}))
		if err == nil {
			handle(t, c, "*", nop)
			err = c.Run(t.Context())
		}
		if !errors.Is(err, consumer.ErrConfiguration) {
			t.Errorf("%s: %v", name, err)
		}
	}
	refused("no outbox", consumer.NewPolicy(consumer.On().Schedule(time.Hour)))
	refused("none", nil)
	refused("a broken rule", consumer.NewPolicy(consumer.On().Retry(-1)))
}

type noInbox struct{ consumer.Inbox }
