// Package deadletter reads, requeues and discards the messages that a consumer gave up.
//
// Each handler that gives a message up makes a letter with the whole record and the reason. A Desk lists them. Requeue
// hands letters back to their handlers through MongoDB, without Kafka: other handlers and other groups do not see it.
// The command `outrelay dead --source handler` does the same.
//
// Order: lists have the newest letter first, and a requeue takes the oldest first. Blocking: each method blocks until
// MongoDB responds, and a method that changes many letters may be repeated after an error. Cost: a list reads an index
// and one page of up to 100 letters or 24 MiB at a time. A requeue is one transaction for up to 100 letters.
package deadletter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var (
	// ErrNotFound reports that no letter has the id.
	ErrNotFound = errors.New("deadletter: no such dead letter")
	// ErrEmptyQuery reports that the query of a requeue or a discard has no condition and does not set All.
	ErrEmptyQuery = errors.New("deadletter: the query selects every dead letter: give it a condition, or set All")
)

// DefaultCollection is the default name of the collection of letters.
const DefaultCollection = record.HandlerDeadLetters

// Desk works on the letters of a database. It is safe for concurrent use.
type Desk struct {
	settings
	store   store
	waiting setaside.Store
}

// store stores letters. Package internal/lab/memory implements it too. Its methods join the transaction of their context.
type store interface {
	// EnsureIndexes prepares the store.
	EnsureIndexes(ctx context.Context) error
	// Transaction runs fn as one unit of work.
	Transaction(ctx context.Context, fn func(ctx context.Context) error) error
	// Put stores l with the current time, unless a letter with its id exists. It replaces only one of a handler that was requeued or
	// discarded.
	Put(ctx context.Context, l *Letter) error
	// Get reads one letter, whole. It returns ErrNotFound if there is none.
	Get(ctx context.Context, id ID) (Letter, error)
	// FindLatest returns the latest letters that q selects. If after is not nil, they follow the place of its ID and GivenUpAt.
	// FindLatest may leave out large values, leaves out all with q.NoValues, and ignores q.After. It may end with the letter that
	// reaches pageBytes.
	FindLatest(ctx context.Context, q Query, after *Letter, limit int) ([]Letter, error)
	// FindOldest is FindLatest in the opposite order.
	FindOldest(ctx context.Context, q Query, after *Letter, limit int) ([]Letter, error)
	// Count counts the letters that q selects.
	Count(ctx context.Context, q Query) (int64, error)
	// Summarize counts the letters that q selects by group, handler, name and class.
	Summarize(ctx context.Context, q Query) ([]Summary, error)
	// MarkRequeued stores the mark of each letter that q still selects with the current time, in the transaction of ctx. It returns
	// these letters.
	MarkRequeued(ctx context.Context, q Query, marks map[ID]Requeued) ([]ID, error)
	// Archive marks the letters that q still selects as discarded by actor, and returns their number. They are deleted after keep.
	Archive(ctx context.Context, q Query, letters []Letter, actor string, keep time.Duration) (int64, error)
	// Delete deletes the letters that q still selects, and returns their number.
	Delete(ctx context.Context, q Query, letters []Letter) (int64, error)
}

// NewOver returns a Desk over another store than MongoDB. It is for packages of this module: others cannot name its key.
func NewOver(_ module.Key, s store, waiting setaside.Store, opts ...Option) (*Desk, error) {
	return newDesk(opts, func(string, time.Duration) store { return s }, waiting)
}

// EnsureIndexes creates the indexes of the letters. Consumers call it. Others cannot name its key.
func (d *Desk) EnsureIndexes(ctx context.Context, _ module.Key) error {
	return d.store.EnsureIndexes(ctx)
}

// settings has the options of a Desk.
type settings struct {
	collection string
	expiry     time.Duration
	redact     []func(ctx context.Context, l *Letter) error
	box        *outbox.Box
	hasTopic   bool
	topic      string
}

// Option configures the letters. consumer.WithDeadLetters and New take the same options.
type Option interface{ applyToDesk(s *settings) }

type option func(s *settings)

func (o option) applyToDesk(settings *settings) { o(settings) }

// WithCollection sets the name of the collection. Defaults to DefaultCollection.
func WithCollection(name string) Option {
	return option(func(settings *settings) { settings.collection = cmp.Or(name, DefaultCollection) })
}

// WithExpiry makes MongoDB remove letters when they have existed for expiry, from 1 s to 68 years. Consumers apply it to all
// letters of the collection when they start. Defaults to none: letters stay until they are discarded, because each is a message that
// has had no effect. A negative expiry means none.
func WithExpiry(expiry time.Duration) Option {
	return option(func(settings *settings) { settings.expiry = max(expiry, 0) })
}

// WithRedaction calls redact for each letter before it is written anywhere. redact may change every field except ID. If redact fails or
// panics, the letter is written without the content and the headers of the message.
func WithRedaction(redact func(ctx context.Context, letter *Letter) error) Option {
	return option(func(settings *settings) { settings.redact = append(settings.redact, redact) })
}

// WithNotification appends a Notification to box for each letter, so that other services see it. A message that is a
// Notification itself has none. box must be in the database of the consumer.
func WithNotification(box *outbox.Box) Option {
	return option(func(settings *settings) { settings.box = box })
}

// WithTopic also writes each letter to a topic, before it is stored: the key, value and headers of the message, with the
// additional headers dead-class, dead-reason, dead-group, dead-handler, dead-attempts and dead-at (Unix milliseconds). An
// empty name means "<topic>.<group>.dead". A missing topic is created.
func WithTopic(name string) Option {
	return option(func(settings *settings) { settings.hasTopic, settings.topic = true, name })
}

