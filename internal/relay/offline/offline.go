// Package offline has what commands do with the means of a relay while none needs to run: they divide a watcher, read its change stream
// once, and try a right. It is the door to these parts of the engine; the calls connect and end, and each blocks until it is done.
package offline

import (
	"context"
	"fmt"
	"log/slog"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/internal/changestream"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
	"github.com/outrelay/outrelay/internal/relay/internal/slots"
	"github.com/outrelay/outrelay/resume"
)

// ErrResliceRejected is wrapped by the errors of Reslice that an operator can fix.
var ErrResliceRejected = slots.ErrResliceRejected

// ErrIDForbidden means that the ACLs do not allow this user to use a transactional id.
var ErrIDForbidden = fence.ErrIDForbidden

type (
	// ResliceOptions are the wishes of an operator for a new division.
	ResliceOptions = slots.ResliceOptions
	// ResliceReport is what Reslice has done, or would do.
	ResliceReport = slots.ResliceReport
)

// Reslice changes the number of slots of the watcher, see [slots.Reslice]. It connects for the
// call.
func Reslice(
	ctx context.Context, cfg config.Config, log *slog.Logger, want ResliceOptions,
) (ResliceReport, error) {
	mongo, err := connect.NewClients(cfg.MongoDB, connect.MongoHost{}, cfg.Node, slot.MaxSlots, log, nil)
	if err != nil {
		return ResliceReport{}, err
	}
	defer mongo.Disconnect(ctx)

	brokers, err := connect.NewKafka(cfg, connect.KafkaHost{}, log, nil)
	if err != nil {
		return ResliceReport{}, err
	}
	defer brokers.Close()
	return slots.Reslice(ctx, cfg, log, mongo.State, fence.NewClient(brokers), want)
}

// TryTransactionalID initializes id, to find out whether this user may use it: see [fence.Client.TryTransactionalID].
func TryTransactionalID(ctx context.Context, brokers *kafkawire.Client, id string) error {
	return fence.NewClient(brokers).TryTransactionalID(ctx, id)
}

// ReadChanges reads the change stream of the scope from start on and sends its batches to out, until ctx ends or the stream cannot
// continue: see [changestream.Stream.Run].
func ReadChanges(
	ctx context.Context, client *mongo.Client, scope *changes.Scope, start changes.Start, out chan<- *changes.Batch,
) error {
	stream, err := changestream.New(changestream.Config{Client: client, Scope: scope, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	return stream.Run(ctx, start, out)
}

// NextInsert returns a function that finds the event at which the stream of a slot stands, see [changestream.NextInsert].
func NextInsert(
	cfg config.Config, client *mongo.Client,
) func(ctx context.Context, part slot.Range, position resume.Position) (changes.Skip, error) {
	return func(ctx context.Context, part slot.Range, position resume.Position) (changes.Skip, error) {
		scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
		if err != nil {
			return changes.Skip{}, fmt.Errorf("watch: %w", err)
		}
		return changestream.NextInsert(ctx, client, scope.Of(part), position)
	}
}
