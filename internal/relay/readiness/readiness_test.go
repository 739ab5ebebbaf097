package readiness

import (
	"strings"
	"testing"
	"time"
)

func TestReadiness(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	s := NewState(30*time.Second, func() time.Time { return now }, nil)
	if ok, _, _ := s.Ready(); ok {
		t.Fatal("ready before it is owner or standby")
	}

	s.SetPhase(PhaseStandby)
	if ok, phase, _ := s.Ready(); !ok || phase != "standby" {
		t.Fatalf("a standby is ready, got %v %q", ok, phase)
	}

	const text = "no response from mongodb://u:p@h/"
	if !s.SetProblem("kafka", text) || s.SetProblem("kafka", text) {
		t.Fatal("a problem is news once")
	}

	ok, _, reasons := s.Ready()
	if !ok || len(reasons) != 1 || reasons[0] != "kafka: no response from mongodb://***@h/ (for 0s)" {
		t.Fatalf("%v %q: want a ready process, because the problem is young, and a masked login", ok, reasons)
	}

	now = now.Add(31 * time.Second)
	if ok, _, _ := s.Ready(); ok {
		t.Fatal("a problem older than the readiness time leaves the process ready")
	}

	s.ClearProblems("kafka")
	s.SetObjectProblem("purge", "shop.outbox", "x")
	s.SetObjectProblem("purge", "shop.other", "x")
	now = now.Add(31 * time.Second)
	if ok, _, reasons := s.Ready(); !ok || len(reasons) > 0 || len(s.Problems()) != 2 {
		t.Fatalf("%v %q %v: want a ready process with a problem of each object", ok, reasons, s.Problems())
	}
	if s.ClearProblems("purge"); len(s.Problems()) > 0 {
		t.Fatalf("the problems of objects remain: %v", s.Problems())
	}
	s.SetFatalProblem("halted", "x")
	if ok, _, _ := s.Ready(); ok {
		t.Fatal("what needs a person is not ready at once")
	}
	if s.Live() != nil {
		t.Fatal("not live without a stage that hangs")
	}

	s.SetHung(true)
	if s.Live() == nil {
		t.Fatal("live with a stage that hangs")
	}

	s.SetHung(false)
	if s.Live() != nil {
		t.Fatal("a new term does not take the hang back")
	}
}

// TestALoopThatHangsIsNotAlive: probes and the service manager's watchdog both go by it.
func TestALoopThatHangsIsNotAlive(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	s := NewState(30*time.Second, func() time.Time { return now }, nil)
	s.RecordPulse("heartbeat")
	s.RecordPulse("monitor")
	now = now.Add(hungAfter)
	s.RecordPulse("heartbeat")
	if err := s.Live(); err != nil {
		t.Errorf("within its time: %v", err)
	}

	now = now.Add(time.Second)
	if err := s.Live(); err == nil || !strings.Contains(err.Error(), "monitor") {
		t.Errorf("the monitor is silent: %v", err)
	}

	s.EndPulse("monitor") // its term has ended
	if err := s.Live(); err != nil {
		t.Errorf("a loop that has ended: %v", err)
	}

	s.SetHung(true)
	if s.Live() == nil {
		t.Error("a stage that hangs is alive")
	}
}
