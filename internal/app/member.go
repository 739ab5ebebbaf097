package app

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/retry"
)

// ErrOutdated is returned at the start of a relay if a newer version has migrated the collections,
// and this version would damage them.
var ErrOutdated = errors.New("this version is too old for the state database")

// newMember returns this process as a member of the registry of nodes.
func (r *Relay) newMember(db *mongo.Database) *nodes.Member {
	// A process without the role of a relay works for no watcher.
	watcher, compared := r.cfg.Watcher, configFingerprint(r.cfg)
	if !r.cfg.HasRole(config.RoleRelay) {
		watcher, compared = "", ""
	}

	return nodes.New(nodes.Config{
		State:        db,
		Node:         r.cfg.Node,
		Address:      r.cfg.Address,
		Version:      r.shared.version,
		Watcher:      watcher,
		Roles:        configuredRoles(r.cfg),
		Capabilities: listCapabilities(r.cfg),
		Schema:       migrate.LastStep(r.shared.steps),
		Fingerprint:  compared,
		Log:          r.log,
	})
}

// configuredRoles returns the roles that the configuration gives to this process.
func configuredRoles(cfg config.Config) []nodes.Role {
	var out []nodes.Role
	if cfg.HasRole(config.RoleRelay) {
		out = append(out, nodes.Relay)
	}
	if mayPurgeAsOwner(cfg) {
		out = append(out, nodes.Cleaner)
	}
	if cfg.HasRole(config.RoleAdmin) && cfg.HTTP.Admin != nil {
		out = append(out, nodes.Admin)
	}
	return out
}

// listCapabilities returns the settings in which operators may see processes of a watcher differ.
func listCapabilities(cfg config.Config) []string {
	return []string{
		"preset:" + cfg.Record.Preset,
		"recording:" + cfg.Recording,
		"delivery:" + cfg.Kafka.Delivery,
		"compression:" + cfg.Kafka.Compression,
	}
}

// configFingerprint returns a hash of the settings that must be equal on all nodes of a watcher:
// which envelopes are sent where and in which form, and what happens to them. The settings cannot
// be derived from it. An empty fingerprint is not compared.
func configFingerprint(cfg config.Config) string {
	text, err := json.Marshal([]any{
		cfg.Watch, cfg.Topics, cfg.Record, cfg.Recording, cfg.Retention, cfg.Purge, cfg.DeadLetters, cfg.Retry,
		cfg.LostHistory, cfg.Invalidate, cfg.Expired,
	})
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// vitalSigns returns the content of the next heartbeat.
func (r *Relay) vitalSigns() nodes.Vitals {
	v := nodes.Vitals{KafkaReachable: r.shared.kafkaReachable.Load(), SinceAck: -1, Slots: r.cfg.Slots}
	if at := r.shared.lastAck.Load(); at > 0 {
		v.SinceAck = time.Since(time.Unix(0, at))
	}
	for _, one := range r.activeSlots() {
		v.Holds = append(v.Holds, one.part.ID(r.cfg.Watcher))
	}
	return v
}

// waitWithoutWatcher blocks until stop ends. It replaces ownSlots in a process without the role of
// a relay, which never acquires the lease.
func (r *Relay) waitWithoutWatcher(stop context.Context) error {
	r.shared.state.setRole(RoleAdmin)
	<-stop.Done()
	return nil
}

// checkOtherNodes records changes of other nodes. After a failure, the next check finds the same
// changes.
func (r *Relay) checkOtherNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	if err := r.member.CheckPeers(ctx); err != nil && ctx.Err() == nil {
		r.log.Debug("cannot check the other nodes", "reason", err)
	}
}

// waitForUpgrade blocks until this version may work with the collections, or stop ends. It returns
// ErrOutdated if the collections were made for a newer version. If this version has to migrate
// them, it waits until all live nodes support the migration. If the state database cannot be read,
// it does not wait: each takeover checks again.
func (r *Relay) waitForUpgrade(stop context.Context) error {
	reported := ""
	for {
		err := r.mayStart(stop)
		switch {
		case errors.Is(err, migrate.ErrNewer):
			r.member.LogEvent(stop, nodes.Halted, bson.D{{Key: "reason", Value: err.Error()}})
			return fmt.Errorf("%w: %w", ErrOutdated, err)

		case reported != "" && errors.Is(err, errStateUnavailable) && stop.Err() == nil:
			// The last check found older nodes. A check that fails does not prove that they have
			// ended.
			r.log.Debug("cannot check whether older nodes are alive", "reason", err)

		case !errors.Is(err, nodes.ErrOlderNodes):
			if err != nil && stop.Err() == nil {
				r.log.Debug("cannot check whether this version may start", "reason", err)
			}
			if reported != "" && err == nil {
				r.log.Info("the migration is done; this node stands by for the lease")
				r.member.LogEvent(stop, nodes.UpgradeGoesOn, nil)
			}
			return nil
		}

		if text := err.Error(); text != reported && !errors.Is(err, errStateUnavailable) {
			reported = text
			r.shared.state.setRole(RoleUpgrade)
			r.log.Warn(text)
			r.member.LogEvent(stop, nodes.UpgradeWaits, bson.D{{Key: "reason", Value: text}})
		}
		if retry.Sleep(stop, beatEvery) != nil {
			return nil
		}
	}
}

// mayStart lists this process, then reads the ledger of migrations, and runs the migrations that
// older versions do not support. It returns nodes.ErrOlderNodes while older nodes are alive,
// migrate.ErrNewer if this version is too old, and errStateUnavailable if that cannot be
// determined.
func (r *Relay) mayStart(stop context.Context) error {
	ctx, cancel := context.WithTimeout(stop, schemaTimeout)
	defer cancel()
	if err := r.member.SendHeartbeat(ctx, r.vitalSigns()); err != nil {
		return fmt.Errorf("%w: %w", errStateUnavailable, err)
	}

	m := r.shared.newMigrator(Outboxes(r.cfg, r.shared.mongo.state))
	pending, err := m.PendingBreaking(ctx)
	if err != nil && !errors.Is(err, migrate.ErrNewer) {
		return fmt.Errorf("%w: %w", errStateUnavailable, err)
	}
	if err != nil || len(pending) == 0 || !r.cfg.MongoDB.Indexes {
		return err
	}

	_, err = m.Up(stop)
	if err == nil || errors.Is(err, nodes.ErrOlderNodes) || errors.Is(err, migrate.ErrNewer) {
		return err
	}

	// Either a migration failed, or the list of nodes could not be read.
	check, stopCheck := context.WithTimeout(stop, schemaTimeout)
	defer stopCheck()
	for _, s := range pending {
		e := m.CheckStep(check, s)
		if e != nil && !errors.Is(e, nodes.ErrOlderNodes) {
			return fmt.Errorf("%w: %w", errStateUnavailable, e)
		}
		if e != nil {
			return e
		}
	}
	return err
}

// errStateUnavailable is returned if the list of nodes or the ledger of migrations cannot be read.
var errStateUnavailable = errors.New("the state database does not answer")
