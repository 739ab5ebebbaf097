package inbox

import (
	"time"

	engine "github.com/outrelay/outrelay/internal/service/inbox"
)

// Option is an option of New.
type Option interface{ applyToInbox(s *engine.Settings) }

type option func(s *engine.Settings)

func (o option) applyToInbox(settings *engine.Settings) { o(settings) }

// WithCollection sets the name of the collection of markers. The other collections have this name with
// a suffix. Defaults to "inbox".
func WithCollection(name string) Option {
	return option(func(settings *engine.Settings) { settings.Collection = name })
}

// WithRetention sets how long a marker is kept. It must be longer than the time within which the same
// key may arrive again. Defaults to seven days, because common senders of webhooks retry for up to three.
// The smallest value is one minute.
func WithRetention(retention time.Duration) Option {
	return option(func(settings *engine.Settings) { settings.Retention = retention })
}

// WithoutTTL leaves expired markers to Sweep, so that a service that was down for longer than the
// retention can catch up first. By default the server deletes them.
func WithoutTTL() Option {
	return option(func(settings *engine.Settings) { settings.WithoutTTL = true })
}

// OnceOption is an option of Once and OnceValue.
type OnceOption interface {
	ValueOption
	applyToOnce(c *engine.OnceConfig)
}

type onceOption func(c *engine.OnceConfig)

func (o onceOption) applyToOnce(cfg *engine.OnceConfig)   { o(cfg) }
func (o onceOption) applyToValue(settings *valueSettings) { o(&settings.once) }

// WithClaim commits a claim of the key before fn begins, and renews it while fn runs. So only one
// process at a time runs fn, also if fn acts outside of the database. If the claim is lost, the context
// of fn is canceled, nothing is committed, and the error is ErrClaimLost. If the process dies, another
// call may begin when the lease is over. Defaults to 30 s, which a pause of a busy
// process does not exceed. The smallest lease is 100 ms. WithClaim
// cannot be used in a transaction.
func WithClaim(lease time.Duration) OnceOption {
	return onceOption(func(cfg *engine.OnceConfig) { cfg.Claim, cfg.Lease = true, lease })
}

// WithoutWaiting makes Once return ErrInProgress at once if this process is handling the key. By
// default, Once waits until that call ends.
func WithoutWaiting() OnceOption {
	return onceOption(func(cfg *engine.OnceConfig) { cfg.NoWait = true })
}
