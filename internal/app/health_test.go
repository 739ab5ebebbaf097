package app

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/slots"
)

// The process is as well as its slots are, and tells which one is not.
func TestN28_HealthIsThatOfAllSlots(t *testing.T) {
	t.Parallel()
	process := newState(time.Second, time.Now, nil)
	r := &Relay{shared: &shared{state: process, balancer: new(slots.Balancer)}}
	for i := range 2 {
		r.slots = append(r.slots, &runner{part: slot.Range{I: i, N: 2}, state: newState(time.Second, time.Now, nil)})
	}
	process.setRole(RoleStandby)
	h := r.processHealth()
	if ok, role, _ := h.Ready(); ok || role != string(RoleStarting) {
		t.Errorf("ready %v as %s before its slots are", ok, role)
	}
	r.slots[0].state.setRole(RoleStandby)
	r.slots[1].state.setRole(RoleOwner)
	if ok, role, _ := h.Ready(); !ok || role != string(RoleOwner) {
		t.Errorf("ready %v as %s", ok, role)
	}
	r.slots[0].state.setProblem("stream", "denied", true)
	if ok, _, why := h.Ready(); ok || len(why) != 1 || !strings.HasPrefix(why[0], "0of2: stream: denied (for ") {
		t.Errorf("ready %v: %q", ok, why)
	}
	r.slots[0].state.clearProblems("stream")
	r.slots[0].state.setRole(RoleHalted)
	if ok, role, _ := h.Ready(); ok || role != string(RoleHalted) {
		t.Errorf("ready %v as %s with a slot that is halted", ok, role)
	}
	if err := h.Live(); err != nil {
		t.Error(err)
	}
	r.slots[1].state.setHung()
	if err := h.Live(); err == nil || errors.Is(err, errStepDown) {
		t.Errorf("a slot hangs: %v", err)
	}
}
