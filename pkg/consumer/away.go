package consumer

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// WithMaxOutage sets how long a member stays in its group while it cannot reach MongoDB. Then it leaves the group, so that members
// that can reach MongoDB get its partitions, and joins again when MongoDB responds. Defaults to 5 min, which is longer than an
// election or a restart of MongoDB. A negative limit means that the member stays.
func WithMaxOutage(limit time.Duration) Option {
	return option(func(settings *settings) { settings.maxOutage = cmp.Or(limit, defaultMaxOutage) })
}

// databaseReach is whether a member can reach its database. Only refreshHealth changes it.
type databaseReach struct {
	lostAt time.Time // zero: the last call succeeded
	gate   pauseGate // closed while the member has left its group
}

// noteDatabase records the outcome of a call of the database. The member leaves the group after the time of WithMaxOutage without
// a response, and joins again after the first response.
func (r *run) noteDatabase(err error) {
	// An error of the server is a response.
	if err == nil || !isTransient(err) && !mongo.IsTimeout(err) {
		if r.reach.gate.isPaused() {
			took := time.Since(r.reach.lostAt).Round(time.Second)
			r.reportLine(line{slog.LevelInfo, "MongoDB responds again; joining the group", []any{"took", took}}, fmt.Errorf("MongoDB responds again after %v: joining the group again", took))
		}
		r.reach.lostAt = time.Time{}
		r.reach.gate.set(false)
		return
	}

	if r.reach.lostAt.IsZero() {
		r.reach.lostAt = time.Now()
	}
	limit, took := r.c.s.maxOutage, time.Since(r.reach.lostAt)
	if limit >= 0 && took >= limit && !r.reach.gate.isPaused() {
		r.reportTrouble("cannot reach MongoDB for long; leaving the group until it responds",
			fmt.Errorf("MongoDB has not responded for %v: leaving the group until it does: %w", took.Round(time.Second), err))
		r.reach.gate.set(true)
	}
}

// awaitLost blocks until the member has to leave its group because it cannot reach its database, or until ctx ends.
func (d *databaseReach) awaitLost(ctx context.Context) {
	for {
		lost, changed := d.gate.currentState()
		if lost {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
