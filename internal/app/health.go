package app

import (
	"slices"

	rules "github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/probes"
)

// slotHealth is what the process says of itself: its own, or, where it runs slots, that and theirs together. It is ready if all of
// them are: one that another node runs is one that it stands by for.
type slotHealth struct {
	process *state
	slots   []*runner
}

func (r *Relay) health() probes.Health {
	if r.balance == nil {
		return r.state
	}
	return &slotHealth{r.state, r.slots}
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

// telling are in the order in which one tells more of a process than those behind it.
var telling = []Role{RoleHalted, RoleOwner, RoleTakeOver, RoleStopping, RoleStandby, RoleStarting}

// Report implements probes.Health.
func (h *slotHealth) Report() *rules.Report { return h.process.Report() }

// Ready implements probes.Health.
func (h *slotHealth) Ready() (ok bool, role string, reasons []string) {
	ok, role, reasons = h.process.Ready()
	if role == string(RoleUpgrade) { // no slot has begun
		return ok, role, reasons
	}
	had := map[string]bool{}
	for _, s := range h.slots {
		well, role, why := s.state.Ready()
		ok = ok && well
		had[role] = true
		for _, text := range why {
			reasons = append(reasons, s.part.String()+": "+text)
		}
	}
	at := slices.IndexFunc(telling, func(r Role) bool { return had[string(r)] })
	return ok, string(telling[max(at, 0)]), reasons
}
