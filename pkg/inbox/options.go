package inbox

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// DefaultCollection is the name of the collection of markers unless WithCollection says another. Watermarks are in
	// the collection of that name with "_offsets", leases of claims in that with "_claims".
	DefaultCollection = "inbox"
	// DefaultRetention is how long a marker is kept unless WithRetention says otherwise.
	DefaultRetention = 7 * 24 * time.Hour
	// DefaultLease is how long a claim is good without being renewed unless WithLease says otherwise.
	DefaultLease = 30 * time.Second
	// MinRetention is the shortest retention: markers are stamped to the second by a clock of the replica set that may be
	// ten seconds behind.
	MinRetention = time.Minute
	// MinLease is the shortest lease: a third of it has to be enough for one write.
	MinLease = 100 * time.Millisecond
)

// Mode says how a handler is protected from running twice.
type Mode int

// The modes; the package comment says what each promises.
const (
	Optimistic Mode = iota // the default
	Eager
	None
)

func (m Mode) String() string {
	switch m {
	case Optimistic:
		return "optimistic"
	case Eager:
		return "eager"
	case None:
		return "none"
	}
	return fmt.Sprintf("Mode(%d)", int(m))
}

// Identity says what two messages must have in common for one to be a duplicate of the other.
type Identity int

const (
	// IDAndConsumer is namespace, id and consumer: every consumer handles a message once.
	IDAndConsumer Identity = iota
	// IDOnly is namespace and id: a message is handled once, by whichever consumer is first.
	IDOnly
)

// Recreated says what Attach does about a topic that is not the one that it was.
type Recreated int

const (
	// Resume begins a new generation: the old watermarks do not count any more, markers do.
	Resume Recreated = iota
	// Halt changes nothing and returns a *RecreatedError until somebody calls Renew.
	Halt
)

// Option configures an Inbox.
type Option func(*settings)

type settings struct {
	collection string
	retention  time.Duration
	lease      time.Duration
	noTTL      bool

	identityKind Identity
	recreated    Recreated
}

// WithCollection names the collection of markers. Defaults to DefaultCollection.
func WithCollection(name string) Option { return func(s *settings) { s.collection = name } }

// WithRetention sets how long a marker is kept after its message was handled, by the server's clock. It has to cover the
// time within which a producer may send the same id again. Defaults to DefaultRetention; at least MinRetention.
func WithRetention(d time.Duration) Option { return func(s *settings) { s.retention = d } }

// WithLease sets how long a claim is good without being renewed; Claim.Run renews three times as often. Defaults to
// DefaultLease; at least MinLease.
func WithLease(d time.Duration) Option { return func(s *settings) { s.lease = d } }

// WithIdentity sets what identifies a message. Defaults to IDAndConsumer. It must not change for a collection in use: the
// markers of the other kind would not be found.
func WithIdentity(i Identity) Option { return func(s *settings) { s.identityKind = i } }

// WithRecreated sets what Attach does about a topic that was created anew. Defaults to Resume.
func WithRecreated(r Recreated) Option { return func(s *settings) { s.recreated = r } }

// WithoutTTL makes EnsureIndexes create a plain index on the markers' expiry instead of one by which the server removes
// them, so that only Sweep does: a consumer that was away for longer than the retention can catch up before markers go.
func WithoutTTL() Option { return func(s *settings) { s.noTTL = true } }

func (s *settings) validate() error {
	var errs []error
	if s.collection == "" || strings.ContainsAny(s.collection, "$\x00") || strings.HasPrefix(s.collection, "system.") {
		errs = append(errs, fmt.Errorf("inbox: %q is not a legal collection name", s.collection))
	}
	if s.retention < MinRetention {
		errs = append(errs, fmt.Errorf("inbox: a retention of %s; it must be at least %s", s.retention, MinRetention))
	}
	if s.lease < MinLease || s.lease > s.retention {
		errs = append(errs, fmt.Errorf("inbox: a lease of %s; it must be at least %s and at most the retention", s.lease, MinLease))
	}
	if s.identityKind != IDAndConsumer && s.identityKind != IDOnly {
		errs = append(errs, fmt.Errorf("inbox: unknown identity %d", s.identityKind))
	}
	if s.recreated != Resume && s.recreated != Halt {
		errs = append(errs, fmt.Errorf("inbox: unknown policy %d for topics created anew", s.recreated))
	}
	return errors.Join(errs...)
}

// OnceOption changes one call of Once.
type OnceOption func(*OnceConfig)

// OnceConfig is what the options of Once add up to.
type OnceConfig struct {
	Mode      Mode
	Namespace string
	Place     Place
	Lease     time.Duration // of Eager; 0 is that of the Inbox
	NoWait    bool
}

// Using sets the mode. Defaults to Optimistic.
func Using(m Mode) OnceOption { return func(c *OnceConfig) { c.Mode = m } }

// InNamespace sets the namespace of the id, usually that of the outbox that it came from. Defaults to none.
func InNamespace(ns string) OnceOption { return func(c *OnceConfig) { c.Namespace = ns } }

// At says where in Kafka the message came from, so that its watermark is asked and moved too.
func At(p Place) OnceOption { return func(c *OnceConfig) { c.Place = p } }

// ForLease sets the lease of an Eager claim. Defaults to that of the Inbox.
func ForLease(d time.Duration) OnceOption { return func(c *OnceConfig) { c.Lease = d } }

// NoWait returns a *BusyError at once where the same identity is being handled in this process. By default Once waits for
// it to end.
func NoWait() OnceOption { return func(c *OnceConfig) { c.NoWait = true } }
