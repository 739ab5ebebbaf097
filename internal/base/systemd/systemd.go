// Package systemd reports the state of the process to a service manager: ready, stopping, a status line, and
// watchdog messages, which stop when a loop of the process hangs.
//
// If no service manager listens (NOTIFY_SOCKET is not set), the package does nothing and costs nothing.
// Nothing blocks: a message is one datagram. Messages are sent in the order of the calls.
package systemd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/outrelay/outrelay/internal/base/logging"
)

// Probe returns the state of the process. Its methods must not block.
type Probe interface {
	// Live returns nil while every loop of the process makes progress.
	Live() error
	// Ready returns the phase and the current problems. The phase is "starting" until the process has one.
	Ready() (ok bool, phase string, reasons []string)
}

const (
	// statusEvery is how often the status is compared with the last one that was sent.
	statusEvery = time.Second
	starting    = "starting"
	maxStatus   = 400 // bytes of the status line

	// silentLimit is after how many failed checks in a row the hang is logged. After a suspend of the
	// machine, every loop seems to hang for a moment.
	silentLimit = 5
)

// Supervisor reports the state of one process to the service manager.
type Supervisor struct {
	probe         Probe
	name          string
	log           *slog.Logger
	watchdogEvery time.Duration // between watchdog messages; 0 without a watchdog
	checkEvery    time.Duration
	readySent     bool
	silentChecks  int // failed checks in a row
	lastLine      string
	lastSign      time.Time
}

// New returns a Supervisor for the named watcher. If no service manager listens, it returns nil, and Run of
// a nil Supervisor is valid.
func New(name string, probe Probe, log *slog.Logger) *Supervisor {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return nil
	}

	supervisor := &Supervisor{probe: probe, name: name, log: log, checkEvery: statusEvery}
	window, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("cannot read WATCHDOG_USEC; no watchdog messages are sent", "error", err)
	}

	// A third of the window, so that one late message does not get the process killed.
	supervisor.watchdogEvery = window / 3
	if supervisor.watchdogEvery > 0 {
		supervisor.checkEvery = min(supervisor.checkEvery, supervisor.watchdogEvery)
	}
	return supervisor
}

// Run reports changes until work ends. When stop ends, it reports that the process is stopping. On a nil
// Supervisor it returns at once.
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
			// It stays closed, and would be selected in each round.
			stopping = nil
			s.sendMessage(daemon.SdNotifyStopping)
		case <-tick.C:
		}
	}
}

// reportChanges checks the process and sends the messages that are due.
func (s *Supervisor) reportChanges(now time.Time) {
	_, phase, reasons := s.probe.Ready()
	// A standby is ready as well: the service manager may start the services that depend on it.
	if !s.readySent && phase != starting {
		s.readySent = true
		s.sendMessage(daemon.SdNotifyReady)
	}
	if line := s.statusLine(phase, reasons); line != s.lastLine {
		s.lastLine = line
		s.sendMessage("STATUS=" + line)
	}

	err := s.probe.Live()
	if err == nil {
		s.silentChecks = 0
		if s.watchdogEvery > 0 && now.Sub(s.lastSign) >= s.watchdogEvery {
			s.lastSign = now
			s.sendMessage(daemon.SdNotifyWatchdog)
		}
		return
	}

	s.silentChecks++
	if s.silentChecks == silentLimit && s.watchdogEvery > 0 {
		s.log.Error("process does not respond; no watchdog messages are sent, so the service manager will restart it",
			"error", err)
	}
}

// statusLine returns the status for people. It leaves out durations, which change at every check.
func (s *Supervisor) statusLine(phase string, reasons []string) string {
	text := "well"
	if len(reasons) > 0 {
		parts := make([]string, len(reasons))
		for i, r := range reasons {
			parts[i], _, _ = strings.Cut(r, " (for ")
		}
		text = strings.Join(parts, "; ")
	}

	line := strings.ReplaceAll(fmt.Sprintf("%s of watcher %s: %s", phase, s.name, text), "\n", " ")
	line = logging.Clean(line)
	if len(line) > maxStatus {
		line = strings.ToValidUTF8(line[:maxStatus], "") + "…"
	}
	return line
}

func (s *Supervisor) sendMessage(message string) {
	if _, err := daemon.SdNotify(false, message); err != nil {
		s.log.Debug("cannot send a message to the service manager", "message", message, "error", err)
	}
}
