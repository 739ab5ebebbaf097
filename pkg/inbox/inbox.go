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

// maxText is the longest consumer, namespace or id in bytes.
const maxText = 1024

// Key is the identity of a message for a consumer. The id is whatever text identifies the message: the event's id, an id of
// the business that two events may share, or PlaceID.
type Key struct{ Consumer, Namespace, ID string }

// String is for errors and logs: long parts are cut.
func (k Key) String() string {
	const shown = 256 // bytes
	id, ns := k.ID[:min(len(k.ID), shown)], k.Namespace[:min(len(k.Namespace), shown)]
	if ns == "" {
		return id + " for " + k.Consumer
	}
	return ns + ":" + id + " for " + k.Consumer
}

// Entry is one message as the inbox sees it.
type Entry struct {
	Key   Key
	Place Place
}

func (e Entry) validate() error {
	err := e.validatePlace()
	if k := e.Key; len(k.Consumer) > maxText || len(k.Namespace) > maxText || len(k.ID) > maxText {
		err = errors.Join(err, fmt.Errorf("%w: consumer, namespace or id of a message for %.64q has more than %d bytes", ErrInvalid, k.Consumer, maxText))
	}
	return err
}

// validatePlace checks what a watermark needs of an entry. The length of the identity is no part of that.
func (e Entry) validatePlace() error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, a...)...))
	}
	switch k := e.Key; {
	case k.Consumer == "":
		bad("the consumer of %.64q is empty", k.ID)
	case k.ID == "":
		bad("the id of a message for %.64q is empty; use PlaceID where a record has none", k.Consumer)
	}
	if p := e.Place; p.Topic != "" && (p.Partition < 0 || p.Offset < 0 || p.Lane < 0 || p.Lane >= Lanes) {
		bad("%s has partition %d, lane %d and offset %d", e.Key, p.Partition, p.Lane, p.Offset)
	}
	return errors.Join(errs...)
}

func validate(list []Entry) error {
	var errs []error
	for _, e := range list {
		if err := e.validate(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Inbox is one service's inbox: collections of one database. It is safe for concurrent use.
type Inbox struct {
	settings
	client  *mongo.Client
	markers *mongo.Collection
	offsets *mongo.Collection
	claims  *mongo.Collection
	tenures *mongo.Collection

	guard hold.Guard

	mu       sync.Mutex
	attached map[partition]int64 // the generation that this process attached to
	suspects map[partition]suspicion
	held     map[*claim]struct{}
	tenure   *tenure // nil without a partition
}

// New makes an Inbox over db, which has to be a handle of the client that the handlers' transactions run on. It does no
// I/O; EnsureIndexes creates what is needed. What a transaction does not cover is written by majority whatever the client
// says. Problems of the options are reported all at once.
func New(db *mongo.Database, opts ...Option) (*Inbox, error) {
	if db == nil {
		return nil, errors.New("inbox: the database is nil")
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
		settings: s,
		client:   db.Client(),
		markers:  db.Collection(s.collection, concerns),
		offsets:  db.Collection(s.collection+"_offsets", concerns),
		claims:   db.Collection(s.collection+"_claims", concerns),
		tenures:  db.Collection(s.collection+"_tenures", concerns),
		attached: make(map[partition]int64),
		suspects: make(map[partition]suspicion),
		held:     make(map[*claim]struct{}),
	}, nil
}

// inTransaction says whether ctx has a session with a running transaction.
func inTransaction(ctx context.Context) bool {
	s := mongo.SessionFromContext(ctx)
	return s != nil && s.TransactionRunning()
}
