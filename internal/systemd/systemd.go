// Package systemd tells a service manager how the process does: ready, stopping, a line of status, and a sign of life for
// its watchdog that stops when a loop of the process hangs.
//
// Where no manager asked for it (NOTIFY_SOCKET is not set), everything here does nothing and costs nothing. Nothing blocks:
// a message is one datagram. Messages go out in the order of the calls.
package systemd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/outrelay/outrelay/internal/logging"
)

// Probe is what the process knows about itself; its methods must not block.
type Probe interface {
	// Live is nil while every loop of the process moves.
	Live() error
	// Ready tells the role ("starting" until the process has one) and what is wrong.
	Ready() (ok bool, role string, reasons []string)
}

const (
	// statusEvery is how often the status is compared with what was told.
	statusEvery = time.Second
	starting    = "starting"
	maxStatus   = 400 // of a line that people read
	silentLimit = 5   // looks, until it is said: after a suspend every loop seems to have been silent
)

// Supervisor tells the service manager of one process.
type Supervisor struct {
	probe         Probe
	name          string
	log           *slog.Logger
	watchdogEvery time.Duration // between signs of life; 0 if no watchdog asks for them
	checkEvery    time.Duration
	readySent     bool
	silentChecks  int // looks in a row at which the process did not live
	lastLine      string
	lastSign      time.Time
}

// New makes a Supervisor of what is called name. It is nil, which is fine to run, if no service manager listens.
func New(name string, probe Probe, log *slog.Logger) *Supervisor {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return nil
	}
	s := &Supervisor{probe: probe, name: name, log: log, checkEvery: statusEvery}
	window, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("WATCHDOG_USEC cannot be read; the watchdog gets no sign of life", "reason", err)
	}
	s.watchdogEvery = window / 3 // one that is late is no reason to be killed
	if s.watchdogEvery > 0 {
		s.checkEvery = min(s.checkEvery, s.watchdogEvery)
	}
	return s
}

// Run tells the manager what changes until work ends; when stop ends, that the process stops. On a nil Supervisor it
// returns at once.
func (s *Supervisor) Run(stop, work context.Context) error {
	if s == nil {
		return nil
	}
	tick := time.NewTicker(s.checkEvery)
	defer tick.Stop()
	stopping := stop.Done()
	for {
		s.reportChanges(time.Now())
		select {
		case <-work.Done():
			s.sendMessage(daemon.SdNotifyStopping)
			return nil
		case <-stopping:
			stopping = nil
			s.sendMessage(daemon.SdNotifyStopping)
		case <-tick.C:
		}
	}
}

// reportChanges looks at the process and tells what is new.
func (s *Supervisor) reportChanges(now time.Time) {
	_, role, reasons := s.probe.Ready()
	if !s.readySent && role != starting {
		s.readySent = true
		s.sendMessage(daemon.SdNotifyReady)
	}
	if line := s.statusLine(role, reasons); line != s.lastLine {
		s.lastLine = line
		s.sendMessage("STATUS=" + line)
	}
	err := s.probe.Live()
	if s.watchdogEvery > 0 && err == nil && now.Sub(s.lastSign) >= s.watchdogEvery {
		s.lastSign = now
		s.sendMessage(daemon.SdNotifyWatchdog)
	}
	if s.silentChecks++; err == nil {
		s.silentChecks = 0
	}
	if s.silentChecks == silentLimit && s.watchdogEvery > 0 {
		s.log.Error("the watchdog gets no sign of life any more: the service manager will restart this process", "reason", err)
	}
}

// statusLine is the status for people, without what changes at every look.
func (s *Supervisor) statusLine(role string, reasons []string) string {
	text := "well"
	if len(reasons) > 0 {
		parts := make([]string, len(reasons))
		for i, r := range reasons {
			parts[i], _, _ = strings.Cut(r, " (for ")
		}
		text = strings.Join(parts, "; ")
	}
	text = logging.Clean(strings.ReplaceAll(fmt.Sprintf("%s of watcher %s: %s", role, s.name, text), "\n", " "))
	if len(text) > maxStatus {
		text = strings.ToValidUTF8(text[:maxStatus], "") + "…"
	}
	return text
}

func (s *Supervisor) sendMessage(message string) {
	if _, err := daemon.SdNotify(false, message); err != nil {
		s.log.Debug("the service manager could not be told", "message", message, "reason", err)
	}
}
