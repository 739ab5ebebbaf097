package deadletter

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// RequeueOptions has the arguments of Desk.Requeue. The zero value is valid.
type RequeueOptions struct {
	Actor, Note string // who requeues and why; stored with the letters

	// Handlers are the handlers of the group that get the messages. Defaults to the handler that gave the message up. A
	// letter without a handler, or of a handler that was renamed, needs it. A name that the running members of the group do not have is
	// rejected. A handler that does not take the type of a message rejects it.
	Handlers []string

	// Edit may change Key, Value and Headers of a letter before its message goes back. The stored letter stays as it was. An
	// error ends the call, also for letters that share the transaction.
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
// do not get them. While no member of the group runs, the messages stay: Requeued.Waiting shows them.
//
// A letter and its message change in one transaction, with up to 99 others. Letters that cannot be requeued stay, and the others go
// on: the error then joins a *RejectedError for each of the first 20. Requeue returns ErrEmptyQuery if query has no condition and does
// not set All. If it is interrupted, the same call does the rest.
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
	batch := requeueBatch{desk: d, query: query, obstacles: map[string]string{}}
	var rejected []error
	var last *RejectedError
	for letter, err := range d.iterate(ctx, query, d.store.FindOldest) {
		if err == nil {
			err = batch.add(ctx, letter, opts)
		}

		rejection, isRejected := errors.AsType[*RejectedError](err)
		switch {
		case isRejected && len(rejected) < maxRejected:
			last = rejection
			rejected = append(rejected, rejection)
		case isRejected:
			last.More++
		case err != nil:
			return batch.requeued, errors.Join(append(rejected, err)...)
		}
	}
	return batch.requeued, errors.Join(append(rejected, batch.flush(ctx))...)
}

// A requeue changes at most batchLetters letters in a transaction, and fewer if their messages have more than batchBytes.
const (
	batchLetters = 100
	batchBytes   = 4 << 20
)

// requeueBatch has the letters that the next transaction requeues.
type requeueBatch struct {
	desk      *Desk
	query     Query             // that selects the letters
	obstacles map[string]string // of FindObstacle, by group and handlers
	letters   []checkedLetter
	size      int   // of the messages, in bytes
	requeued  int64 // by all transactions so far
}

// checkedLetter is a letter that can be requeued, with the messages that go back.
type checkedLetter struct {
	id       ID
	mark     Requeued
	messages []*setaside.Message
}

// add adds a letter, and requeues the batch if it is full.
func (b *requeueBatch) add(ctx context.Context, letter Letter, options RequeueOptions) error {
	handlers := options.Handlers
	if len(handlers) == 0 {
		handlers = []string{letter.ID.Handler}
	}
	if err := b.checkHandlers(ctx, letter.ID, handlers); err != nil {
		return err
	}
	checked, err := b.desk.checkRequeue(ctx, letter, handlers, options)
	if err != nil {
		return err
	}

	b.letters = append(b.letters, checked)
	for _, m := range checked.messages {
		b.size += m.Size()
	}
	if len(b.letters) < batchLetters && b.size < batchBytes {
		return nil
	}
	return b.flush(ctx)
}

// checkHandlers rejects a letter that [Desk.FindObstacle] rejects.
func (b *requeueBatch) checkHandlers(ctx context.Context, id ID, names []string) error {
	place := id.Group + "/" + strings.Join(names, "/")
	obstacle, cached := b.obstacles[place]
	if !cached {
		var err error
		if obstacle, err = b.desk.FindObstacle(ctx, module.Key{}, id.Group, names); err != nil {
			return err
		}
		b.obstacles[place] = obstacle
	}

	if obstacle != "" {
		return &RejectedError{ID: id, Reason: obstacle}
	}
	return nil
}

// FindObstacle returns why messages of a group cannot go back to the handlers of these names, with the fix, or "". Messages for a
// handler that no member has would wait for it forever. While no member runs, the handlers of the group are unknown, and only a name
// that no handler can have is an obstacle. It is for packages of this module.
func (d *Desk) FindObstacle(ctx context.Context, _ module.Key, group string, names []string) (string, error) {
	if len(names) == 0 || len(names) == 1 && names[0] == "" {
		return "no handler took it: name the handler that gets it (--to)", nil
	}
	for _, name := range names {
		if name == "" || strings.Contains(name, "/") {
			return fmt.Sprintf("no handler can have the name %q: name handlers of group %s without the group (--to)", name, group), nil
		}
	}

	known, err := d.waiting.Handlers(ctx, group)
	if err != nil {
		return "", err
	}

	for _, name := range names {
		if len(known) > 0 && !slices.Contains(known, name) {
			return fmt.Sprintf("group %s has no handler %s; its handlers are %s: name one of them, or start a member with the handler first",
				group, name, strings.Join(known, ", ")), nil
		}
	}
	return "", nil
}

// flush requeues the letters that have been added, except those that another call has requeued or discarded since.
func (b *requeueBatch) flush(ctx context.Context) error {
	if len(b.letters) == 0 {
		return nil
	}
	letters := b.letters
	b.letters, b.size = nil, 0

	marks := make(map[ID]Requeued, len(letters))
	for _, l := range letters {
		marks[l.id] = l.mark
	}
	var marked []ID
	// The marks decide between two concurrent actions.
	err := b.desk.store.Transaction(ctx, func(ctx context.Context) (err error) {
		marked, err = b.desk.store.MarkRequeued(ctx, b.query, marks)
		if err != nil {
			return err
		}

		var messages []*setaside.Message
		for _, l := range letters {
			if slices.Contains(marked, l.id) {
				messages = append(messages, l.messages...)
			}
		}
		return b.desk.waiting.Add(ctx, 0, messages...)
	})
	if err != nil {
		return fmt.Errorf("requeueing %d dead letters from %s on: %w", len(letters), letters[0].id, err)
	}
	b.requeued += int64(len(marked))
	return nil
}

// checkRequeue returns a letter with the messages of its requeue. All are checked before the first is written.
func (d *Desk) checkRequeue(ctx context.Context, letter Letter, handlers []string, options RequeueOptions) (checkedLetter, error) {
	// A list leaves out large values.
	if letter.countChunks() > 0 {
		whole, err := d.store.Get(ctx, letter.ID)
		if err != nil {
			return checkedLetter{}, err
		}
		letter = whole
	}
	if options.Edit != nil {
		letter.Headers = slices.Clone(letter.Headers)
		if err := options.Edit(&letter); err != nil {
			return checkedLetter{}, fmt.Errorf("editing dead letter %s: %w", letter.ID, err)
		}
	}

	// Its handler would take it for a tombstone and delete something.
	if letter.isBare() {
		return checkedLetter{}, &RejectedError{ID: letter.ID, Reason: fmt.Sprintf("it was stored without its content, which the record at %s has: "+
			"set it with Edit, or discard the letter", letter.ID.Place())}
	}

	checked := checkedLetter{id: letter.ID, mark: Requeued{Actor: options.Actor, Note: options.Note, Handlers: handlers}}
	for _, h := range handlers {
		message := newWaiting(&letter, h)
		if err := message.CheckSize(); err != nil {
			return checkedLetter{}, &RejectedError{ID: letter.ID, Reason: err.Error() + ": edit it"}
		}
		checked.messages = append(checked.messages, message)
	}
	return checked, nil
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
