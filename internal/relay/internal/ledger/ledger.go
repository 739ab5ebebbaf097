package ledger

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/notices"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// maxPrepared bounds the outcomes that are prepared together. One read of the stream restores the images of all of them.
const maxPrepared = 20 * mongodb.MaxDocuments

// Queue holds outcomes that are not stored yet. It exists before the ledger, which stores them. Memory is bounded by the outcomes
// that were added and are not stored.
type Queue struct{ box *mailbox.Box[*Outcome] }

// NewQueue returns an empty queue.
func NewQueue() *Queue { return &Queue{mailbox.New[*Outcome]()} }

// Add queues outcomes. It does not block, and may be called from any goroutine.
func (q *Queue) Add(list ...*Outcome) { q.box.Put(list...) }

// Config is the configuration of a Ledger. Fields without a default are required.
type Config struct {
	Queue   *Queue // nil: a new one
	Fencer  mongodb.Fencer
	Store   *waiting.Store
	Letters *mongo.Collection
	Claims  *mongo.Collection
	Source  letters.Source    // this process
	Mapping *envelope.Mapping // reads the documents; nil: they are envelopes of the contract

	MaxAttempts int          // after which a record that Kafka rejects is dead
	Backoff     retry.Policy // between two attempts
	DropExpired bool         // expired envelopes are discarded instead of dead
	Recording   string       // of deliveries on their documents: one of the Record constants
	// LetterExpiry is the time after which the server removes a dead letter; 0 keeps it.
	LetterExpiry time.Duration

	// Restore sets the images of outcomes whose records the sink gave back. It leaves Raw nil if an envelope is gone.
	Restore func(ctx context.Context, list []*Outcome) error
	// Entered is called when envelopes were stored as waiting. It must not block.
	Entered func(list []*waiting.Entry)

	Now func() time.Time // the time of the server, as this process estimates it
	// OnRetry is called with the error of each write that failed and is repeated, and OnRecovered after the next one that
	// succeeds.
	OnRetry     func(error)
	OnRecovered func()
	Count       func(o *Outcome)            // counts a stored outcome
	GivenUp     func(given notices.GivenUp) // called when a dead letter is stored. It must not block. Nil: not called
	Log         *slog.Logger
}

// Ledger stores the outcomes of its queue. Add and Drain may be called from any goroutine.
type Ledger struct {
	*Queue
	config   Config
	partSize *mongodb.PartSize

	// Used only by Run.
	rejections     map[string]rejections // of recorded deliveries, by outbox
	unstampedCount uint32                // waiting envelopes without a stamp of the server
}

// New returns a Ledger. It stores nothing before Run.
func New(cfg Config) *Ledger {
	if cfg.Queue == nil {
		cfg.Queue = NewQueue()
	}
	return &Ledger{
		Queue:      cfg.Queue,
		config:     cfg,
		partSize:   mongodb.NewPartSize(mongodb.MaxDocuments),
		rejections: map[string]rejections{},
	}
}

// Len returns the number of outcomes that are not stored yet.
func (l *Ledger) Len() int { return l.box.Len() }

