package operate_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/operate"
	"github.com/outrelay/outrelay/pkg/relay"
)

// requireAudit waits for an entry of the audit log with this kind, actor and the source service.
func (s *scene) requireAudit(kind, actor string) {
	s.t.Helper()
	s.requireAuditOf(kind, actor, "service")
}

// requireAuditOf waits for an entry of the audit log with this kind, actor and source.
func (s *scene) requireAuditOf(kind, actor, source string) {
	s.t.Helper()
	log := state.Open(s.client, s.config.State).Collection("audit")
	stacktest.Eventually(s.t, "the audit log has "+kind+" of "+actor, func() bool {
		count, err := log.CountDocuments(s.t.Context(), bson.D{
			{Key: "kind", Value: kind}, {Key: "fields.actor", Value: actor}, {Key: "fields.source", Value: source},
		})
		return err == nil && count == 1
	})
}

// An expired event becomes a dead letter, which a service finds, opens, and requeues once. Each action has its actor.
func TestDeadLettersAreReadRequeuedAndDiscarded(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.runRelay()
	op := s.operator().As("ann")
	past := time.Now().Add(-time.Hour)
	first, second := s.append("o1", event.WithExpiry(past)), s.append("o2", event.WithExpiry(past))

	found := eventually(t, 2, func() iterOf[operate.Letter] { return op.Letters(t.Context(), operate.LetterFilter{Class: "expired"}) })
	slices.SortFunc(found, func(a, b operate.Letter) int { return strings.Compare(a.Key, b.Key) })
	letter := found[0]
	if letter.ID != first || letter.Key != "o1" || letter.Type != "OrderPlaced" || letter.Ref.By != operate.Relay || letter.Envelope != nil || letter.Reason == "" || letter.DiedAt.IsZero() {
		t.Errorf("the letter: got %+v", letter)
	}
	if count, err := op.CountLetters(t.Context(), operate.LetterFilter{Key: "o2"}); count != 1 || err != nil {
		t.Errorf("letters of key o2: got %d, %v", count, err)
	}

	groups, err := op.SummarizeLetters(t.Context(), operate.LetterFilter{By: operate.Relay})
	if err != nil || len(groups) != 1 || groups[0].Count != 2 || groups[0].NotRequeued != 2 || groups[0].Class != "expired" || groups[0].First.IsZero() {
		t.Errorf("the groups of letters: got %+v, %v", groups, err)
	} else if count, err := op.CountLetters(t.Context(), operate.LetterFilter{Fingerprint: groups[0].Fingerprint}); count != 2 || err != nil {
		t.Errorf("letters of the failure: got %d, %v", count, err)
	}
	conversation, err := op.Conversation(t.Context(), first)
	if err != nil || len(conversation.Events) != 1 || conversation.Events[0].ID != first || conversation.Events[0].State != "dead" {
		t.Errorf("the conversation of the event: got %+v, %v", conversation, err)
	}

	shown, err := op.Letter(t.Context(), letter.Ref)
	if err != nil || strings.Contains(string(shown.Envelope), "secret") || !json.Valid(shown.Envelope) {
		t.Errorf("the letter without its payload: got %s, %v", shown.Envelope, err)
	}
	opened, err := op.OpenLetter(t.Context(), letter.Ref)
	var envelope struct{ Payload json.RawMessage }
	if err != nil || json.Unmarshal(opened.Envelope, &envelope) != nil || len(envelope.Payload) == 0 {
		t.Errorf("the letter with its payload: got %s, %v", opened.Envelope, err)
	}
	s.requireAudit("payload_shown", "ann")

	life, err := op.Lookup(t.Context(), first)
	if err != nil || life.ByKey || len(life.Events) != 1 || life.Events[0].State != "dead" || len(life.Events[0].Life) < 2 || len(life.Letters) != 1 || life.Letters[0].Ref != letter.Ref {
		t.Errorf("the life of the event: got %+v, %v", life, err)
	}
	if life, err := op.Lookup(t.Context(), "o2"); err != nil || !life.ByKey || len(life.Events) != 1 || life.Events[0].ID != second {
		t.Errorf("the events of key o2: got %+v, %v", life, err)
	}

	// Without the option, an expired event would only expire again.
	one := operate.LetterFilter{IDs: []string{first}}
	if out, err := op.RequeueLetters(t.Context(), one, operate.RequeueOptions{}); err != nil || out.Requeued != 0 || out.Rejected != 1 || len(out.Why) != 1 || out.Why[0].ID != first {
		t.Errorf("requeue of an expired event: got %+v, %v", out, err)
	}
	if out, err := op.RequeueLetters(t.Context(), one, operate.RequeueOptions{IgnoreExpiry: true, DryRun: true}); err != nil || out.Requeued != 1 {
		t.Errorf("dry run: got %+v, %v", out, err)
	}
	if out, err := op.As("bob").RequeueLetters(t.Context(), one, operate.RequeueOptions{IgnoreExpiry: true}); err != nil || out.Requeued != 1 || out.Matched != 1 {
		t.Errorf("requeue: got %+v, %v", out, err)
	}
	s.requireAudit("dead_requeued", "bob")
	requeued := collect(t, op.Letters(t.Context(), operate.LetterFilter{IDs: []string{first}}))
	if len(requeued) != 1 || requeued[0].Requeued == nil || requeued[0].Requeued.Actor != "bob" || requeued[0].Requeued.Delivery != 1 {
		t.Errorf("the requeued letter: got %+v", requeued)
	}
	eventually(t, 0, func() iterOf[operate.WaitingEvent] { return op.Waiting(t.Context(), operate.WaitingFilter{}) })

	if count, err := op.DiscardLetters(t.Context(), operate.LetterFilter{IDs: []string{second}}, operate.DiscardOptions{DryRun: true}); count != 1 || err != nil {
		t.Errorf("dry run of a discard: got %d, %v", count, err)
	}
	if count, err := op.DiscardLetters(t.Context(), operate.LetterFilter{IDs: []string{second}}, operate.DiscardOptions{}); count != 1 || err != nil {
		t.Errorf("discard: got %d, %v", count, err)
	}
	s.requireAudit("dead_discarded", "ann")
	if letter, err := op.Letter(t.Context(), found[1].Ref); err != nil || letter.Archived == nil || letter.Archived.Actor != "ann" || letter.Archived.Until.IsZero() {
		t.Errorf("a discarded letter: got %+v, %v; want it in the archive", letter.Archived, err)
	}

	// From the archive it goes for good.
	archived := operate.LetterFilter{IDs: []string{second}, Archived: true}
	if count, err := op.DiscardLetters(t.Context(), archived, operate.DiscardOptions{}); count != 1 || err != nil {
		t.Errorf("removal from the archive: got %d, %v", count, err)
	}
	if _, err := op.Letter(t.Context(), found[1].Ref); !errors.Is(err, operate.ErrNotFound) {
		t.Errorf("a removed letter: got %v, want ErrNotFound", err)
	}
}

