package app

import (
	"slices"

	rules "github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/probes"
)

// slotHealth is the health of a process with several slots. The process is ready if all its slots
// are. A slot that another node owns is ready here as a standby.
type slotHealth struct {
	process *state
	slots   []*runner
}

// processHealth returns the health of the process: its own state, or its state together with the
// states of its slots.
func (r *Relay) processHealth() probes.Health {
	if r.shared.balancer == nil {
		return r.shared.state
	}
	return &slotHealth{r.shared.state, r.slots}
}

// Live implements probes.Health.
func (h *slotHealth) Live() error {
	if err := h.process.Live(); err != nil {
		return err
	}
	for _, s := range h.slots {
		if err := s.state.Live(); err != nil {
			return err
		}
	}
	return nil
}

// rolesByRank contains the roles of slots. The first role that any slot has is the role of the
// process.
var rolesByRank = []Role{RoleHalted, RoleOwner, RoleTakeOver, RoleStopping, RoleStandby, RoleStarting}

// Report implements probes.Health.
func (h *slotHealth) Report() *rules.Report { return h.process.Report() }

// Ready implements probes.Health.
func (h *slotHealth) Ready() (ok bool, role string, reasons []string) {
	ok, role, reasons = h.process.Ready()

	// No slot has begun.
	if role == string(RoleUpgrade) {
		return ok, role, reasons
	}

	had := map[string]bool{}
	for _, s := range h.slots {
		slotOK, slotRole, slotReasons := s.state.Ready()
		ok = ok && slotOK
		had[slotRole] = true
		for _, text := range slotReasons {
			reasons = append(reasons, s.part.String()+": "+text)
		}
	}

	at := slices.IndexFunc(rolesByRank, func(r Role) bool { return had[string(r)] })
	return ok, string(rolesByRank[max(at, 0)]), reasons
}