// New returns the letters of db. It does no I/O. It returns all problems of its arguments in one error.
func New(db *mongo.Database, opts ...Option) (*Desk, error) {
	if db == nil {
		return nil, errors.New("deadletter: the database is nil")
	}
	open := func(name string, expiry time.Duration) store { return newCollection(db, name, expiry) }
	return newDesk(opts, open, setaside.New(db, setaside.DefaultCollection))
}

// newDesk returns a Desk over the store that open returns for the name of a collection.
func newDesk(opts []Option, open func(name string, expiry time.Duration) store, waiting setaside.Store) (*Desk, error) {
	settings := settings{collection: DefaultCollection}
	for _, o := range opts {
		if o != nil {
			o.applyToDesk(&settings)
		}
	}

	var errs []error
	if settings.expiry != 0 && (settings.expiry < minExpiry || settings.expiry > maxExpiry) {
		errs = append(errs, fmt.Errorf("the expiry is %s: set at least 1 s and at most 68 years", settings.expiry))
	}
	for _, f := range settings.redact {
		if f == nil {
			errs = append(errs, errors.New("a function of WithRedaction is nil"))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("deadletter: %w", err)
	}
	return &Desk{settings: settings, store: open(settings.collection, settings.expiry), waiting: waiting}, nil
}

// A page has at most pageSize letters, and ends with the letter that reaches pageBytes.
const (
	pageSize  = 100
	pageBytes = maxInline
)

// List iterates over the letters that query selects, latest first. Values above 12 MiB are left out: Get has them. It stops after
// the first error.
func (d *Desk) List(ctx context.Context, query Query) iter.Seq2[Letter, error] {
	return d.iterate(ctx, query, d.store.FindLatest)
}

// iterate iterates over the letters that query selects, in the order of find, which returns the next ones after a letter.
func (d *Desk) iterate(
	ctx context.Context, query Query, find func(ctx context.Context, query Query, after *Letter, limit int) ([]Letter, error),
) iter.Seq2[Letter, error] {
	return func(yield func(Letter, error) bool) {
		after, err := parseCursor(query.After)
		for {
			var page []Letter
			if err == nil {
				page, err = find(ctx, query, after, pageSize)
			}
			if err == nil {
				err = d.findWaiting(ctx, page)
			}
			if err != nil {
				yield(Letter{}, err)
				return
			}

			bytes := 0
			for i := range page {
				bytes += page[i].countRecordBytes()
				if !yield(page[i], nil) {
					return
				}
			}
			// A short page is the last one.
			if len(page) < pageSize && bytes < pageBytes {
				return
			}
			after = &page[len(page)-1]
		}
	}
}

// Get reads one letter, whole. It returns ErrNotFound if there is none.
func (d *Desk) Get(ctx context.Context, id ID) (Letter, error) {
	letter, err := d.store.Get(ctx, id)
	if err != nil {
		return Letter{}, err
	}
	list := []Letter{letter}
	err = d.findWaiting(ctx, list)
	return list[0], err
}

// Count counts the letters that query selects.
func (d *Desk) Count(ctx context.Context, query Query) (int64, error) {
	return d.store.Count(ctx, query)
}

// Summary counts the letters that query selects by their failure, the largest count first.
func (d *Desk) Summary(ctx context.Context, query Query) ([]Summary, error) {
	return d.store.Summarize(ctx, query)
}

// restrictToExisting returns query for the letters that exist now. Otherwise an action would not end while a handler rejects each message
// that it gets again.
func (d *Desk) restrictToExisting(ctx context.Context, query Query) (Query, error) {
	ids := query
	ids.NoValues = true
	newest, err := d.store.FindLatest(ctx, ids, nil, 1)
	if err != nil || len(newest) == 0 {
		return query, err
	}
	query.Before = newest[0].GivenUpAt.Add(time.Millisecond)
	return query, nil
}

// DiscardOptions has the arguments of Desk.Discard. The zero value is valid.
type DiscardOptions struct {
	Actor string // who discards; stored with the letters
	// Archive is how long the letters stay in the archive: lists and counts leave them out, but Query.Archived selects them, for
	// example to requeue them. Defaults to 30 days. A negative time deletes them at once. The expiry of WithExpiry may come earlier.
	Archive time.Duration
	// Did, if it is not nil, is called with the number of letters so far.
	Did func(int64)
}

// Discard moves the letters that query selects and that exist when it begins into the archive, and returns how many. Letters that
// are in the archive it deletes permanently. It returns ErrEmptyQuery if query has no condition and does not set All. It does
// not affect messages that were requeued.
func (d *Desk) Discard(ctx context.Context, query Query, options DiscardOptions) (int64, error) {
	if query.isEmpty() && !query.All {
		return 0, ErrEmptyQuery
	}
	discard := d.store.Delete
	if keep := cmp.Or(options.Archive, record.LetterArchive); keep > 0 && !query.Archived {
		discard = func(ctx context.Context, query Query, page []Letter) (int64, error) {
			return d.store.Archive(ctx, query, page, options.Actor, keep)
		}
	}
	// The ids are enough to delete letters.
	query.NoValues = true
	query, err := d.restrictToExisting(ctx, query)
	if err != nil {
		return 0, err
	}

	var n int64
	for {
		page, err := d.store.FindLatest(ctx, query, nil, pageSize)
		if err != nil || len(page) == 0 {
			return n, err
		}
		discarded, err := discard(ctx, query, page)
		n += discarded
		if err != nil {
			return n, err
		}
		if options.Did != nil {
			options.Did(n)
		}
	}
}