// Events whose topic is rejected go to another topic, all at once. The routing neither has the topic nor accepts the envelopes.
func TestDeadLettersAreRequeuedToAnotherTopic(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.runRelay()
	op := s.operator().As("ann")
	other := stacktest.Topic(t, 1)
	var ids []string
	for _, key := range []string{"o1", "o2", "o3"} {
		ids = append(ids, s.append(key, event.WithTopic("__consumer_offsets")))
	}
	filter := operate.LetterFilter{Class: "not_allowed"}
	eventually(t, 3, func() iterOf[operate.Letter] { return op.Letters(t.Context(), filter) })

	for name, options := range map[string]operate.RequeueOptions{
		"a name that Kafka rejects":   {Topic: "a/b"},
		"a topic that Kafka owns":     {Topic: "__consumer_offsets"},
		"a topic as well as handlers": {Topic: other, Handlers: []string{"billing"}},
	} {
		if _, err := op.RequeueLetters(t.Context(), filter, options); !errors.Is(err, operate.ErrInvalid) {
			t.Errorf("%s: got %v, want an invalid request", name, err)
		}
	}
	handlers := operate.LetterFilter{By: operate.Handler, All: true}
	if _, err := op.RequeueLetters(t.Context(), handlers, operate.RequeueOptions{Topic: other}); !errors.Is(err, operate.ErrInvalid) {
		t.Errorf("letters of handlers: got %v, want an invalid request", err)
	}

	if out, err := op.RequeueLetters(t.Context(), filter, operate.RequeueOptions{Topic: other, DryRun: true}); err != nil || out.Requeued != 3 {
		t.Errorf("dry run: got %+v, %v, want 3", out, err)
	}
	var done int64
	out, err := op.RequeueLetters(t.Context(), filter, operate.RequeueOptions{Topic: other, Progress: func(n int64) { done = n }})
	if err != nil || out.Requeued != 3 || done != 3 {
		t.Errorf("got %+v and progress %d, %v, want 3", out, done, err)
	}

	for _, id := range ids {
		stacktest.Eventually(t, "event "+id+" is in the other topic", func() bool {
			life, err := op.Lookup(t.Context(), id)
			return err == nil && len(life.Events) == 1 && life.Events[0].State == "delivered" && slices.ContainsFunc(life.Events[0].Life, func(entry operate.LifeEntry) bool {
				return entry.Entry == "sent" && strings.HasPrefix(entry.Text, other+"/0@")
			})
		})
	}
	for letter, err := range op.Letters(t.Context(), filter) {
		if err != nil || letter.Requeued == nil || letter.Requeued.Topic != other {
			t.Errorf("letter of %s: got the requeue %+v, %v, want its topic", letter.Key, letter.Requeued, err)
		}
	}
	s.requireAudit("dead_requeued", "ann")
}

