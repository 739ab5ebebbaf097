package app

import (
	"time"

	"github.com/outrelay/outrelay/internal/migrate"
)

// Hasten makes the relay's calls time out after call, and shortens its intervals of several seconds
// to half a second. It must be called before Run.
func (r *Relay) Hasten(call time.Duration) {
	r.shared.pace = pace{call: call, clean: 500 * time.Millisecond, indexes: 500 * time.Millisecond}
}

// SetMigrations makes the relay behave like a version with these migrations. It must be called
// before Run.
func (r *Relay) SetMigrations(steps []migrate.Step) {
	r.shared.steps = steps
	r.member = r.newMember(r.shared.mongo.state.Database(r.cfg.MongoDB.State))
}
