package migrate

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// StepNumber returns the number of a step's id, or 0 if the id is not a number.
func StepNumber(id string) int {
	n, err := strconv.Atoi(id)
	if err != nil {
		return 0
	}
	return n
}

// LastStep returns the number of the last step. A node with all steps can work with this schema.
func LastStep(steps []Step) int {
	last := 0
	for _, s := range steps {
		last = max(last, StepNumber(s.ID))
	}
	return last
}

// PendingBreaking returns the breaking steps that are still pending. If the ledger has a breaking step that this
// version does not contain, started or complete, the error is [ErrNewer]. It costs one read.
func (m *Migrator) PendingBreaking(ctx context.Context) ([]Step, error) {
	l := m.openLedger()
	entries, err := l.readEntries(ctx)
	if err != nil {
		return nil, err
	}

	// A changed step does not prevent delivery. Up reports it.
	pending, _, err := l.compareSteps(entries)
	if errors.Is(err, ErrChanged) {
		return nil, nil
	}

	var breaking []Step
	for _, s := range pending {
		if s.Breaking {
			breaking = append(breaking, s)
		}
	}
	return breaking, err
}

// checkBreakingStep makes sure that a breaking step does no harm to nodes of older versions. Such a node
// first lists itself and then reads the ledger. checkBreakingStep reads the list, announces the step in
// the ledger, and reads the list again. So at least one of the two detects the other. If the step must
// wait, its announcement is withdrawn, because older nodes may run until the step starts.
func (m *Migrator) checkBreakingStep(ctx context.Context, l ledger, s Step) error {
	if !s.Breaking || m.CheckStep == nil {
		return nil
	}

	if err := m.CheckStep(ctx, s); err != nil {
		return err
	}
	if err := l.recordStep(ctx, s, 0, outcomeBegun, nil); err != nil {
		return err
	}
	err := m.CheckStep(ctx, s)
	if err == nil {
		return nil
	}

	// The announcement would stop older nodes although nothing was done, so it is withdrawn even if ctx has ended.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawTimeout)
	defer cancel()
	announcement := bson.D{{Key: "_id", Value: s.ID}, {Key: "outcome", Value: outcomeBegun}}
	if _, e := l.coll.DeleteOne(undo, announcement); e != nil {
		return errors.Join(err, fmt.Errorf("withdrawing the announcement of migration %s: %w", s.ID, e))
	}
	return err
}

// withdrawTimeout bounds the removal of an announcement. If the announcement stays, older nodes refuse to
// start until the step is complete or announced again. It has no other effect.
const withdrawTimeout = 5 * time.Second