// Events that wait are listed with their reason. Failed ones are due at once after a retry.
func TestWaitingEventsAreListedAndRetried(t *testing.T) {
	t.Parallel()
	missing := "missing." + stacktest.Name(t)
	s := setup(t)
	s.runRelay()
	op := s.operator()
	id := s.append("o1", event.WithTopic(missing))
	events := eventually(t, 1, func() iterOf[operate.WaitingEvent] {
		return op.Waiting(t.Context(), operate.WaitingFilter{Topic: missing})
	})
	if got := events[0]; got.ID != id || got.Key != "o1" || got.Reason != "parked" || !slices.Equal(got.Topics, []string{missing}) || got.Failure != nil {
		t.Errorf("the waiting event: got %+v", got)
	}

	// The relay counts every five seconds.
	var status operate.Status
	stacktest.Eventually(t, "the status counts the waiting event", func() bool {
		var err error
		status, err = op.Status(t.Context())
		return err == nil && status.Counts.Parked == 1
	}, func() any { return status })
	if status.Counts.Waiting() != 1 || len(status.Slots) != 1 || status.Slots[0].Owner == "" || len(status.Nodes) != 1 {
		t.Errorf("the status: got %+v", status)
	}

	stacktest.Eventually(t, "the topic is a problem", func() bool {
		problems, err := op.Problems(t.Context())
		return err == nil && slices.ContainsFunc(problems, func(problem operate.Problem) bool {
			return problem.Kind == "topic_unwritable" && problem.Object == missing && problem.Severity == operate.Warn && problem.Count == 1 &&
				problem.Fix != "" && !problem.Since.IsZero()
		})
	}, func() any { problems, err := op.Problems(t.Context()); return []any{problems, err} })
	if err := op.Acknowledge(t.Context(), "nothing"); !errors.Is(err, operate.ErrInvalid) {
		t.Errorf("acknowledging nothing: got %v, want ErrInvalid", err)
	}

	// A record that Kafka rejected waits for an hour, in an outbox that no watcher has any more.
	database := state.Open(s.client, s.config.State)
	entry := admintest.Waits(t, "gone.outbox", bson.D{
		{Key: "_id", Value: "f1"}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "OrderPlaced"},
	}, waiting.Retry, s.topic)
	entry.Watcher, entry.Attempts, entry.NextAt = "other", 3, time.Now().Add(time.Hour)
	admintest.StoreWaiting(t, database.Collection("waiting"), entry)
	other, err := operate.New(s.client, operate.WithState(s.config.State), operate.WithWatcher("other"))
	if err != nil {
		t.Fatal(err)
	}
	if count, err := other.RetryWaiting(t.Context(), operate.WaitingFilter{All: true}, operate.RetryOptions{DryRun: true}); count != 1 || err != nil {
		t.Errorf("dry run: got %d, %v", count, err)
	}
	if count, err := other.As("eve").RetryWaiting(t.Context(), operate.WaitingFilter{All: true}, operate.RetryOptions{Reset: true}); count != 1 || err != nil {
		t.Errorf("retry: got %d, %v", count, err)
	}
	s.requireAudit("failed_reset", "eve")
}

