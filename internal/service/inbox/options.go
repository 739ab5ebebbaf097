package inbox

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// Defaults and limits of the Settings.
const (
	// DefaultCollection is the default name of the collection for markers. Other collections have this
	// name with a suffix.
	DefaultCollection = record.InboxCollection

	OffsetsSuffix = "_offsets" // of the collection of watermarks
	ClaimsSuffix  = "_claims"  // of the collection of leases
	TenuresSuffix = "_tenures" // of the collection of the sessions of processes

	// DefaultRetention is the default time for which a marker is kept.
	DefaultRetention = 7 * 24 * time.Hour

	// defaultLease is the default time after which a claim expires if it is not renewed.
	defaultLease = 30 * time.Second

	// MinRetention is the smallest retention. The times of markers have a precision of one second,
	// and the clock of a replica set may be ten seconds slow.
	MinRetention = time.Minute

	// MinLease is the smallest lease. A third of it must be long enough for one write.
	MinLease = 100 * time.Millisecond
)

// Settings configure an Inbox. Zero values are the defaults.
type Settings struct {
	// Collection is the name of the collection for markers.
	Collection string

	// Retention is how long a marker is kept after its message was handled. It must be longer than the
	// time within which a producer may send the same id again.
	Retention time.Duration

	// Lease is the time after which a claim expires if it is not renewed. Claim.Run renews it three
	// times in this time. It must be between MinLease and the retention.
	Lease time.Duration

	// WithoutTTL makes EnsureIndexes create a plain index instead of a TTL index for the expiry of
	// markers. Then only Sweep deletes markers, so that a consumer that was down for longer than the
	// retention can catch up first.
	WithoutTTL bool

	// HaltOnRecreated makes Attach return ErrRecreated if a topic was deleted and created again,
	// or if it has lost records. Otherwise a new generation begins: old watermarks have no effect any
	// more, but markers do.
	HaltOnRecreated bool
}

// completeSettings returns the settings with their defaults. The error joins all problems.
func (s Settings) completeSettings() (Settings, error) {
	s.Collection = cmp.Or(s.Collection, DefaultCollection)
	s.Retention = cmp.Or(s.Retention, DefaultRetention)
	s.Lease = cmp.Or(s.Lease, defaultLease)

	var errs []error
	if strings.ContainsAny(s.Collection, "$\x00") || strings.HasPrefix(s.Collection, "system.") {
		errs = append(errs, fmt.Errorf("inbox: %w: invalid collection name %q", ErrInvalid, s.Collection))
	}
	if s.Retention < MinRetention {
		errs = append(errs, fmt.Errorf("inbox: %w: invalid retention %s: it must be at least %s (WithRetention)", ErrInvalid, s.Retention, MinRetention))
	}
	if s.Lease < MinLease || s.Lease > s.Retention {
		errs = append(errs, fmt.Errorf("inbox: %w: invalid lease %s: it must be between %s and the retention (WithLease)", ErrInvalid, s.Lease, MinLease))
	}
	return s, errors.Join(errs...)
}
