package migrate

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Number is the number that a step's id stands for; 0 for an id that is none.
func Number(id string) int {
	n, err := strconv.Atoi(id)
	if err != nil {
		return 0
	}
	return n
}

// Schema is the number of the last of the steps: what a node that knows them all can work with.
func Schema(steps []Step) int {
	last := 0
	for _, s := range steps {
		last = max(last, Number(s.ID))
	}
	return last
}

// Guard returns a [*NewerError] where the ledger has a breaking step that this version does not know, begun or done, and
// otherwise the breaking steps that are still to be done. One read.
func (m *Migrator) Guard(ctx context.Context) ([]Step, error) {
	l := m.openLedger()
	entries, err := l.readEntries(ctx)
	if err != nil {
		return nil, err
	}
	pending, _, err := l.compareSteps(entries)
	if errors.Is(err, ErrChanged) {
		return nil, nil // told when migrations run; it keeps nobody from delivering
	}
	var out []Step
	for _, s := range pending {
		if s.Breaking {
			out = append(out, s)
		}
	}
	return out, err
}

// checkBreakingStep makes sure that a breaking step does no harm to nodes of older versions. An older one that starts lists itself and
// then reads the ledger; this looks at the list, announces the step in the ledger and looks again: one of the two sees the
// other. A step that has to wait after all is taken back, because until it is done older nodes may go on.
func (m *Migrator) checkBreakingStep(ctx context.Context, l ledger, s Step) error {
	if !s.Breaking || m.Ready == nil {
		return nil
	}
	if err := m.Ready(ctx, s); err != nil {
		return err
	}
	if err := l.recordStep(ctx, s, 0, outcomeBegun, nil); err != nil {
		return err
	}
	err := m.Ready(ctx, s)
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawTimeout)
		defer cancel()
		if _, e := l.coll.DeleteOne(undo, bson.D{{Key: "_id", Value: s.ID}, {Key: "outcome", Value: outcomeBegun}}); e != nil {
			return errors.Join(err, fmt.Errorf("taking back the announcement of migration %s: %w", s.ID, e))
		}
	}
	return err
}

// withdrawTimeout bounds the removal of an announcement. One that stays is no harm but to older nodes that start: they refuse,
// until the step is done or announced anew.
const withdrawTimeout = 5 * time.Second
