package inbox

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// DefaultCollection is the default name of the collection for markers. WithCollection changes
	// it. Other collections have this name with the suffixes "_offsets" (watermarks), "_claims"
	// (leases) and "_tenures" (sessions of processes).
	DefaultCollection = "inbox"

	// DefaultRetention is the default time for which a marker is kept. WithRetention changes it.
	DefaultRetention = 7 * 24 * time.Hour

	// DefaultLease is the default time after which a claim expires if it is not renewed. WithLease
	// changes it.
	DefaultLease = 30 * time.Second

	// MinRetention is the smallest retention. The times of markers have a precision of one second,
	// and the clock of a replica set may be ten seconds slow.
	MinRetention = time.Minute

	// MinLease is the smallest lease. A third of it must be long enough for one write.
	MinLease = 100 * time.Millisecond
)

// Mode determines how a handler is protected from running twice. See the package documentation.
type Mode int

// Modes. Optimistic is the default.
const (
	Optimistic Mode = iota // the marker is written in the transaction of the handler
	Eager                  // a claim is committed before the handler begins
	None                   // nothing is stored
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

// Identity determines when a message is a duplicate of another one.
type Identity int

const (
	// IDAndConsumer compares namespace, id and consumer: each consumer handles a message once.
	IDAndConsumer Identity = iota

	// IDOnly compares namespace and id: only the first consumer handles a message.
	IDOnly
)

// Recreated determines how Attach treats a topic that was deleted and created again.
type Recreated int

const (
	// Resume begins a new generation: old watermarks have no effect any more, but markers do.
	Resume Recreated = iota

	// Halt changes nothing. Attach returns a *RecreatedError until Renew is called.
	Halt
)

// Option configures an Inbox. See New.
type Option func(*settings)

type settings struct {
	collection string
	retention  time.Duration
	lease      time.Duration
	noTTL      bool

	identityKind Identity
	recreated    Recreated
}

// WithCollection sets the name of the collection for markers. Defaults to DefaultCollection.
func WithCollection(name string) Option {
	return func(s *settings) { s.collection = cmp.Or(name, DefaultCollection) }
}

// WithRetention sets how long a marker is kept after its message was handled, by the server's
// clock. It must be longer than the time within which a producer may send the same id again.
// Defaults to DefaultRetention. The smallest value is MinRetention.
func WithRetention(d time.Duration) Option {
	return func(s *settings) { s.retention = cmp.Or(d, DefaultRetention) }
}

// WithLease sets the time after which a claim expires if it is not renewed. Claim.Run renews it
// three times in this time. Defaults to DefaultLease. The lease must be between MinLease and the
// retention.
func WithLease(d time.Duration) Option {
	return func(s *settings) { s.lease = cmp.Or(d, DefaultLease) }
}

// WithIdentity sets what identifies a message. Defaults to IDAndConsumer. Do not change it for a
// collection with markers, because markers of the other kind are not found.
func WithIdentity(i Identity) Option { return func(s *settings) { s.identityKind = i } }

// WithRecreated sets how Attach treats a topic that was deleted and created again. Defaults to
// Resume.
func WithRecreated(r Recreated) Option { return func(s *settings) { s.recreated = r } }

// WithoutTTL makes EnsureIndexes create a plain index instead of a TTL index for the expiry of
// markers. Then only Sweep deletes markers, so that a consumer that was down for longer than the
// retention can catch up first.
func WithoutTTL() Option { return func(s *settings) { s.noTTL = true } }

// validate joins the problems of all options.
func (s *settings) validate() error {
	var errs []error
	if s.collection == "" || strings.ContainsAny(s.collection, "$\x00") || strings.HasPrefix(s.collection, "system.") {
		errs = append(errs, fmt.Errorf("inbox: %w: invalid collection name %q", ErrInvalid, s.collection))
	}
	if s.retention < MinRetention {
		errs = append(errs, fmt.Errorf("inbox: %w: invalid retention %s: it must be at least %s", ErrInvalid, s.retention, MinRetention))
	}
	if s.lease < MinLease || s.lease > s.retention {
		errs = append(errs, fmt.Errorf("inbox: %w: invalid lease %s: it must be between %s and the retention", ErrInvalid, s.lease, MinLease))
	}
	if s.identityKind != IDAndConsumer && s.identityKind != IDOnly {
		errs = append(errs, fmt.Errorf("inbox: %w: unknown identity %d", ErrInvalid, s.identityKind))
	}
	if s.recreated != Resume && s.recreated != Halt {
		errs = append(errs, fmt.Errorf("inbox: %w: unknown policy %d for recreated topics", ErrInvalid, s.recreated))
	}

	return errors.Join(errs...)
}

// OnceOption configures one call of Once.
type OnceOption func(*OnceConfig)

// OnceConfig is the result of the options of Once.
type OnceConfig struct {
	Mode      Mode          // default Optimistic
	Namespace string        // default ""
	Place     Place         // default none
	Lease     time.Duration // of an Eager claim; 0 is the lease of the Inbox
	NoWait    bool          // fail instead of waiting for a call with the same identity
}

// Using sets the mode of the call. Defaults to Optimistic.
func Using(m Mode) OnceOption { return func(c *OnceConfig) { c.Mode = m } }

// InNamespace sets the namespace of the id, usually the outbox that the event comes from. Defaults
// to "".
func InNamespace(ns string) OnceOption { return func(c *OnceConfig) { c.Namespace = ns } }

// At sets the place of the message in Kafka, so that its watermark is checked and moved too.
func At(p Place) OnceOption { return func(c *OnceConfig) { c.Place = p } }

// ForLease sets the lease of an Eager claim. Defaults to the lease of the Inbox.
func ForLease(d time.Duration) OnceOption { return func(c *OnceConfig) { c.Lease = d } }

// NoWait makes Once return a *BusyError at once if this process handles the same identity. By
// default, Once waits until the other call ends.
func NoWait() OnceOption { return func(c *OnceConfig) { c.NoWait = true } }
