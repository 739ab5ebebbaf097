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
	"github.com/outrelay/outrelay/internal/store"
)

// ErrOutdated ends a relay at its start where a newer version did to the collections what this one would do harm with.
var ErrOutdated = errors.New("this version is too old for the state database")

// newMember is this process in the registry of nodes.
func (r *Relay) newMember(db *mongo.Database) *nodes.Member {
	watcher, compared := r.cfg.Watcher, configFingerprint(r.cfg)
	if !r.cfg.Is(config.RoleRelay) {
		watcher, compared = "", "" // it works for none
	}
	return nodes.New(nodes.Config{
		State: db, Node: r.cfg.Node, Address: r.cfg.Address, Version: r.version, Watcher: watcher,
		Roles: configuredRoles(r.cfg), Capabilities: listCapabilities(r.cfg), Schema: migrate.Schema(r.knownMigrations()), Fingerprint: compared, Log: r.log,
	})
}

// knownMigrations are the steps that this version knows.
func (r *Relay) knownMigrations() []migrate.Step {
	if r.steps != nil {
		return r.steps
	}
	return migrate.Steps()
}

// configuredRoles are what this process does by its configuration.
func configuredRoles(cfg config.Config) []nodes.Role {
	var out []nodes.Role
	for _, one := range []struct {
		role nodes.Role
		does bool
	}{
		{nodes.Relay, cfg.Is(config.RoleRelay)},
		{nodes.Cleaner, mayPurgeAsOwner(cfg)},
		{nodes.Admin, cfg.Is(config.RoleAdmin) && cfg.HTTP.Admin != nil},
	} {
		if one.does {
			out = append(out, one.role)
		}
	}
	return out
}

// mayPurgeAsOwner reports whether this process purges while it owns the watcher.
func mayPurgeAsOwner(cfg config.Config) bool {
	return cfg.Retention > 0 && cfg.Is(config.RoleRelay) && cfg.Is(config.RoleCleaner)
}

// listCapabilities tell operators in what this process could differ from others of its watcher.
func listCapabilities(cfg config.Config) []string {
	return []string{"preset:" + cfg.Record.Preset, "recording:" + cfg.Recording, "delivery:" + cfg.Kafka.Delivery, "compression:" + cfg.Kafka.Compression}
}

