package main

import (
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// reloader reads the configuration again while a relay runs. Only the log level and the tokens of the operators apply at once. All
// other keys decide where records go or how many resources are used, and must not change between two
// events. The log names them, and they apply at the next start. An invalid configuration changes
// nothing. Certificates need no reload: each new connection reads them.
type reloader struct {
	*program
	running  config.Config                               // the configuration that the relay was started with
	apply    func(next config.Config) (applied []string) // applies the changes that need no restart; nil applies nothing
	onReload func(applied, waiting []string, err error)
}

// reloadOnHangup calls reload for each SIGHUP until stop is called. stop waits for a reload in progress.
func (l *reloader) reloadOnHangup() (stop func()) {
	// A buffer of one is enough: a second signal during a reload leads to one more reload.
	received, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(received, syscall.SIGHUP)

	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-received:
				l.reload()
			case <-done:
				return
			}
		}
	})

	return func() {
		signal.Stop(received)
		close(done)
		wg.Wait()
	}
}

const levelKey = "log.level"

// reload reads the configuration, applies the log level and reports the keys that apply at the next start.
func (l *reloader) reload() {
	next, _, err := l.loadConfig()
	if err != nil {
		l.onReload(nil, nil, err)
		return
	}

	// If node is not set, each load generates another name. That is not a change.
	next.Node = l.running.Node

	var applied, waiting []string
	if l.apply != nil {
		applied = l.apply(next)
	}
	// Tokens are applied above, or have not changed, and the level is applied below.
	for _, key := range config.DifferingKeys(l.running, next) {
		if config.AppliesWhen(key) != config.AppliesOnSignal {
			waiting = append(waiting, key)
		}
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(next.Log.Level)); err == nil && level != l.level.Level() {
		l.level.Set(level)
		applied = append(applied, levelKey+"="+strings.ToLower(level.String()))
	}
	l.onReload(applied, waiting, nil)
}
