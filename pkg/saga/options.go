package saga

import (
	"time"

	"github.com/outrelay/outrelay/internal/service/sagas"
)

// IDs selects how the ids of a saga are stored. In Go, ids are always texts.
type IDs string

// The kinds of stored ids. A text that cannot be an id of the kind is ErrNoID. So are the empty text and the nil UUID.
const (
	TextIDs  = IDs(sagas.String) // the default
	UUIDs    = IDs(sagas.UUID)   // binary of subtype 4
	Int32IDs = IDs(sagas.Int32)
	Int64IDs = IDs(sagas.Int64)
)

// Option configures a Saga. See Define.
type Option interface{ applyTo(*settings) }

type option func(*settings)

func (o option) applyTo(settings *settings) { o(settings) }

type settings struct {
	ids              sagas.Kind
	owner, aggregate string
	keep             time.Duration // of the tombstone; negative is no tombstone
	held             int
}

// WithIDs selects the BSON type in which ids are stored in _id. All sagas of a collection have ids of the same kind, so change
// it only together with the stored documents. Defaults to TextIDs.
func WithIDs(ids IDs) Option {
	return option(func(settings *settings) { settings.ids = sagas.Kind(ids) })
}

// WithTombstone keeps the document of a completed saga for this time, by the server's clock. Late messages are then ignored,
// and a late start does not start the saga again. A negative time deletes the document at completion. Defaults to seven days,
// as long as the inbox remembers messages.
func WithTombstone(keep time.Duration) Option {
	return option(func(settings *settings) { settings.keep = keep })
}

// WithOwner sets the owner of the saga, which distinguishes it from a saga with the same name in another program. Defaults to
// the Go type of the state. Set the owner to the old type before you rename that type.
func WithOwner(owner string) Option {
	return option(func(settings *settings) { settings.owner = owner })
}

// WithAggregate sets the aggregate type of the events for timeouts, which selects their topic: outbox.event.<aggregateType>,
// unless the relay is configured otherwise. Defaults to the name of the saga.
func WithAggregate(aggregateType string) Option {
	return option(func(settings *settings) { settings.aggregate = aggregateType })
}

// WithHeld sets how many early messages of one saga Sequenced holds. Together they must not exceed 8 MiB. Above the limit, a
// message fails with ErrGap. Defaults to 100: far above the disorder that redeliveries cause, so that more means a missing message.
// A negative n means none: each early message fails with ErrGap, and its Retry waits for the earlier one.
func WithHeld(n int) Option { return option(func(settings *settings) { settings.held = n }) }
