package main

import (
	"context"
	"errors"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/operators"
)

func newRunCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "run",
		Short: "Relay events until it is stopped; a second process of the same watcher stands by",
		Long: `Relay events from the watched outbox collections to Kafka until SIGTERM or Ctrl-C, which drains what is in flight,
writes the position and hands the watcher over. A second signal stops at once; the next owner reads back what was sent.

SIGHUP reads the configuration again: log.level counts at once, and what else has changed is named in the log and waits for the next
start. Renewed certificates need no signal.

Several processes may run with the same configuration: one works, the others take over when it stops or dies.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return p.relay(c.Context()) },
	}
}

func (p *program) relay(ctx context.Context) error {
	cfg, log, err := p.loadAndLog()
	if err != nil {
		return err
	}
	version := thisBuild().Version
	r, err := app.New(cfg, version, log, operators.Option())
	if err != nil {
		return err
	}
	limitMemory(p.env, int64(cfg.Limits.Memory))
	log.Info("outrelay starts", "version", version, "watcher", cfg.Watcher, "node", cfg.Node, "watch", cfg.Watch,
		"mongodb", cfg.MongoDB.URI, "kafka", cfg.Kafka.Brokers, "http", cfg.HTTP.Listen)
	defer (&reloader{program: p, running: cfg, told: r.Reloaded}).hangUps()()
	err = r.Run(ctx)
	if errors.Is(err, app.ErrOutdated) {
		return err // starting it again does not help
	}
	return temporary(err)
}

// heapGrowth is the garbage collector's percentage. The way of an event allocates next to nothing, so that half the usual
// room between two collections costs no time that could be measured, and gives some megabytes back.
const heapGrowth = 50

// limitMemory tells the garbage collector what the budget allows, as a backstop: half as much again for what is not
// envelopes; and has it keep the heap small. GOMEMLIMIT and GOGC in the environment win.
func limitMemory(env []string, budget int64) {
	if value(env, "GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(budget + budget/2)
	}
	if value(env, "GOGC") == "" {
		debug.SetGCPercent(heapGrowth)
	}
}
