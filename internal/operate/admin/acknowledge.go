package admin

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// problemAcknowledged is the kind of the entries in the audit log.
const problemAcknowledged nodes.Kind = "problem_acknowledged"

// Acknowledge ends a problem that stays after its cause has ended: lost history. id is the field Acknowledge of the problem. It returns
// [ErrNotFound] for a problem that does not exist, was acknowledged, or has expired.
func (o Operator) Acknowledge(ctx context.Context, id string) error {
	recordID, err := bson.ObjectIDFromHex(id)
	if err != nil {
		return invalidRequest("%q is not the id of a problem that can be acknowledged; outrelay problems list has the ids", id)
	}

	lost, err := lease.AcknowledgeLost(ctx, o.watcherDocuments(), o.Watcher, recordID)
	if errors.Is(err, lease.ErrNotFound) {
		return fmt.Errorf("problem %s of watcher %s: %w: it was acknowledged or has expired; outrelay problems list has the others", id, o.Watcher, mongodb.ErrNotFound)
	}
	if err != nil {
		return err
	}

	return o.logAction(ctx, problemAcknowledged, bson.D{
		{Key: "problem", Value: id},
		{Key: "reason", Value: lost.Reason},
		{Key: "lost_at", Value: lost.At},
		{Key: "swept", Value: lost.Swept},
		{Key: "possible_repeats", Value: lost.Repeats},
	})
}
