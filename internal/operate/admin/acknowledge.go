package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// problemAcknowledged is the kind of the entries in the audit log.
const problemAcknowledged nodes.Kind = "problem_acknowledged"

// Acknowledge ends a problem that stays after its cause has ended: lost history, or discarded events. id is the field Acknowledge of the problem. It returns
// [ErrNotFound] for a problem that does not exist, was acknowledged, or has expired.
func (o Operator) Acknowledge(ctx context.Context, id string) error {
	// The id of a problem is its kind and this id.
	recordID, err := bson.ObjectIDFromHex(id[strings.LastIndexByte(id, '/')+1:])
	if err != nil {
		return invalidRequest("%q is not the id of a problem that can be acknowledged; outrelay problems list has the ids", id)
	}

	incident, err := lease.AcknowledgeIncident(ctx, o.watcherDocuments(), o.Watcher, recordID)
	if errors.Is(err, lease.ErrNotFound) {
		return fmt.Errorf("problem %s of watcher %s: %w: it was acknowledged or has expired; outrelay problems list has the others", id, o.Watcher, mongodb.ErrNotFound)
	}
	if err != nil {
		return err
	}

	fields := bson.D{{Key: "problem", Value: id}, {Key: "happened_at", Value: incident.At}}
	if lost := incident.Lost; lost != nil {
		fields = append(fields, bson.D{
			{Key: "reason", Value: lost.Reason},
			{Key: "swept", Value: lost.Swept},
			{Key: "possible_repeats", Value: lost.Repeats},
		}...)
	}
	if discarded := incident.Discarded; discarded != nil {
		fields = append(fields, bson.D{{Key: "of", Value: discarded.NS}, {Key: "discarded", Value: discarded.Events}}...)
	}
	return o.logAction(ctx, problemAcknowledged, fields)
}
