package main

import (
	"context"
	"errors"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operators"
	"github.com/outrelay/outrelay/internal/process"
)

func newRunCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "run",
		Short: "Relay events until stopped; a second process of the same watcher is a standby",
		Long: `Relay events from the watched outbox collections to Kafka until SIGTERM or Ctrl-C. Then outrelay
waits for the acknowledgements of the records in flight, saves a checkpoint and releases the lease.
A second signal stops the process at once. The next owner then reads back the records that were
sent.

SIGHUP reloads the configuration. A new log.level and new tokens of http.admin apply at once. Other changed keys are logged and
apply at the next start. Renewed certificates need no signal.

Several processes may run with the same configuration. One is the owner; the others are standbys and
take over when the owner stops or dies.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return p.runRelay(c.Context()) },
	}
}

// runRelay relays events until ctx ends.
func (p *program) runRelay(ctx context.Context) error {
	cfg, log, err := p.loadWithLogger()
	if err != nil {
		return err
	}
	version := thisBuild().Version
	r, err := process.New(cfg, version, log, operators.Option())
	if err != nil {
		return err
	}

	limitMemory(p.env, int64(cfg.Limits.Memory))
	log.Info("outrelay starts", "version", version, "watcher", cfg.Watcher, "node", cfg.Node, "watch", cfg.Watch,
		"mongodb", cfg.MongoDB.URI, "kafka", cfg.Kafka.Brokers, "http", cfg.HTTP.Listen)

	stopReloads := (&reloader{program: p, running: cfg, apply: r.ApplyReload, onReload: r.Reloaded}).reloadOnHangup()
	defer stopReloads()
	err = r.Run(ctx)

	// An outdated version does not start at a later attempt either.
	if errors.Is(err, process.ErrOutdated) {
		return err
	}
	return markTemporary(err)
}

// heapGrowth is the percentage for the garbage collector (GOGC). The path of an event allocates almost
// nothing. Half of the usual growth between two collections therefore costs no measurable time and
// saves some megabytes.
const heapGrowth = 50

// limitMemory configures the garbage collector, unless GOMEMLIMIT and GOGC are set in env. The memory
// limit is a backstop: the budget for envelopes, and half as much again for everything else.
func limitMemory(env []string, budget int64) {
	if envValue(env, "GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(budget + budget/2)
	}
	if envValue(env, "GOGC") == "" {
		debug.SetGCPercent(heapGrowth)
	}
}
