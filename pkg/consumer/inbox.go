package consumer

import (
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// Mode determines how often a handler takes effect for a message. See WithMode.
//
// In every mode the function of the handler may run more than once for a message: after a failure, a crash, and when MongoDB rolls its
// transaction back. So acts outside of the database happen at least once. The modes differ in the effects in the database.
type Mode int

const (
	// Transactional marks the message as handled in the transaction of the handler: its effects in the database happen once.
	Transactional Mode = iota

	// Claimed also claims the message before the handler begins, for handlers that act outside of the database. Only one
	// member at a time runs the handler for the message. If that member dies, another one runs it when the lease expires. The claim
	// does not make the act happen once.
	Claimed

	// AtLeastOnce stores nothing: the handler runs for every delivery, without a transaction.
	AtLeastOnce

	// AtLeastOnceInTransaction stores nothing either, and runs the handler in a transaction: its writes commit together, once for
	// every delivery.
	AtLeastOnceInTransaction
)

// usesInbox reports whether handlers of the mode mark their messages.
func (m Mode) usesInbox() bool { return m == Transactional || m == Claimed }

// usesTransaction reports whether handlers of the mode run in a transaction.
func (m Mode) usesTransaction() bool { return m != AtLeastOnce }

// String returns the name of the mode.
func (m Mode) String() string {
	switch m {
	case Transactional:
		return "transactional"
	case Claimed:
		return "claimed"
	case AtLeastOnce:
		return "at least once"
	case AtLeastOnceInTransaction:
		return "at least once, in a transaction"
	}
	return fmt.Sprintf("Mode(%d)", int(m))
}

// WithCollections sets the name of the inbox's collection of markers. The collections of watermarks and claims have this name with
// a suffix. Consumers and an inbox.Inbox may share them. Defaults to "inbox". Messages that are set aside are in "inbox_waiting" in
// any case: all consumers of a database share it, so that a requeue of a dead letter finds it without the options of the consumer.
func WithCollections(name string) Option {
	return option(func(settings *settings) { settings.inbox.settings.Collection = name })
}

// WithRetention sets how long the inbox keeps the marker of a handled message: see inbox.WithRetention. A record that Kafka
// delivers again is rejected without a time limit. Defaults to seven days, the
// default retention of Kafka: an event that the relay publishes again comes from an outbox of about that age.
func WithRetention(retention time.Duration) Option {
	return option(func(settings *settings) { settings.inbox.settings.Retention = retention })
}

// WithoutTTL leaves expired markers to Inbox.Sweep of package inbox: see inbox.WithoutTTL.
func WithoutTTL() Option {
	return option(func(settings *settings) { settings.inbox.settings.WithoutTTL = true })
}

// WithLease sets how long the other members wait for a member that died in a handler of mode Claimed. The member renews
// the claim three times in this time. Defaults to 30 s, as long as Kafka waits for a member by default (WithSessionTimeout): a
// shorter lease would not let others begin earlier.
func WithLease(duration time.Duration) Option {
	return option(func(settings *settings) { settings.inbox.settings.Lease = duration })
}

// inboxSettings has the options about the inbox.
type inboxSettings struct {
	replacement consuming.Inbox // nil: the one in the database
	settings    inbox.Settings
}
