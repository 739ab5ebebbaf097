package deadletter

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// RequeueOptions has the arguments of Desk.Requeue. The zero value is valid.
type RequeueOptions struct {
	Actor, Note string // who requeues and why; stored with the letters

	// Handlers are the handlers of the group that get the messages. Defaults to the handler that gave the message up. A
	// letter without a handler, or of a handler that was renamed, needs it.
	Handlers []string

	// Edit may change Key, Value and Headers of a letter before its message goes back. The stored letter stays as it was. An
	// error ends the call.
	Edit func(l *Letter) error
}

// RejectedError reports a letter that cannot be requeued as it is.
type RejectedError struct {
	ID     ID
	Reason string // with the fix
	More   int64  // the number of further letters that the same call rejected
}

func (e *RejectedError) Error() string {
	text := fmt.Sprintf("deadletter: %s cannot be requeued: %s", e.ID, e.Reason)
	if e.More > 0 {
		text += fmt.Sprintf("; %d more", e.More)
	}
	return text
}

// maxRejected bounds the rejected letters that an error of Requeue lists.
const maxRejected = 20

// Requeue hands the letters that query selects, that exist when it begins, and that were not requeued before, back to their handlers, in
// the order in which they were given up. It returns their number, also with an error.
//
// The messages wait in the collection inbox_waiting until the member of the group that owns their partition takes them,
// usually within a few seconds. Their handlers get them with fresh attempts, and in the order of their keys with other
// messages that wait: a message of the key that has begun ends first, and those that have not begun follow. Other handlers and groups
// do not get them. If a handler does not run, its messages stay:
// Requeued.Waiting shows them.
//
// A letter and its message change in one transaction. Letters that cannot be requeued stay, and the others go on: the error
// then joins a *RejectedError for each of the first 20. Requeue returns ErrEmptyQuery if query has no condition and does not set
// All. If it is interrupted, the same call does the rest.
func (d *Desk) Requeue(ctx context.Context, query Query, opts RequeueOptions) (int64, error) {
	if query.isEmpty() && !query.All {
		return 0, ErrEmptyQuery
	}

	// A requeue changes the condition of the query, so the iteration never meets a letter twice.
	notRequeued := false
	query.Requeued, query.NoValues = &notRequeued, false
	query, err := d.restrictToExisting(ctx, query)
	if err != nil {
		return 0, err
	}
	var n int64
	var rejected []error
	var last *RejectedError
	for l, err := range d.iterate(ctx, query, true) {
		requeued := false
		if err == nil {
			requeued, err = d.requeueLetter(ctx, l, opts)
		}

		rejection, isRejected := errors.AsType[*RejectedError](err)
		switch {
		case isRejected && len(rejected) < maxRejected:
			last = rejection
			rejected = append(rejected, rejection)
		case isRejected:
			last.More++
		case err != nil:
			return n, errors.Join(append(rejected, err)...)
		case requeued:
			n++
		}
	}
	return n, errors.Join(rejected...)
}

// requeueLetter requeues one letter. It returns false if another call has requeued or discarded it.
func (d *Desk) requeueLetter(ctx context.Context, letter Letter, options RequeueOptions) (bool, error) {
	handlers := options.Handlers
	if len(handlers) == 0 && letter.ID.Handler != "" {
		handlers = []string{letter.ID.Handler}
	}
	if len(handlers) == 0 {
		return false, &RejectedError{ID: letter.ID, Reason: "no handler took it: name the handler that gets it"}
	}

	// A list leaves out large values.
	if letter.countChunks() > 0 {
		whole, err := d.store.Get(ctx, letter.ID)
		if err != nil {
			return false, err
		}
		letter = whole
	}
	if options.Edit != nil {
		letter.Headers = slices.Clone(letter.Headers)
		if err := options.Edit(&letter); err != nil {
			return false, fmt.Errorf("editing dead letter %s: %w", letter.ID, err)
		}
	}

	// Its handler would take it for a tombstone and delete something.
	if letter.isBare() {
		return false, &RejectedError{ID: letter.ID, Reason: fmt.Sprintf("it was stored without its content, which the record at %s has: "+
			"set it with Edit, or discard the letter", letter.ID.Place())}
	}

	// All messages are checked before the first is written.
	var messages []*setaside.Message
	for _, h := range handlers {
		message := newWaiting(&letter, h)
		if err := message.CheckSize(); err != nil {
			return false, &RejectedError{ID: letter.ID, Reason: err.Error() + ": edit it"}
		}
		messages = append(messages, message)
	}

	marked := false
	mark := Requeued{Actor: options.Actor, Note: options.Note, Handlers: handlers}
	// The mark decides between two concurrent requeues.
	err := d.store.Transaction(ctx, func(ctx context.Context) (err error) {
		marked, err = d.store.MarkRequeued(ctx, letter.ID, mark)
		if err != nil || !marked {
			return err
		}
		for _, m := range messages {
			if err := d.waiting.Add(ctx, m, 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("requeueing dead letter %s: %w", letter.ID, err)
	}
	return marked, nil
}

// newWaiting returns the message of a letter for a handler, to be set aside at the place of its first record. So it is
// before all messages of its key that wait there.
func newWaiting(letter *Letter, handler string) *setaside.Message {
	message := &setaside.Message{
		ID:          waitingID(letter, handler),
		Place:       placeOf(letter, handler),
		Offset:      letter.ID.Offset,
		LeaderEpoch: -1,
		Time:        letter.Time,
		Key:         letter.Key,
		Value:       letter.Value,
		Requested:   true,
	}
	// A message without a key is a queue alone.
	message.Queue = message.ID
	if letter.Key != nil {
		message.Queue = setaside.KeyQueue(letter.Key)
	}

	for _, h := range letter.Headers {
		// With its deadline the message would expire again.
		isDeadline := h.Key == record.HeaderDeliverBy || h.Key == record.HeaderCEExpiryTime
		if h.Key == record.HeaderDelivery || isDeadline && letter.Class == ClassExpired {
			continue
		}
		message.Headers = append(message.Headers, setaside.Header(h))
	}

	// If the message is given up again, it gets another letter. The header also stays in retry topics.
	delivery := strconv.AppendInt(nil, int64(letter.ID.Delivery)+1, 10)
	message.Headers = append(message.Headers, setaside.Header{Key: record.HeaderDelivery, Value: delivery})
	return message
}

func placeOf(letter *Letter, handler string) setaside.Place {
	return setaside.Place{Handler: letter.ID.Group + "/" + handler, Topic: letter.ID.Topic, Partition: letter.ID.Partition}
}

// waitingID returns the id of the requeued message of letter for a handler.
func waitingID(letter *Letter, handler string) setaside.Digest {
	return setaside.MessageID(placeOf(letter, handler), 0, letter.ID.Offset, "letter/"+letter.ID.String())
}

// findWaiting sets Requeued.Waiting of the letters.
func (d *Desk) findWaiting(ctx context.Context, letters []Letter) error {
	owners := map[setaside.Digest]*Requeued{}
	for i := range letters {
		if requeued := letters[i].Requeued; requeued != nil {
			for _, h := range requeued.Handlers {
				owners[waitingID(&letters[i], h)] = requeued
			}
		}
	}

	ids := make([]setaside.Digest, 0, len(owners))
	for id := range owners {
		ids = append(ids, id)
	}
	waiting, err := d.waiting.Stored(ctx, ids)
	for _, id := range waiting {
		owners[id].Waiting = true
	}
	return err
}
