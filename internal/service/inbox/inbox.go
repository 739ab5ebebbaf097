package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/outrelay/outrelay/internal/base/hold"
)

// maxTextBytes is the largest length of a consumer, a namespace and an id.
const maxTextBytes = 1024

// Key is the identity of a message for a consumer. Each field has at most 1024 bytes.
type Key struct {
	// Consumer is the name of the consumer. It must not be empty.
	Consumer string

	// Namespace distinguishes equal ids of different sources. It may be empty.
	Namespace string

	// ID is the id of the event, a business id that several events may share, or a PlaceID. It must
	// not be empty.
	ID string
}

// String returns a text for errors and logs, in which long parts are shortened.
func (k Key) String() string {
	const maxShown = 256 // bytes
	id := k.ID[:min(len(k.ID), maxShown)]
	ns := k.Namespace[:min(len(k.Namespace), maxShown)]
	if ns == "" {
		return id + " for " + k.Consumer
	}
	return ns + ":" + id + " for " + k.Consumer
}

// Entry is a message in the inbox: its identity and its place.
type Entry struct {
	Key   Key
	Place Place
}

// validateEntry checks the entry. The error wraps ErrInvalid.
func (e Entry) validateEntry() error {
	err := e.validatePlace()
	key := e.Key
	if len(key.Consumer) > maxTextBytes || len(key.Namespace) > maxTextBytes || len(key.ID) > maxTextBytes {
		err = errors.Join(err, fmt.Errorf("%w: consumer, namespace or id of a message for %.64q has more than %d bytes",
			ErrInvalid, key.Consumer, maxTextBytes))
	}
	return err
}

// validatePlace checks only the fields that a watermark needs: not the length of the
// identity.
func (e Entry) validatePlace() error {
	var errs []error
	addProblem := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...))
	}

	switch key := e.Key; {
	case key.Consumer == "":
		addProblem("the consumer of %.64q is empty", key.ID)
	case key.ID == "":
		addProblem("the id of a message for %.64q is empty; use PlaceID if a record has no id", key.Consumer)
	}

	if place := e.Place; place.Topic != "" && (place.Partition < 0 || place.Offset < 0 || place.Lane < 0 || place.Lane >= Lanes) {
		addProblem("%s has partition %d, lane %d and offset %d", e.Key, place.Partition, place.Lane, place.Offset)
	}

	return errors.Join(errs...)
}

// validateEntries joins the errors of all invalid entries.
func validateEntries(list []Entry) error {
	var errs []error
	for _, e := range list {
		if err := e.validateEntry(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// isPlaceID reports whether the id contains nothing but the place.
func (e Entry) isPlaceID() bool {
	place := e.Place
	return place.Topic != "" && e.Key.ID == PlaceID(place.Topic, place.Partition, place.Offset)
}

// markerID returns the id of the marker of an entry, in the given generation of its partition.
func (e Entry) markerID(generation int64) ID {
	// N29: the same place in a recreated topic is another message.
	if e.isPlaceID() {
		return ID{e.Key, generation}
	}
	return ID{Key: e.Key}
}

// Inbox is the inbox of a service. It is safe for concurrent use.
type Inbox struct {
	settings Settings
	store    Store

	// singleFlight makes calls of Once with the same identity wait for each other.
	singleFlight hold.Guard

	mu         sync.Mutex
	attached   map[Partition]int64 // generation at the last Attach of this process
	suspicions map[Partition]suspicion
	heldClaims map[*Claim]struct{}
}

// New returns an Inbox. open returns its Store for the complete settings. New does no I/O: call
// EnsureIndexes before the first message. The error joins the problems of all settings and of open.
func New(settings Settings, open func(settings Settings) (Store, error)) (*Inbox, error) {
	settings, settingsErr := settings.completeSettings()
	store, err := open(settings)
	if err := errors.Join(err, settingsErr); err != nil {
		return nil, err
	}

	return &Inbox{
		settings:   settings,
		store:      store,
		attached:   make(map[Partition]int64),
		suspicions: make(map[Partition]suspicion),
		heldClaims: make(map[*Claim]struct{}),
	}, nil
}

// EnsureIndexes creates the missing collections and indexes. It does not change existing ones. Call
// it before the first Admit: if transactions have to create a collection, they conflict. If an index
// with the same name or key has other options, the error contains its field.
func (x *Inbox) EnsureIndexes(ctx context.Context) error { return x.store.EnsureIndexes(ctx) }

// Counts returns the sizes of the inbox. Its cost grows with the number of claims.
func (x *Inbox) Counts(ctx context.Context) (Counts, error) { return x.store.Counts(ctx) }

const defaultSweep = 100_000

// Sweep deletes markers whose retention is over by the clock of the store, the oldest first and at
// most limit, and returns their number. A limit of 0 means 100,000. It does the work of the TTL index
// on demand and within limits.
func (x *Inbox) Sweep(ctx context.Context, limit int) (removed int64, err error) {
	if limit < 0 {
		return 0, fmt.Errorf("sweeping: %w: negative limit", ErrInvalid)
	}

	removed, err = x.store.Sweep(ctx, cmp.Or(limit, defaultSweep))
	if err != nil {
		return removed, fmt.Errorf("sweeping: %w", err)
	}
	return removed, nil
}