// configFingerprint is of what must be the same on all nodes of a watcher: which envelopes go where, in which shape, and what
// becomes of them. Nothing can be read out of it.
func configFingerprint(cfg config.Config) string {
	text, err := json.Marshal([]any{
		cfg.Watch, cfg.Topics, cfg.Record, cfg.Recording, cfg.Retention, cfg.Purge, cfg.DeadLetters, cfg.Retry,
		cfg.LostHistory, cfg.Invalidate, cfg.Expired,
	})
	if err != nil {
		return "" // nothing is compared
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// vitalSigns is what this process tells of itself now.
func (r *Relay) vitalSigns() nodes.Vital {
	v := nodes.Vital{KafkaReachable: r.kafkaReachable.Load(), SinceAck: -1, Slots: r.cfg.Slots}
	if at := r.lastAck.Load(); at > 0 {
		v.SinceAck = time.Since(time.Unix(0, at))
	}
	for _, t := range r.activeTerms() {
		v.Holds = append(v.Holds, t.part.ID(r.cfg.Watcher))
	}
	return v
}

// waitWithoutWatcher is own for a process without the role of a relay: it never seeks the lease.
func (r *Relay) waitWithoutWatcher(stop context.Context) error {
	r.state.setRole(RoleAdmin)
	<-stop.Done()
	return nil
}

// checkOtherNodes notes what became of other nodes. It may fail as often as it likes: the next look finds the same.
func (r *Relay) checkOtherNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	if err := r.member.Look(ctx); err != nil && ctx.Err() == nil {
		r.log.Debug("other nodes cannot be looked at", "reason", err)
	}
}

// waitForUpgrade returns when this version may work with the collections as they are: an older one than they were made for never
// may, and one that is to migrate them waits until all live nodes bear it. What cannot be read guards nothing here: each
// take-over looks again.
func (r *Relay) waitForUpgrade(stop context.Context) error {
	told := ""
	for {
		err := r.mayStart(stop)
		switch {
		case errors.Is(err, migrate.ErrNewer):
			r.member.Note(stop, store.Halted, bson.D{{Key: "reason", Value: err.Error()}})
			return fmt.Errorf("%w: %w", ErrOutdated, err)
		case told != "" && errors.Is(err, errStateUnavailable) && stop.Err() == nil:
			// The last answer was that older nodes live. Not to have heard otherwise is no leave to go on beside them.
			r.log.Debug("whether older nodes still live is not known", "reason", err)
		case !errors.Is(err, nodes.ErrOlder):
			if err != nil && stop.Err() == nil {
				r.log.Debug("whether this version may start is not known", "reason", err)
			}
			if told != "" && err == nil {
				r.log.Info("the migration is done; this node stands by for the lease")
				r.member.Note(stop, store.UpgradeGoesOn, nil)
			}
			return nil
		}
		if text := err.Error(); text != told && !errors.Is(err, errStateUnavailable) {
			told = text
			r.state.setRole(RoleUpgrade)
			r.log.Warn(text)
			r.member.Note(stop, store.UpgradeWaits, bson.D{{Key: "reason", Value: text}})
		}
		if retry.Sleep(stop, beatEvery) != nil {
			return nil
		}
	}
}

// mayStart lists this process, reads the ledger after that, and takes the steps that older versions could not bear.
func (r *Relay) mayStart(stop context.Context) error {
	ctx, cancel := context.WithTimeout(stop, schemaTimeout)
	defer cancel()
	if err := r.member.Beat(ctx, r.vitalSigns()); err != nil {
		return fmt.Errorf("%w: %w", errStateUnavailable, err)
	}
	m := r.newMigrator(Outboxes(r.cfg, r.mongo.state))
	pending, err := m.Guard(ctx)
	if err != nil && !errors.Is(err, migrate.ErrNewer) {
		return fmt.Errorf("%w: %w", errStateUnavailable, err)
	}
	if err != nil || len(pending) == 0 || !r.cfg.MongoDB.Indexes {
		return err
	}
	if _, err = m.Up(stop); err == nil || errors.Is(err, nodes.ErrOlder) || errors.Is(err, migrate.ErrNewer) {
		return err
	}
	// Did a migration fail, or was it not heard whether there are older nodes?
	ask, stopAsking := context.WithTimeout(stop, schemaTimeout)
	defer stopAsking()
	for _, s := range pending {
		if e := m.Ready(ask, s); e != nil && !errors.Is(e, nodes.ErrOlder) {
			return fmt.Errorf("%w: %w", errStateUnavailable, e)
		} else if e != nil {
			return e
		}
	}
	return err
}

// errStateUnavailable is that the list of nodes or the ledger of migrations did not answer.
var errStateUnavailable = errors.New("the state database does not answer")

// announceParked writes into the events log which topics are held back since the last look, and which flow again.
func (t *term) announceParked(blocked []Blocked) {
	now := map[string]Blocked{}
	for _, b := range blocked {
		if b.Parked {
			now[b.Topic] = b
		}
	}
	for topic, b := range now {
		if !t.parkedTopics[topic] {
			t.runInBackground(func(ctx context.Context) {
				t.appendEvent(ctx, store.TopicParked, bson.D{{Key: "topic", Value: topic}, {Key: "reason", Value: b.Reason}})
			})
		}
	}
	for topic := range t.parkedTopics {
		if _, still := now[topic]; !still {
			t.runInBackground(func(ctx context.Context) {
				t.appendEvent(ctx, store.TopicFlows, bson.D{{Key: "topic", Value: topic}})
			})
		}
	}
	t.parkedTopics = map[string]bool{}
	for topic := range now {
		t.parkedTopics[topic] = true
	}
}

// announcePinLapsed writes into the events log that this owner disregards a pin, once for each time that the pinned node falls silent.
func (t *term) announcePinLapsed() {
	pin := t.held.Lapsed()
	if pin == t.lapsedPin {
		return
	}
	if t.lapsedPin = pin; pin == "" {
		return // the node lives, or nothing is pinned any more, which has an entry of its own
	}
	t.runInBackground(func(ctx context.Context) {
		t.appendEvent(ctx, store.PinLapsed, bson.D{{Key: "pinned_to", Value: pin}, {Key: "reason", Value: "that node gives no sign of life"}})
	})
}

// announceReleased writes into the events log that the lease was given back, and why the term ended.
func (t *term) announceReleased(work context.Context, why error) {
	reason := "the process stops"
	if why != nil {
		reason = why.Error()
	}
	t.appendEvent(context.WithoutCancel(work), store.Released, bson.D{{Key: "reason", Value: reason}})
}

// announceLeaseLost writes into the events log that the lease went to somebody else, or ran out.
func (r *runner) announceLeaseLost(stop context.Context, why error) {
	ctx, cancel := context.WithTimeout(stop, beatEvery)
	defer cancel()
	if err := r.events.Append(ctx, store.LeaseLost, bson.D{{Key: "reason", Value: why.Error()}}); err != nil && stop.Err() == nil {
		r.log.Warn("an entry of the events log is lost", "kind", string(store.LeaseLost), "reason", err)
	}
}
