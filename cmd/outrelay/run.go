package main

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/doctor"
	"github.com/outrelay/outrelay/internal/operate/operators"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

func newRunCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use:   "run",
		Short: "Relay events until stopped; a second process of the same watcher is a standby",
		Long: `Relay events from the watched outbox collections to Kafka until SIGTERM or Ctrl-C. Then outrelay
waits for the acknowledgements of the records in flight, saves a checkpoint and releases the lease.
A second signal, at least a second after the first, stops the process at once. The next owner then
reads back the records that were sent.

SIGHUP reloads the configuration. A new log.level and new tokens of http.admin apply at once. Other changed keys are logged and
apply at the next start. Renewed certificates need no signal.

If the configuration cannot work, for example because of a wrong password, a missing right or a server
without a replica set, the command exits with 1. If MongoDB cannot be reached for 30 seconds at the start, it exits with 75.
If only Kafka is away, it starts and waits for Kafka, as it does when Kafka fails later: /readyz and
status name the reason. Once it runs, it waits until the servers are back, however long that takes.

Several processes may run with the same configuration. One is the owner; the others are standbys and
take over when the owner stops or dies.`,
		Args:        noArgs,
		Annotations: map[string]string{annotationNoContext: "run"},
		RunE:        func(cmd *cobra.Command, _ []string) error { return program.runRelay(cmd.Context()) },
	}
}

// runRelay relays events until ctx ends.
func (p *program) runRelay(ctx context.Context) error {
	cfg, log, err := p.loadWithLogger()
	if err != nil {
		return err
	}
	// Errors that cannot be temporary end the process here, before it takes part in the ownership of slots.
	if err := reachServers(ctx, cfg, log, startPatience); err != nil || ctx.Err() != nil {
		return err
	}
	version := thisBuild().Version
	relay, err := process.New(cfg, version, log, operators.Option())
	if err != nil {
		return err
	}

	limitMemory(p.env, int64(cfg.Limits.Memory))
	log.Info("outrelay starts", "version", version, "watcher", cfg.Watcher, "node", cfg.Node, "watch", cfg.Watch,
		"mongodb", cfg.MongoDB.URI, "kafka", cfg.Kafka.Brokers, "http", cfg.HTTP.Listen,
		"preset", cfg.Record.Preset, "lease", cfg.Lease.TTL, "slots", cfg.Slots, "tasks", cfg.Tasks, "recording", cfg.Recording,
		"retention", cfg.Retention, "state", cfg.State.Pattern())

	stopReloads := (&reloader{program: p, running: cfg, apply: relay.ApplyReload, onReload: relay.Reloaded}).reloadOnHangup()
	defer stopReloads()
	err = relay.Run(ctx)

	// A state database of others or a missing privilege is the same at a later attempt.
	if _, rejected := errors.AsType[*mongodb.PrivilegeError](err); rejected || errors.Is(err, state.ErrUnusable) || errors.Is(err, outboxes.ErrUnwatchable) {
		return err
	}
	return markTemporary(err)
}

const (
	// startPatience bounds the time for which run waits for MongoDB at its start.
	startPatience = 30 * time.Second

	startRetry = time.Second
)

// reachServers waits until MongoDB accepts the connections of the relay, and makes one attempt with Kafka. It returns an error at
// once if a later attempt cannot succeed, and a temporary error if MongoDB is away for longer than patience. It returns nil if ctx
// ends.
func reachServers(ctx context.Context, cfg config.Config, log *slog.Logger, patience time.Duration) error {
	reach := doctor.Reach
	// A process that only migrates has no use for Kafka.
	if !cfg.HasTask(config.TaskRelay) {
		reach = doctor.ReachMongo
	}

	began, last := time.Now(), ""
	for {
		err := reach(ctx, cfg)
		if err == nil || ctx.Err() != nil {
			return nil
		}
		if doctor.ReasonOf(err).Lasting {
			return err
		}

		// A supervisor starts a process that ends here with growing delays, so that events would wait for minutes after an outage of
		// Kafka. The running relay notices at once that Kafka is back.
		if doctor.ReasonOf(err).Server == doctor.Kafka {
			log.Warn("Kafka is away; outrelay starts and waits for it", "error", err)
			return nil
		}
		if time.Since(began) >= patience {
			return markTemporary(err)
		}

		// A reason that stays the same is logged once.
		if err.Error() != last {
			last = err.Error()
			log.Warn("waiting for MongoDB", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(startRetry):
		}
	}
}

// limitMemory sets the memory limit of the garbage collector, unless GOMEMLIMIT is set in env. It is a backstop: the budget for
// envelopes, and half as much again for everything else.
func limitMemory(env []string, budget int64) {
	if envValue(env, "GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(budget + budget/2)
	}
}