// Scheduled events are listed, moved and canceled. A loop that ends early reads no further page.
func TestScheduledEventsAreMovedAndCanceled(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.runRelay()
	op := s.operator().As("ann")
	s.append("first")
	due := time.Now().Add(48 * time.Hour).Truncate(time.Millisecond)
	one, two := s.append("o1", event.WithDueAt(due)), s.append("o2", event.WithDueAt(due.Add(time.Hour)))
	events := eventually(t, 2, func() iterOf[operate.ScheduledEvent] { return op.Scheduled(t.Context(), operate.ScheduledFilter{}) })
	if events[0].ID != one || !events[0].DueAt.Equal(due) || events[0].AggregateID != "o1" || events[1].ID != two {
		t.Errorf("the scheduled events: got %+v", events)
	}
	for event, err := range op.Scheduled(t.Context(), operate.ScheduledFilter{DueBefore: due.Add(time.Minute)}) {
		if err != nil || event.ID != one {
			t.Errorf("the first event: got %+v, %v", event, err)
		}
		break
	}

	later := due.Add(24 * time.Hour)
	if moved, err := op.Reschedule(t.Context(), operate.ScheduledFilter{IDs: []string{one, "unknown"}}, later, operate.ScheduledOptions{}); err != nil || moved != 1 {
		t.Errorf("reschedule: got %v, %v", moved, err)
	}
	s.requireAudit("scheduled_moved", "ann")
	if _, err := op.CancelScheduled(t.Context(), operate.ScheduledFilter{}, operate.ScheduledOptions{}); !errors.Is(err, operate.ErrInvalid) {
		t.Errorf("a cancellation without a condition: got %v, want ErrInvalid", err)
	}
	if count, err := op.CancelScheduled(t.Context(), operate.ScheduledFilter{DueFrom: later}, operate.ScheduledOptions{}); count != 1 || err != nil {
		t.Errorf("cancellation: got %d, %v", count, err)
	}
	if count, err := op.CancelScheduled(t.Context(), operate.ScheduledFilter{All: true}, operate.ScheduledOptions{}); count != 1 || err != nil {
		t.Errorf("cancellation of all: got %d, %v", count, err)
	}
}

// A scheduled event has the same conversation and the same aggregate before and after its delivery.
func TestAScheduledEventKeepsItsConversation(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.runRelay()
	op := s.operator()
	cause := event.WithCause(event.Cause{CorrelationID: "req-1", CausationID: "msg-1"})
	id := s.append("o1", cause, event.WithDueAt(time.Now().Add(6*time.Second)))

	for _, state := range []string{"scheduled", "delivered"} {
		var life operate.Found
		stacktest.Eventually(t, "the event is "+state, func() bool {
			var err error
			life, err = op.Lookup(t.Context(), id)
			return err == nil && len(life.Events) == 1 && life.Events[0].State == state
		}, func() any { return life })
		if got := life.Events[0]; got.CorrelationID != "req-1" || got.CausationID != "msg-1" || got.AggregateType != "order" || got.AggregateID != "o1" {
			t.Errorf("%s: got %+v", state, got)
		}
		found, err := op.Conversation(t.Context(), "req-1")
		if err != nil || len(found.Events) != 1 || found.Events[0].ID != id || found.Events[0].State != state {
			t.Errorf("the conversation of the %s event: got %+v, %v", state, found, err)
		}
	}
}

