package process

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// newMember returns this process as a member of the registry of nodes.
func (r *Relay) newMember(db state.Database) *nodes.Member {
	// A process without the task relay works for no watcher.
	watcher, compared := r.cfg.Watcher, configFingerprint(r.cfg)
	if !r.cfg.HasTask(config.TaskRelay) {
		watcher, compared = "", ""
	}

	return nodes.New(nodes.Config{
		State:        db,
		Node:         r.cfg.Node,
		Address:      r.cfg.Address,
		Version:      r.shared.Version,
		Watcher:      watcher,
		Tasks:        configuredTasks(r.cfg),
		Capabilities: listCapabilities(r.cfg),
		Fingerprint:  compared,
		Log:          r.log,
	})
}

// configuredTasks returns the tasks that the configuration gives to this process.
func configuredTasks(cfg config.Config) []nodes.Task {
	var out []nodes.Task
	if cfg.HasTask(config.TaskRelay) {
		out = append(out, nodes.Relay)
	}
	if term.MayPurgeAsOwner(cfg) {
		out = append(out, nodes.Cleaner)
	}
	if cfg.HasTask(config.TaskAdmin) && cfg.HTTP.Admin != nil {
		out = append(out, nodes.Admin)
	}
	return out
}

// listCapabilities returns the settings in which operators may see processes of a watcher differ.
func listCapabilities(cfg config.Config) []string {
	return []string{
		"preset:" + cfg.Record.Preset,
		"recording:" + cfg.Recording,
		"compression:" + cfg.Kafka.Compression,
	}
}

// configFingerprint returns a hash of the settings that must be equal on all nodes of a watcher:
// which envelopes are sent where and in which form, and what happens to them. The settings cannot
// be derived from it. An empty fingerprint is not compared.
func configFingerprint(cfg config.Config) string {
	text, err := json.Marshal([]any{
		cfg.Watch, cfg.Mapping, cfg.Topics, cfg.Record, cfg.Recording, cfg.Retention, cfg.Purge, cfg.DeadLetters, cfg.Retry,
		cfg.LostHistory, cfg.Invalidate, cfg.OnDrop, cfg.Expired, cfg.Limits.Record,
	})
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// vitalSigns returns the content of the next heartbeat.
func (r *Relay) vitalSigns() nodes.Vitals {
	vitals := nodes.Vitals{KafkaReachable: r.shared.KafkaReachable.Load(), SinceAck: -1, Slots: r.cfg.Slots, ClockAhead: r.shared.Clock.Ahead()}
	if at := r.shared.LastAck.Load(); at > 0 {
		vitals.SinceAck = time.Since(time.Unix(0, at))
	}
	for _, one := range r.activeSlots() {
		vitals.Holds = append(vitals.Holds, one.Slot.ID(r.cfg.Watcher))
	}
	return vitals
}

// checkHostClient returns an error if the client of the embedding program cannot work for a relay. It blocks
// until MongoDB responds or stop ends.
func (r *Relay) checkHostClient(stop context.Context) error {
	client := r.host.Mongo.Client
	if client == nil {
		return nil
	}

	for {
		err := mongodb.CheckClient(stop, client)
		switch {
		case errors.Is(err, mongodb.ErrClientTimeout):
			return fmt.Errorf("%w: use a client without it, or relay.WithMongoOptions", err)
		case errors.Is(err, mongodb.ErrClientStrict):
			return fmt.Errorf("%w: use a client without SetStrict, or relay.WithMongoOptions, which ignores it", err)
		case err == nil || errors.Is(err, mongo.ErrClientDisconnected):
			return err
		}
		// The servers may be away, so the check is repeated.
		r.log.Debug("cannot check the client of the service", "error", err)
		if retry.Sleep(stop, beatEvery) != nil {
			return nil
		}
	}
}

// prepareState creates what the state database lacks. It blocks until MongoDB responds, or stop ends. It returns an error
// if a later attempt cannot succeed: the database belongs to others ([state.ErrUnusable]), or a privilege is missing.
func (r *Relay) prepareState(stop context.Context) error {
	db := state.Open(r.shared.Mongo.State, r.cfg.State)
	for {
		ctx, cancel := context.WithTimeout(stop, setupTimeout)
		// The names come first: a wrong configuration writes nothing.
		err := r.inspectWatched(ctx)
		if err == nil {
			err = db.Ensure(ctx, r.log)
		}
		cancel()

		var rejected *mongodb.PrivilegeError
		if err == nil || errors.Is(err, state.ErrUnusable) || errors.Is(err, outboxes.ErrUnwatchable) || errors.As(err, &rejected) {
			return err
		}
		if stop.Err() == nil {
			r.shared.State.SetError("mongodb reachable", err)
			r.log.Debug("cannot prepare the state database", "error", err)
		}
		if retry.Sleep(stop, beatEvery) != nil {
			return nil
		}
	}
}

// inspectWatched returns [outboxes.ErrUnwatchable] if a configured name cannot be read. A term reports what does not
// prevent its work.
func (r *Relay) inspectWatched(ctx context.Context) error {
	if !r.cfg.HasTask(config.TaskRelay) {
		return nil
	}
	found, err := connect.InspectWatched(ctx, r.cfg, r.shared.Mongo.State, connect.Depth{Rights: true})
	if err != nil {
		return err
	}
	return found.Unreadable()
}

// setupTimeout bounds one attempt to prepare the state database.
const setupTimeout = 30 * time.Second

const (
	beatEvery = nodes.BeatEvery
	// nodeCheckEvery is the interval at which a node checks whether other nodes have stopped their
	// heartbeats.
	nodeCheckEvery = nodes.StaleAfter / 2
	// leaveTimeout bounds the removal of a stopping node from the list of nodes. While the node
	// stays listed, the other nodes wait until it is stale.
	leaveTimeout = 3 * time.Second
	// oplogWindowEvery is the interval at which the window of the oplog is read. After a failure
	// the next attempt is one interval later, too: the server may not allow the read.
	oplogWindowEvery = 30 * time.Second
)

// runHeartbeat publishes that this node is alive and whether it reaches Kafka (N6), until ctx ends.
// It also updates the clock and the metrics that need a query, checks the other nodes, and removes
// old entries.
func (r *Relay) runHeartbeat(ctx context.Context) error {
	ticker := time.NewTicker(beatEvery)
	defer ticker.Stop()
	defer r.shared.State.EndPulse("heartbeat")

	// After a failure, the next attempt is one interval later.
	tasks := []struct {
		every time.Duration
		name  string
		run   func(context.Context) error
		next  time.Time
	}{
		{every: oplogWindowEvery, name: "reading the window of the oplog", run: r.readOplogWindow},
		{every: nodeCheckEvery, name: "checking the other nodes", run: r.member.CheckPeers},
		{every: nodes.TidyEvery, name: "removing old nodes and events", run: r.member.RemoveOld},
	}
	for {
		r.shared.State.RecordPulse("heartbeat")
		r.sendHeartbeat(ctx)

		for i := range tasks {
			task := &tasks[i]
			if time.Now().Before(task.next) {
				continue
			}
			task.next = time.Now().Add(task.every)
			call, cancel := context.WithTimeout(ctx, beatEvery)
			if err := task.run(call); err != nil && ctx.Err() == nil {
				r.log.Debug(task.name+" failed", "error", err)
			}
			cancel()
		}

		select {
		case <-ctx.Done():
			r.LeaveNodes(ctx)
			return nil
		case <-ticker.C:
		}
	}
}

// sendHeartbeat checks whether Kafka is reachable and stores the heartbeat of this node.
func (r *Relay) sendHeartbeat(ctx context.Context) {
	// A broker that does not respond must not delay the heartbeat.
	call, stop := context.WithTimeout(ctx, beatEvery/2)
	_, err := r.shared.Kafka.Metadata(call, nil)
	stop()
	if ctx.Err() != nil {
		return
	}

	r.shared.KafkaReachable.Store(err == nil)
	r.shared.State.SetError("kafka reachable", err)

	call, stop = context.WithTimeout(ctx, beatEvery)
	defer stop()
	err = r.member.SendHeartbeat(call, r.vitalSigns())
	if err == nil {
		err = r.shared.Clock.Sync(call, r.shared.Mongo.State)
	}
	r.metrics.MongoReachable.Set(metrics.Bool(err == nil))
	// The end of ctx interrupts the calls, which shows nothing about MongoDB.
	if err == nil || ctx.Err() == nil {
		r.shared.State.SetError("mongodb reachable", err)
	}
}

// LeaveNodes implements slots.Process. It removes this node from the list of nodes.
func (r *Relay) LeaveNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := r.member.Leave(ctx); err != nil {
		r.log.Info("the node stays listed until it is stale", "error", err)
	}
}

