package operate

import (
	"context"
	"encoding/json"
	"iter"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
)

// Giver is who gave up an event.
type Giver string

// The values of Giver.
const (
	Anyone  Giver = ""                // in a filter: the relay, or a handler
	Relay   Giver = admin.FromRelay   // the relay could not send the event
	Handler Giver = admin.FromHandler // a handler of a consumer could not handle the message
)

// LetterFilter selects dead letters. A letter matches if it fulfills all conditions that are set. An empty list of ids that is not nil
// selects nothing.
type LetterFilter struct {
	By            Giver
	Collection    string    // of the relay: the outbox; of a handler: the collection of the letters; as database.collection
	IDs           []string  // of letters, as in [LetterRef], or of events
	From          time.Time // given up at this time or later
	Before        time.Time // given up before this time
	Topic         string
	Type          string // name of the event
	AggregateType string
	Key           string // the ordering key
	Class         string // the kind of failure, see docs/waiting.md
	Reason        string // beginning of the reason
	Group         string // the consumer group: selects letters of handlers
	Handler       string // the name of the handler: selects letters of handlers
	Fingerprint   string // the failure, as [Operator.SummarizeLetters] returns it
	Requeued      *bool  // nil means both; actions ignore requeued letters
	Archived      bool   // the discarded letters in the archive, in place of the others
	All           bool   // permits an action without any condition
}

func (f LetterFilter) toAdmin() admin.DeadFilter {
	filter := admin.DeadFilter{
		Source: string(f.By), Collection: f.Collection, IDs: f.IDs, From: f.From, To: f.Before, Topic: f.Topic, Type: f.Type,
		AggregateType: f.AggregateType, Key: f.Key, Class: f.Class, Message: f.Reason, Group: f.Group, Handler: f.Handler,
		Fingerprint: f.Fingerprint, Archived: f.Archived, All: f.All,
	}
	if f.Requeued != nil {
		filter.RequeueStatus = string(letters.NotRequeued)
		if *f.Requeued {
			filter.RequeueStatus = string(letters.Requeued)
		}
	}
	return filter
}

// Letter is a dead letter: an event that the relay or a handler gave up.
type Letter struct {
	Ref LetterRef // identifies the letter

	ID            string // of the event
	Delivery      int    // the delivery that was given up; 0 is the first one
	AggregateType string
	Type          string // name of the event
	Key           string // the ordering key
	Topic         string // of the relay: the topic that rejected it, if one did
	Partition     *int32 // nil if the partition is unknown
	Node          string // of the relay that gave up

	Class    string // the kind of failure
	Reason   string // for people; it contains no payload
	Attempts []FailedAttempt
	DiedAt   time.Time
	Size     int // bytes of the event

	Requeued *Requeue // nil if it is not requeued

	Archived *Archived // nil if it is not discarded

	// Envelope is the event as relaxed Extended JSON. Only [Operator.Letter] and [Operator.OpenLetter] set it.
	Envelope json.RawMessage
}

// LetterRef identifies a dead letter. Use that of a [Letter], or fill the fields that are known.
type LetterRef struct {
	By         Giver
	Collection string
	ID         string // of the letter, of the event, or of a handler's letter also the place: topic/partition@offset
	Group      string // of a handler
	Handler    string // of a handler
}

// Requeue states who requeued a letter.
type Requeue struct {
	At       time.Time
	Actor    string
	Delivery int    // of the event that the requeue has made
	Topic    string // the only topic that got the event, if the requeue has chosen one
}

// Archived states who discarded a letter that is in the archive.
type Archived struct {
	At    time.Time
	Actor string
	Until time.Time // when MongoDB removes the letter
}

// Letters returns the dead letters that match, without their events, newest first.
func (o *Operator) Letters(ctx context.Context, filter LetterFilter) iter.Seq2[Letter, error] {
	read := func(use admin.Operator, after string) ([]admin.DeadLetter, string, error) {
		page, err := use.Letters().List(ctx, filter.toAdmin(), admin.MaxPage, after)
		return page.Items, page.Next, err
	}
	return listAll(ctx, o, "list the dead letters", read, newLetter)
}

// CountLetters returns the number of dead letters that match.
func (o *Operator) CountLetters(ctx context.Context, filter LetterFilter) (int64, error) {
	const doing = "count the dead letters"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	count, err := use.Letters().Count(ctx, filter.toAdmin())
	return count, explain(doing, err)
}

// LetterGroup counts the dead letters of one failure.
type LetterGroup struct {
	Fingerprint string // selects the letters: the field of [LetterFilter]
	By          Giver
	Group       string // of a handler: the consumer group
	Handler     string // of a handler
	Topic, Type string
	Class       string // the kind of failure
	Failure     string // the reason without its variable parts
	Count       int64
	NotRequeued int64
	First, Last time.Time // when the first and the last of them was given up
}

// SummarizeLetters returns the dead letters that match, grouped by their failure. It reads all of them.
func (o *Operator) SummarizeLetters(ctx context.Context, filter LetterFilter) ([]LetterGroup, error) {
	const doing = "summarize the dead letters"
	use, err := o.prepare(ctx)
	if err != nil {
		return nil, explain(doing, err)
	}
	stored, err := use.Letters().Summary(ctx, filter.toAdmin())
	if err != nil {
		return nil, explain(doing, err)
	}

	groups := make([]LetterGroup, len(stored))
	for i, group := range stored {
		groups[i] = LetterGroup{
			Fingerprint: group.Fingerprint, By: Giver(group.Source), Group: group.ConsumerGroup, Handler: group.Handler, Topic: group.Topic,
			Type: group.Type, Class: string(group.Class), Failure: group.Failure, Count: group.Count, NotRequeued: group.NotRequeued,
			First: group.First, Last: group.Last,
		}
	}
	return groups, nil
}