// A service pauses and resumes its watcher, and makes the owner step down.
func TestAServicePausesAndResumes(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.runRelay()
	op := s.operator()
	if err := op.StepDown(t.Context(), 0, operate.StepDownOptions{}); !errors.Is(err, operate.ErrInvalid) {
		t.Errorf("stepping down for no time: got %v, want ErrInvalid", err)
	}
	if err := op.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.await(relay.Standby)

	status, err := op.Status(t.Context())
	if err != nil || len(status.Slots) != 1 || !status.Slots[0].Paused || status.Slots[0].Owner != "" {
		t.Errorf("the status of a paused watcher: got %+v, %v", status, err)
	}
	if err := op.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.await(relay.Owner)
	slot := op.ForSlot("0of1")
	if err := slot.StepDown(t.Context(), 2*time.Second, operate.StepDownOptions{}); !errors.Is(err, operate.ErrConflict) {
		t.Errorf("a step-down without a standby: got %v, want ErrConflict", err)
	}
	if err := slot.StepDown(t.Context(), 2*time.Second, operate.StepDownOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the owner has stepped down and is the owner again", func() bool {
		status, err := op.Status(t.Context())
		return err == nil && len(status.Slots) == 1 && status.Slots[0].Epoch >= 3 && status.Slots[0].Owner != ""
	})
	if err := op.ForSlot("7of9").Pause(t.Context()); !errors.Is(err, operate.ErrNotFound) {
		t.Errorf("a slot that does not exist: got %v, want ErrNotFound", err)
	}
}

// Mistakes have a kind, and a text with the cause and the fix.
func TestMistakesAreExplained(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	empty, err := operate.New(client, operate.WithState(relay.State{Database: stacktest.Name(t)}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := empty.Status(t.Context()); !errors.Is(err, operate.ErrInvalid) || !strings.Contains(err.Error(), "state.database") {
		t.Errorf("a database without state: got %v", err)
	}
	var last error
	for _, err := range empty.Letters(t.Context(), operate.LetterFilter{}) {
		last = err
	}
	if !errors.Is(last, operate.ErrInvalid) {
		t.Errorf("a list of a database without state: got %v", last)
	}
	if _, err := operate.New(nil); err == nil || !strings.Contains(err.Error(), "client") {
		t.Errorf("without a client: got %v", err)
	}
	if _, err := operate.Of(nil); err == nil || !strings.Contains(err.Error(), "relay.New") {
		t.Errorf("without a relay: got %v", err)
	}

	s := setup(t)
	s.runRelay()
	op := s.operator()
	s.append("o1")
	stacktest.Eventually(t, "the outbox is registered", func() bool {
		_, err := op.CountLetters(t.Context(), operate.LetterFilter{})
		return err == nil
	})
	for name, fails := range map[string]func() error{
		"a class that does not exist": func() error {
			_, err := op.CountLetters(t.Context(), operate.LetterFilter{Class: "bad"})
			return err
		},
		"an action without a condition": func() error {
			_, err := op.DiscardLetters(t.Context(), operate.LetterFilter{}, operate.DiscardOptions{})
			return err
		},
		"a reason that does not exist": func() error {
			_, err := op.RetryWaiting(t.Context(), operate.WaitingFilter{Reason: "slow"}, operate.RetryOptions{})
			return err
		},
	} {
		if err := fails(); !errors.Is(err, operate.ErrInvalid) || !strings.HasPrefix(err.Error(), "operate: cannot ") {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := op.Pause(ended); !errors.Is(err, operate.ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("an ended context: got %v, want ErrUnavailable and context.Canceled", err)
	}
}
