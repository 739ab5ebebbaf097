package app

import (
	"time"

	"github.com/outrelay/outrelay/internal/migrate"
)

func init() { indexesAgain = time.Second }

// SetMigrations makes the relay one of a version that knows these steps. It must not have run yet.
func (r *Relay) SetMigrations(steps []migrate.Step) {
	r.steps = steps
	r.member = r.newMember(r.mongo.state.Database(r.cfg.MongoDB.State))
}