// Letter returns one dead letter with its event, without the payload and other business data.
func (o *Operator) Letter(ctx context.Context, ref LetterRef) (Letter, error) {
	return o.showLetter(ctx, ref, admin.WithoutPayload)
}

// OpenLetter is [Operator.Letter] with the payload. The audit log gets an entry first.
func (o *Operator) OpenLetter(ctx context.Context, ref LetterRef) (Letter, error) {
	return o.showLetter(ctx, ref, admin.WithPayload)
}

func (o *Operator) showLetter(ctx context.Context, ref LetterRef, detail admin.Detail) (Letter, error) {
	const doing = "show the dead letter"
	use, err := o.prepare(ctx)
	if err != nil {
		return Letter{}, explain(doing, err)
	}

	// A negative delivery is the latest one of the event.
	found, err := use.Letters().Show(ctx, admin.DeadRef{
		Source: string(ref.By), Collection: ref.Collection, ID: ref.ID, Group: ref.Group, Handler: ref.Handler, Delivery: -1,
	}, detail)
	if err != nil {
		return Letter{}, explain(doing, err)
	}
	return newLetter(&found), nil
}

func newLetter(stored *admin.DeadLetter) Letter {
	letter := Letter{
		Ref: LetterRef{
			By: Giver(stored.Source.Kind), Collection: stored.Collection, ID: stored.Row, Group: stored.Source.Group, Handler: stored.Source.Handler,
		},
		ID: stored.ID, Delivery: int(stored.Delivery), AggregateType: stored.AggregateType, Type: stored.Type, Key: stored.Key,
		Topic: stored.Topic, Partition: stored.Partition, Node: stored.Source.Node,
		Class: stored.Class, Reason: stored.Reason, DiedAt: stored.DiedAt, Size: stored.Size, Envelope: stored.Envelope,
	}

	for _, attempt := range stored.Attempts {
		letter.Attempts = append(letter.Attempts, FailedAttempt{
			At: attempt.At, Class: string(attempt.Class), Reason: attempt.Reason, Topic: attempt.Topic, Node: attempt.Node,
		})
	}
	if requeue := stored.Requeued; requeue != nil {
		letter.Requeued = &Requeue{At: requeue.At, Actor: requeue.Actor, Delivery: int(requeue.Delivery), Topic: requeue.Topic}
	}
	if archived := stored.Archived; archived != nil {
		letter.Archived = &Archived{At: archived.At, Actor: archived.Actor, Until: archived.Until}
	}
	return letter
}

// RequeueOptions change a requeue. The zero value is the default.
type RequeueOptions struct {
	IgnoreExpiry bool // of letters of the relay: also requeue expired events, without their expiry
	// Topic is the only topic that gets the events of letters of the relay, for example after a topic was renamed. The routing of the relay
	// need not have it. With a topic, letters of handlers are left alone. "" means the topics that the routing chooses.
	Topic    string
	Handlers []string         // of letters of handlers: the handlers that get the messages, instead of the handlers that failed
	DryRun   bool             // only count
	Progress func(done int64) // called with the number of letters so far, from one goroutine; may be nil
}

// RequeueOutcome counts the effects of a requeue, or with DryRun the expected effects.
type RequeueOutcome struct {
	Matched  int64       // letters that were not requeued before
	Requeued int64       // letters whose event is delivered again
	Rejected int64       // letters that cannot be delivered as they are, and stay
	Why      []Rejection // the first rejected letters
}

// Rejection is a letter that cannot be requeued.
type Rejection struct {
	Collection string
	ID         string // of the event
	Reason     string // with the fix
}

// RequeueLetters delivers the events of all matching letters that are not requeued yet once more: those of the relay to their
// topics, and those of handlers to the handlers. It returns when they are stored, which may be before they are sent. If it
// fails, the outcome has what was done until then, and the same call does the rest. It returns [ErrInvalid] for a filter
// without a condition, unless All is set.
func (o *Operator) RequeueLetters(ctx context.Context, filter LetterFilter, options RequeueOptions) (RequeueOutcome, error) {
	const doing = "requeue dead letters"
	use, err := o.prepare(ctx)
	if err != nil {
		return RequeueOutcome{}, explain(doing, err)
	}
	done, err := use.Letters().Requeue(ctx, filter.toAdmin(), admin.DeadOptions{
		IgnoreExpiry: options.IgnoreExpiry, Handlers: options.Handlers, Topic: options.Topic, DryRun: options.DryRun,
	}, options.Progress)

	outcome := RequeueOutcome{Matched: done.Matched, Requeued: done.Requeued, Rejected: done.Rejected}
	for _, rejected := range done.Why {
		outcome.Why = append(outcome.Why, Rejection{rejected.Collection, rejected.ID, rejected.Reason})
	}
	return outcome, explain(doing, err)
}

// DiscardOptions change a discard. The zero value is the default.
type DiscardOptions struct {
	DryRun   bool             // only count
	Progress func(done int64) // called with the number of letters so far, from one goroutine; may be nil
}

// DiscardLetters moves all matching letters with their events into the archive, and returns their number. MongoDB removes them
// after dead_letters.archive (default 30 days), or at once if that is 0 or the letters are in the archive already. It returns
// [ErrInvalid] for a filter without a condition, unless All is set.
func (o *Operator) DiscardLetters(ctx context.Context, filter LetterFilter, options DiscardOptions) (int64, error) {
	const doing = "discard dead letters"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	done, err := use.Letters().Discard(ctx, filter.toAdmin(), admin.Effect(options.DryRun), options.Progress)
	if options.DryRun {
		return done.Matched, explain(doing, err)
	}
	return done.Discarded, explain(doing, err)
}
