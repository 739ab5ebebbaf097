package process

import (
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/internal/slots"
	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/readiness"
)

// The health of a process is that of its worst slot, and its report names the slot.
func TestN28_HealthIsThatOfAllSlots(t *testing.T) {
	t.Parallel()
	process := readiness.NewState(time.Second, time.Now, nil)
	r := &Relay{shared: &term.Shared{State: process, Balancer: new(slots.Balancer)}}
	for i := range 2 {
		r.slots = append(r.slots, &term.Runner{Slot: slot.Range{I: i, N: 2}, State: readiness.NewState(time.Second, time.Now, nil)})
	}

	process.SetPhase(readiness.PhaseStandby)
	h := r.processHealth()
	if ok, phase, _ := h.Ready(); ok || phase != string(readiness.PhaseStarting) {
		t.Errorf("ready %v as %s before its slots are", ok, phase)
	}

	r.slots[0].State.SetPhase(readiness.PhaseStandby)
	r.slots[1].State.SetPhase(readiness.PhaseOwner)
	if ok, phase, _ := h.Ready(); !ok || phase != string(readiness.PhaseOwner) {
		t.Errorf("ready %v as %s", ok, phase)
	}

	r.slots[0].State.SetFatalProblem("stream", "denied")
	if ok, _, why := h.Ready(); ok || len(why) != 1 || !strings.HasPrefix(why[0], "0of2: stream: denied (for ") {
		t.Errorf("ready %v: %q", ok, why)
	}

	r.slots[0].State.ClearProblems("stream")
	r.slots[0].State.SetPhase(readiness.PhaseHalted)
	if ok, phase, _ := h.Ready(); ok || phase != string(readiness.PhaseHalted) {
		t.Errorf("ready %v as %s with a slot that is halted", ok, phase)
	}
	if err := h.Live(); err != nil {
		t.Error(err)
	}

	r.slots[1].State.SetHung(true)
	if h.Live() == nil {
		t.Error("a slot hangs, and the process is live")
	}
}
