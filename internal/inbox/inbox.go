package inbox

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/hold"
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
	k := e.Key
	if len(k.Consumer) > maxTextBytes || len(k.Namespace) > maxTextBytes || len(k.ID) > maxTextBytes {
		err = errors.Join(err, fmt.Errorf("%w: consumer, namespace or id of a message for %.64q has more than %d bytes",
			ErrInvalid, k.Consumer, maxTextBytes))
	}
	return err
}

// validatePlace checks only what a watermark needs, which does not include the length of the
// identity.
func (e Entry) validatePlace() error {
	var errs []error
	addProblem := func(format string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, a...)...))
	}

	switch k := e.Key; {
	case k.Consumer == "":
		addProblem("the consumer of %.64q is empty", k.ID)
	case k.ID == "":
		addProblem("the id of a message for %.64q is empty; use PlaceID if a record has no id", k.Consumer)
	}

	if p := e.Place; p.Topic != "" && (p.Partition < 0 || p.Offset < 0 || p.Lane < 0 || p.Lane >= Lanes) {
		addProblem("%s has partition %d, lane %d and offset %d", e.Key, p.Partition, p.Lane, p.Offset)
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

// Inbox is the inbox of a service, in several collections of one database. It is safe for
// concurrent use.
type Inbox struct {
	settings
	client  *mongo.Client
	markers *mongo.Collection
	offsets *mongo.Collection // watermarks
	claims  *mongo.Collection // leases of claims
	tenures *mongo.Collection

	// singleFlight makes calls of Once with the same identity wait for each other.
	singleFlight hold.Guard

	mu         sync.Mutex
	attached   map[partition]int64 // generation at the last Attach of this process
	suspicions map[partition]suspicion
	heldClaims map[*claim]struct{}
	tenure     *tenure // nil without a partition
}

// New returns an Inbox in the database db. Its client must be the one that runs the transactions of
// the handlers.
//
// New does no I/O: call EnsureIndexes before the first message. Outside of transactions, the Inbox
// writes with majority write concern, even if the client is configured otherwise. The error joins
// the problems of all options.
func New(db *mongo.Database, opts ...Option) (*Inbox, error) {
	if db == nil {
		return nil, fmt.Errorf("inbox: %w: the database is nil", ErrInvalid)
	}

	s := settings{collection: DefaultCollection, retention: DefaultRetention, lease: DefaultLease}
	for _, o := range opts {
		o(&s)
	}
	if err := s.validate(); err != nil {
		return nil, err
	}

	concerns := options.Collection().
		SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary())
	return &Inbox{
		settings:   s,
		client:     db.Client(),
		markers:    db.Collection(s.collection, concerns),
		offsets:    db.Collection(s.collection+"_offsets", concerns),
		claims:     db.Collection(s.collection+"_claims", concerns),
		tenures:    db.Collection(s.collection+"_tenures", concerns),
		attached:   make(map[partition]int64),
		suspicions: make(map[partition]suspicion),
		heldClaims: make(map[*claim]struct{}),
	}, nil
}

// inTransaction reports whether ctx has a session with a running transaction.
func inTransaction(ctx context.Context) bool {
	s := mongo.SessionFromContext(ctx)
	return s != nil && s.TransactionRunning()
}