// readOplogWindow updates the metric of the oplog window, and the facts about the oplog.
func (r *Relay) readOplogWindow(ctx context.Context) error {
	oplog, err := connect.Oplog(r.shared.Mongo.State)(ctx)
	if err == nil {
		r.metrics.OplogWindow.Set(oplog.Newest.Sub(oplog.Oldest).Seconds())
		r.counts.oplog.Store(&oplog)
	}
	return err
}

// ApplyReload applies the keys of next that may change without a restart, and returns them.
func (r *Relay) ApplyReload(next config.Config) (applied []string) {
	listener := r.operators.Load()
	if listener == nil || next.HTTP.Admin == nil {
		return nil
	}
	return (*listener).Reload(next.HTTP.Admin)
}

// Reloaded reports that the configuration was read again while the relay runs. applied contains the
// keys that apply now. waiting contains the keys that differ and wait for the next start. If err is
// not nil, nothing of the new configuration is used. Reloaded logs and counts the outcome and
// appends it to the audit log. Health does not depend on it, because the relay continues with a
// valid configuration.
func (r *Relay) Reloaded(applied, waiting []string, err error) {
	r.metrics.Reloaded(metrics.Settings, err == nil)
	kind := nodes.ConfigReloaded
	fields := bson.D{{Key: "applied", Value: applied}, {Key: "waiting", Value: waiting}}
	switch {
	case err != nil:
		reason := logging.Clean(err.Error())
		kind = nodes.ConfigRejected
		fields = bson.D{{Key: "reason", Value: reason}}
		r.log.Error("the new configuration is invalid; the relay continues with the old one, and would not start again",
			"error", reason, "fix", "fix it, check it with outrelay validate, and send SIGHUP again")

	case len(waiting) > 0:
		r.log.Warn("the configuration was read again; some changes apply only after the next start",
			"applied", applied, "waiting", waiting,
			"fix", fixByRestart(waiting))

	default:
		r.log.Info("the configuration was read again", "applied", applied)
	}

	r.member.LogEvent(context.Background(), kind, fields)
}

// fixByRestart returns the fix for keys that apply at the next start.
func fixByRestart(keys []string) string {
	fix := "restart this node: a standby takes over"
	if slices.Contains(keys, "mongodb.uri") {
		fix += "; until then, a changed login to MongoDB fails for each new connection"
	}
	return fix
}
