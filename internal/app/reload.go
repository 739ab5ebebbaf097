package app

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/logging"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/store"
)

// Reloaded tells of a configuration that was read again while the relay runs: what was applied, which keys differ from what runs
// and wait for the next start, or why nothing of it can be used. It is logged, counted and written into the events log, and is no
// matter of health: what runs is what was good before.
func (r *Relay) Reloaded(applied, waiting []string, err error) {
	r.metrics.Reloaded(metrics.Settings, err == nil)
	kind, fields := store.ConfigReloaded, bson.D{{Key: "applied", Value: applied}, {Key: "waiting", Value: waiting}}
	switch {
	case err != nil:
		reason := logging.Clean(err.Error())
		kind, fields = store.ConfigRefused, bson.D{{Key: "reason", Value: reason}}
		r.log.Error("the configuration cannot be used; what runs goes on as it is, and would not start again", "reason", reason, "advice", "mend it, check it with outrelay validate, and send SIGHUP again")
	case len(waiting) > 0:
		r.log.Warn("the configuration was read again; some of what has changed counts from the next start only", "applied", applied, "waiting", waiting, "advice", "restart this node: a standby takes over meanwhile")
	default:
		r.log.Info("the configuration was read again", "applied", applied)
	}
	ctx, cancel := context.WithTimeout(context.Background(), beatEvery)
	defer cancel()
	r.member.Note(ctx, kind, fields)
}
