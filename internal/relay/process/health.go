package process

import (
	"log/slog"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/probes"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/readiness"
)

// slotHealth is the health of a process with several slots. The process is ready if all its slots
// are. A slot that another node owns is ready here as a standby.
type slotHealth struct {
	process *readiness.State
	slots   []*term.Runner
	list    func() []problems.Problem
}

// wholeHealth is the health of a process with one slot.
type wholeHealth struct {
	*readiness.State
	list func() []problems.Problem
}

// Problems implements probes.Health.
func (h wholeHealth) Problems() []problems.Problem { return h.list() }

// processHealth returns the health of the process: its own state, or its state together with the
// states of its slots.
func (r *Relay) processHealth() probes.Health {
	if r.shared.Balancer == nil {
		return wholeHealth{r.shared.State, r.Problems}
	}
	return &slotHealth{r.shared.State, r.slots, r.Problems}
}

// Live implements probes.Health.
func (h *slotHealth) Live() error {
	if err := h.process.Live(); err != nil {
		return err
	}
	for _, s := range h.slots {
		if err := s.State.Live(); err != nil {
			return err
		}
	}
	return nil
}

// phasesByRank contains the phases of slots. The first phase that any slot has is the phase of the
// process.
var phasesByRank = []readiness.Phase{readiness.PhaseHalted, readiness.PhaseOwner, readiness.PhaseTakeOver, readiness.PhaseStopping, readiness.PhaseStandby, readiness.PhaseStarting}

// Problems implements probes.Health.
func (h *slotHealth) Problems() []problems.Problem { return h.list() }

// Ready implements probes.Health.
func (h *slotHealth) Ready() (ok bool, phase string, reasons []string) {
	ok, _, reasons = h.process.Ready()

	had := map[string]bool{}
	for _, s := range h.slots {
		slotOK, slotPhase, slotReasons := s.State.Ready()
		ok = ok && slotOK
		had[slotPhase] = true
		for _, text := range slotReasons {
			reasons = append(reasons, s.Slot.String()+": "+text)
		}
	}

	// The process shows the most important phase of its slots.
	at := slices.IndexFunc(phasesByRank, func(other readiness.Phase) bool { return had[string(other)] })
	return ok, string(phasesByRank[max(at, 0)]), reasons
}

// lateHealth is the health of a relay that the function returns once it has begun. Before, it is that of a process
// that starts: live and not ready.
type lateHealth func() *Relay

func (current lateHealth) health() probes.Health {
	if relay := current(); relay != nil {
		return relay.processHealth()
	}
	state := readiness.NewState(0, time.Now, slog.New(slog.DiscardHandler))
	return wholeHealth{state, func() []problems.Problem { return []problems.Problem{} }}
}

// Live implements probes.Health.
func (current lateHealth) Live() error { return current.health().Live() }

// Ready implements probes.Health.
func (current lateHealth) Ready() (ok bool, phase string, reasons []string) {
	return current.health().Ready()
}

// Problems implements probes.Health.
func (current lateHealth) Problems() []problems.Problem { return current.health().Problems() }