// Run stores outcomes until ctx ends or the lease is lost, and returns the cause.
func (l *Ledger) Run(ctx context.Context) error {
	for {
		list := l.box.Take(maxPrepared)
		if len(list) > 0 {
			err := l.Store(ctx, list)
			l.box.Done(len(list))
			if err != nil {
				return err
			}
			continue
		}

		select {
		case <-l.box.Ready():
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// drainPoll is the interval at which Drain checks whether everything is stored.
const drainPoll = 5 * time.Millisecond

// Drain blocks until everything that was added is stored. It returns the cause of ctx if ctx ends first. Run must be running.
func (l *Ledger) Drain(ctx context.Context) error {
	for l.box.Len() > 0 {
		if err := retry.Sleep(ctx, drainPoll); err != nil {
			return err
		}
	}
	return nil
}

// Store stores outcomes, and returns when all of them are majority-committed. It repeats failed writes until they succeed, the
// lease is lost or ctx ends. Run calls it; a takeover calls it before Run.
func (l *Ledger) Store(ctx context.Context, list []*Outcome) error {
	var missing []*Outcome
	for _, o := range list {
		if o.needsImage() {
			missing = append(missing, o)
		}
	}
	if len(missing) > 0 {
		if err := l.repeatUntilDone(ctx, func(ctx context.Context) error { return l.config.Restore(ctx, missing) }); err != nil {
			return err
		}
	}

	for len(list) > 0 {
		n := mongodb.CountFitting(list, l.partSize.Most(), func(outcome **Outcome) int { return (*outcome).estimateSize() })
		part := list[:n]
		if err := l.storePart(ctx, part); err != nil {
			return err
		}
		list = list[n:]
		// The others may take long, and must not keep the memory of these.
		clear(part)
	}
	return nil
}

// storePart stores outcomes that fit one transaction, and then releases them.
func (l *Ledger) storePart(ctx context.Context, part []*Outcome) error {
	if err := l.prepare(ctx, part); err != nil {
		return err
	}

	// A crash between the two writes must not lose a record of a delivery: the next owner finds the waiting envelope in its
	// read-back and finishes it again.
	if err := l.recordDeliveries(ctx, part); err != nil {
		return err
	}
	if err := l.writeHalves(ctx, part); err != nil {
		return err
	}
	if err := l.deleteUnsent(ctx, part); err != nil {
		return err
	}
	l.releaseOutcomes(part)
	return nil
}

// writeHalves writes a part. If MongoDB rejects it for its content, or cannot finish it in time, it writes the halves. So one
// document delays no other (N16). Every other error is repeated.
func (l *Ledger) writeHalves(ctx context.Context, part []*Outcome) error {
	// The error of a rejection is returned through the repetition, which it ends.
	var rejected error
	err := l.repeatUntilDone(ctx, func(ctx context.Context) error {
		rejected = nil
		err := l.writeState(ctx, part)
		if errors.Is(err, mongodb.ErrSlow) || mongodb.IsRejection(err) {
			rejected = err
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}

	switch {
	case rejected == nil:
		l.partSize.Ended()
		return nil
	case len(part) == 1:
		return l.isolateOutcome(ctx, part[0], rejected)
	case errors.Is(rejected, mongodb.ErrSlow):
		l.partSize.Slow(len(part))
	}

	half := len(part) / 2
	if err := l.writeHalves(ctx, part[:half]); err != nil {
		return err
	}
	return l.writeHalves(ctx, part[half:])
}

// isolateOutcome stores an outcome that MongoDB rejects as a dead letter. If MongoDB rejects even a letter with the id and the
// reason only, the envelope is not at fault. Then isolateOutcome writes the outcome as it was, again and again.
func (l *Ledger) isolateOutcome(ctx context.Context, outcome *Outcome, rejection error) error {
	endsClaim := outcome.Claim != nil && outcome.Claim.Ends
	if endsClaim {
		l.config.Log.Error("MongoDB rejects the removal of a claim of scheduled envelopes, which is repeated; the envelopes were sent",
			"claim", outcome.Claim.ID, "error", rejection, "fix", "allow the relay's user to remove documents of the collection of claims")
	} else {
		l.config.Log.Error("MongoDB rejects the record of an envelope; it becomes a dead letter",
			"collection", outcome.namespace(), "id", letters.IDText(outcome.envelopeID()), "error", rejection)
	}

	asItWas, reported := *outcome, false
	for {
		err := rejection
		// A claim without envelopes has nothing to preserve.
		if !endsClaim {
			err = l.writeAsLetter(ctx, outcome, rejection)
		}
		if mongodb.IsRejection(err) {
			l.config.OnRetry(err)
			reported = true
			if err := retry.Sleep(ctx, isolatePause); err != nil {
				return err
			}
			*outcome = asItWas
			if err = l.writeAlone(ctx, outcome); mongodb.IsRejection(err) {
				rejection = err
				continue
			}
		}

		if err == nil && reported {
			l.config.OnRecovered()
		}
		return err
	}
}

// isolatePause is the time between two attempts while MongoDB rejects every letter.
const isolatePause = time.Second

// writeAsLetter writes an outcome that MongoDB rejects as a dead letter. If MongoDB rejects the letter as well, it writes a letter
// with the id and the reason only.
func (l *Ledger) writeAsLetter(ctx context.Context, outcome *Outcome, rejection error) error {
	isLetter := outcome.letters != nil || outcome.Doc != nil && outcome.End == Dead
	if !isLetter {
		if err := l.rejectToStore(outcome, rejection); err != nil {
			return err
		}
		err := l.writeAlone(ctx, outcome)
		if !mongodb.IsRejection(err) {
			return err
		}
		rejection = err
	}

	outcome.letters = nil
	for _, letter := range outcome.splitLetter(l.newLetter(outcome, nil)) {
		outcome.letters = append(outcome.letters, letters.Minimal(letter, rejection))
	}
	return l.writeAlone(ctx, outcome)
}

// writeAlone writes one outcome. It returns a rejection, and repeats every other error.
func (l *Ledger) writeAlone(ctx context.Context, outcome *Outcome) (rejection error) {
	err := l.repeatUntilDone(ctx, func(ctx context.Context) error {
		rejection = nil
		err := l.writeState(ctx, []*Outcome{outcome})
		if mongodb.IsRejection(err) {
			rejection = err
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}

	return rejection
}

// rejectToStore turns an envelope that cannot be stored as waiting into a dead one.
func (l *Ledger) rejectToStore(outcome *Outcome, rejection error) error {
	// No topic has a reason of its own.
	outcome.Rejected = slices.Clone(outcome.Rejected)
	for i := range outcome.Rejected {
		outcome.Rejected[i].Rejection = nil
	}

	// The letter of a stored envelope is made of its document, within the transaction.
	if outcome.Doc != nil {
		outcome.End, outcome.change = Dead, nil
		outcome.Rejection.Reason = "MongoDB cannot store its fate: " + rejection.Error()
		if outcome.Rejection.Class == "" {
			outcome.Rejection.Class = record.Malformed
		}
		return nil
	}

	// The class of an earlier failure explains the letter better.
	if outcome.Rejection.Class == "" {
		outcome.Rejection.Class = record.Malformed
	}
	outcome.Rejection.Reason = "it has to wait for its target, and MongoDB cannot store it: " + rejection.Error()
	outcome.End, outcome.entry = Dead, nil

	var err error
	outcome.letters, err = outcome.prepareLetters(l.newLetter(outcome, nil))
	return err
}

// repeatUntilDone calls op until it succeeds, ctx ends or the lease is lost.
func (l *Ledger) repeatUntilDone(ctx context.Context, op func(context.Context) error) error {
	// There is no last attempt: without a stored fate, neither the resolved position nor a stored offset can move (N8).
	failed := false
	err := retry.Do(ctx, retry.Reopen, func(ctx context.Context) error {
		err := op(ctx)
		if errors.Is(err, lease.ErrLeaseLost) {
			return retry.Permanent(err)
		}
		return err
	}, func(err error, _ time.Duration) {
		failed = true
		l.config.OnRetry(err)
	})

	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil && failed {
		l.config.OnRecovered()
	}
	return err
}

// releaseOutcomes reports stored outcomes to their senders.
func (l *Ledger) releaseOutcomes(part []*Outcome) {
	var entered []*waiting.Entry
	for _, o := range part {
		if o.entry != nil {
			entered = append(entered, o.entry)
		}
		for _, letter := range o.letters {
			l.reportGivenUp(o, letter)
		}
		if o.Stored != nil {
			o.Stored(o)
		}
		if o.Claim == nil || !o.Claim.Ends {
			l.config.Count(o)
		}
	}

	if len(entered) > 0 {
		l.config.Entered(entered)
	}
}

// reportGivenUp logs a letter of outcome, and calls GivenUp for it.
func (l *Ledger) reportGivenUp(outcome *Outcome, letter *letters.Prepared) {
	why, topic := letter.Rejection()
	l.config.Log.Warn("an envelope is dead", "collection", outcome.namespace(), "id", letters.IDText(outcome.envelopeID()),
		"class", string(why.Class), "reason", why.Reason, "topic", topic)
	if l.config.GivenUp == nil {
		return
	}

	given := notices.GivenUp{
		Letter: letter.ID(), Collection: outcome.namespace(), ID: letters.IDText(outcome.envelopeID()), Topic: topic,
		Class: string(why.Class), Reason: why.Reason,
	}
	if outcome.Doc != nil {
		given.Delivery = int(outcome.Doc.Delivery)
	}
	l.config.GivenUp(given)
}

// namespace returns the outbox of the envelope.
func (o *Outcome) namespace() string {
	if o.Doc != nil {
		return o.Doc.NS
	}
	return o.NS
}

// CountSent counts an envelope of a claim that was sent. There is nothing to store: the end of the claim is.
func (l *Ledger) CountSent() { l.config.Count(&sentOfClaim) }

// sentOfClaim is the outcome of every claimed envelope that was sent.
var sentOfClaim = Outcome{End: Sent, Claim: &ClaimRef{}}

// RecordsClaims reports whether the delivery of a claimed envelope is recorded on its document.
func (l *Ledger) RecordsClaims() bool { return l.config.Recording == RecordMark }

// originOf returns the way in which a stored or claimed envelope began to wait, or "".
func (o *Outcome) originOf() string {
	switch {
	case o.Doc != nil:
		return o.Doc.Origin
	case o.Claim != nil:
		return waiting.OriginScheduled
	}
	return ""
}

// envelopeID returns the `_id` of the envelope.
func (o *Outcome) envelopeID() bson.RawValue {
	switch {
	case o.Doc != nil:
		return o.Doc.ID
	case o.Raw != nil:
		return o.Raw.Lookup("_id")
	}
	return o.EnvelopeID
}

// estimateSize returns about how many bytes of a transaction the outcome takes.
func (o *Outcome) estimateSize() int {
	size := len(o.Raw) + len(o.Key) + 512
	if o.End != Dead {
		return size
	}

	// The letter of a waiting envelope has all of it, and there is one for each topic.
	if o.Doc != nil {
		size += o.Doc.Size
	}
	return size * max(1, len(o.Topics))
}
