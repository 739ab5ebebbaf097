package inbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/mongo"

	engine "github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
)

// Inbox stores the markers of handled keys in one database. It is safe for concurrent use and starts
// no goroutine. Package memory contains an inbox without a server. Create an Inbox with New.
type Inbox struct{ engine *engine.Inbox }

// New returns an Inbox in the collection inbox of db. Use the client of db for the transactions in
// which Once is called. New does no I/O. The error lists every problem of the options.
func New(db *mongo.Database, opts ...Option) (*Inbox, error) {
	return NewOver(func(settings engine.Settings) (*engine.Inbox, error) { return mongostore.Open(db, settings) }, opts...)
}

// NewOver returns an Inbox over the engine that open returns for the settings. It is for packages of this module: others cannot name
// the type of the engine.
func NewOver(open func(engine.Settings) (*engine.Inbox, error), opts ...Option) (*Inbox, error) {
	var settings engine.Settings
	for _, o := range opts {
		if o != nil {
			o.applyToInbox(&settings)
		}
	}

	inbox, err := open(settings)
	if err != nil {
		return nil, err
	}
	return &Inbox{inbox}, nil
}

// EnsureIndexes creates the missing collections and indexes. It does not change existing ones. Call it once at start: if transactions
// have to create a collection, they conflict, and without the indexes, marks and stored responses never expire.
func (x *Inbox) EnsureIndexes(ctx context.Context) error { return x.engine.EnsureIndexes(ctx) }

// Key identifies an effect.
type Key struct {
	// Scope separates the users of one inbox, for example "stripe". It is required and has at most
	// 1024 bytes.
	Scope string

	// ID identifies the cause within the scope, for example the id of a webhook. It is required. It may
	// have any length: a long id is stored as its SHA-256 hash.
	ID string
}

// describe returns a text for errors, in which long parts are shortened.
func (k Key) describe() string { return fmt.Sprintf("id %.256q in scope %.256q", k.ID, k.Scope) }

// The namespaces keep keys apart from the messages of consumers, whose namespaces are those of
// outboxes, and hashes apart from ids that look like them.
const (
	namespaceID   = "once"
	namespaceHash = "once#"
	maxIDBytes    = 1024
)

// entry returns the entry of the engine for the key.
func (k Key) entry() engine.Entry {
	entry := engine.Entry{Key: engine.Key{Consumer: k.Scope, Namespace: namespaceID, ID: k.ID}}
	if len(k.ID) > maxIDBytes {
		hash := sha256.Sum256([]byte(k.ID))
		entry.Key.Namespace, entry.Key.ID = namespaceHash, hex.EncodeToString(hash[:])
	}
	return entry
}

// check returns all problems of the key.
func (k Key) check() error {
	var errs []error
	if k.Scope == "" {
		errs = append(errs, fmt.Errorf("%w: the scope of the key is empty", ErrInvalid))
	}
	if k.ID == "" {
		errs = append(errs, fmt.Errorf("%w: the id of the key is empty", ErrInvalid))
	}
	if len(k.Scope) > maxIDBytes {
		errs = append(errs, fmt.Errorf("%w: the scope %.64q… has %d bytes; at most %d are allowed", ErrInvalid, k.Scope, len(k.Scope), maxIDBytes))
	}
	return errors.Join(errs...)
}

// Once runs fn if the key was not handled before. Otherwise it returns ErrDuplicate.
//
// The writes of fn with its context are committed together with the marker of the key: in a new
// transaction, or in the transaction of ctx, whose starter then decides about the commit. In the
// transaction of ctx, ErrDuplicate does not prevent the commit. If fn fails, Once returns its error
// and stores nothing. fn may run more than once before a commit, as with outbox.Box.Transaction.
//
// If this process is handling the same key, Once waits for that call, at most until ctx ends. If
// another process holds a claim of the key, Once returns ErrInProgress. Within fn, a call of Once for
// the same key runs its own fn, because it is part of the same handling.
func (x *Inbox) Once(ctx context.Context, key Key, fn func(ctx context.Context) error, opts ...OnceOption) error {
	if err := key.check(); err != nil {
		return err
	}

	var cfg engine.OnceConfig
	for _, o := range opts {
		if o != nil {
			o.applyToOnce(&cfg)
		}
	}

	entry := key.entry()
	return translate(x.engine.Once(ctx, entry, fn, cfg), key, entry.Key)
}

// Handled reports whether the key was handled. If ctx has a transaction, Handled joins it.
func (x *Inbox) Handled(ctx context.Context, key Key) (bool, error) {
	if err := key.check(); err != nil {
		return false, err
	}
	return x.engine.Handled(ctx, key.entry().Key)
}

// Sweep deletes expired markers, the oldest first and at most limit, and returns their number. A limit
// of 0 means 100,000. The server does the same in the background, unless WithoutTTL is set.
func (x *Inbox) Sweep(ctx context.Context, limit int) (int64, error) {
	return x.engine.Sweep(ctx, limit)
}

// Counts returns the sizes of the inbox. Its cost grows with the number of claims.
func (x *Inbox) Counts(ctx context.Context) (Counts, error) {
	counts, err := x.engine.Counts(ctx)
	return Counts(counts), err
}

// Counts contains the sizes of an inbox, including those of the consumers that share its collections.
type Counts struct {
	// Markers is the number of handled and claimed keys. It may be inaccurate after a crash of the
	// server.
	Markers int64

	// Claimed is the number of claims, including expired ones.
	Claimed int64

	// Expired is the number of claims whose lease has expired.
	Expired int64
}
