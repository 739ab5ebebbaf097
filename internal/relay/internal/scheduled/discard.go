package scheduled

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Discard removes the claimed envelopes of the dropped outbox coll of db that were inserted before the
// position of the drop and are not due yet, and returns their number. It removes them in fenced transactions. An envelope that is being
// sent may still arrive. Discard may be called from any goroutine. After an error, the envelopes that it has not removed are sent, or
// removed by a repetition.
func (s *Scheduled) Discard(ctx context.Context, db, coll, before string) (n int64, err error) {
	list := s.held.withdraw(func(e *dueEnvelope) bool { return e.isOfOutbox(db, coll, before) })

	for part := range slices.Chunk(list, mongodb.MaxDocuments) {
		var change waiting.ClaimChange
		for _, e := range part {
			change.Finish(e.flight.id, e.index)
		}
		err := s.Fencer.Fenced(ctx, nil, func(tx context.Context) error {
			return change.Write(tx, mongodb.InClient(mongo.SessionFromContext(tx).Client(), s.Claims))
		})
		if err != nil {
			s.held.hold(list[n:])
			return n, err
		}
		for _, e := range part {
			s.landEnvelope(e, 0)
		}
		n += int64(len(part))
	}
	return n, nil
}

// CountOfOutbox returns how many envelopes Discard would remove now.
func (s *Scheduled) CountOfOutbox(db, coll, before string) int64 {
	return s.held.count(func(e *dueEnvelope) bool { return e.isOfOutbox(db, coll, before) })
}

// isOfOutbox reports whether the envelope is of the outbox and was inserted before the position.
func (e *dueEnvelope) isOfOutbox(db, coll, before string) bool {
	return e.NS == db+"."+coll && e.position() < before
}

// position returns the position of the insert of the envelope, or of its claim if the server has not stamped the insert. A later collection
// of the name has later ones.
func (e *dueEnvelope) position() string {
	if e.stamp.IsZero() {
		return e.Pos
	}
	return outboxes.PosAt(e.stamp)
}
