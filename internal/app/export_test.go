package app

import (
	"time"

	"github.com/outrelay/outrelay/internal/migrate"
)

// Hasten makes the relay's calls time out after call, and what it does every few seconds happen every half second. It must not have
// run yet.
func (r *Relay) Hasten(call time.Duration) {
	r.pace = pace{call: call, clean: 500 * time.Millisecond, indexes: 500 * time.Millisecond}
}

// SetMigrations makes the relay one of a version that knows these steps. It must not have run yet.
func (r *Relay) SetMigrations(steps []migrate.Step) {
	r.steps = steps
	r.member = r.newMember(r.mongo.state.Database(r.cfg.MongoDB.State))
}
