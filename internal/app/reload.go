package app

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/logging"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/nodes"
)

// Reloaded reports that the configuration was read again while the relay runs. applied contains the
// keys that apply now. waiting contains the keys that differ and wait for the next start. If err is
// not nil, nothing of the new configuration is used. Reloaded logs and counts the outcome and
// appends it to the events log. Health does not depend on it, because the relay continues with a
// valid configuration.
func (r *Relay) Reloaded(applied, waiting []string, err error) {
	r.metrics.Reloaded(metrics.Settings, err == nil)
	kind := nodes.ConfigReloaded
	fields := bson.D{{Key: "applied", Value: applied}, {Key: "waiting", Value: waiting}}
	switch {
	case err != nil:
		reason := logging.Clean(err.Error())
		kind = nodes.ConfigRefused
		fields = bson.D{{Key: "reason", Value: reason}}
		r.log.Error("the new configuration is invalid; the relay continues with the old one, and would not start again",
			"reason", reason, "advice", "fix it, check it with outrelay validate, and send SIGHUP again")

	case len(waiting) > 0:
		r.log.Warn("the configuration was read again; some changes apply only after the next start",
			"applied", applied, "waiting", waiting,
			"advice", "restart this node: a standby takes over")

	default:
		r.log.Info("the configuration was read again", "applied", applied)
	}

	ctx, cancel := context.WithTimeout(context.Background(), beatEvery)
	defer cancel()
	r.member.LogEvent(ctx, kind, fields)
}
