package main

import (
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/logging"
)

// reloader reads the configuration again while a relay runs. The log's level counts at once, and certificates are looked at for
// each new connection whether it is asked to or not. Everything else decides what is sent where, or how much of the machine is
// used, and must not change between two events: it is named in the log, and waits for the next start. A configuration with a
// mistake changes nothing.
type reloader struct {
	*program
	running  config.Config // what the relay was started with
	onReload func(applied, waiting []string, err error)
}

// reloadOnHangup calls again for each SIGHUP until stop is called, which waits for the last one.
func (l *reloader) reloadOnHangup() (stop func()) {
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

// levelKey is the one key that counts at once.
const levelKey = "log.level"

// reload reads and applies.
func (l *reloader) reload() {
	next, _, err := l.loadConfig()
	if err != nil {
		l.onReload(nil, nil, err)
		return
	}
	next.Node = l.running.Node // made up at each reading where it is not set
	var applied, waiting []string
	for _, key := range config.Differing(l.running, next) {
		if key != levelKey {
			waiting = append(waiting, key)
		}
	}
	if level, err := logging.ParseLevel(next.Log.Level); err == nil && level != l.level.Level() {
		l.level.Set(level)
		applied = []string{levelKey + "=" + strings.ToLower(level.String())}
	}
	l.onReload(applied, waiting, nil)
}
