package app

import (
	"context"
	"log/slog"
	"time"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/slots"
)

// slotProcess is the process as the balancer of its slots uses it.
type slotProcess struct{ relay *Relay }

// ReportSharing implements slots.Process.
func (p slotProcess) ReportSharing(err error) {
	text := ""
	if err != nil {
		text = "the slots cannot be shared: " + err.Error()
	}
	p.relay.state.setProblem("slots", text, false)
}

// LeaveNodes implements slots.Process.
func (p slotProcess) LeaveNodes(ctx context.Context) { p.relay.leaveNodes(ctx) }

// IsHalted implements slots.Process.
func (p slotProcess) IsHalted(i int) bool { return p.relay.slots[i].state.hasRole(RoleHalted) }

// RequestHandOver implements slots.Process.
func (p slotProcess) RequestHandOver(i int, reason string) bool {
	select {
	case p.relay.slots[i].yield <- reason:
		return true
	default:
		return false
	}
}

// RunReslice changes the number of slots of the watcher, see [slots.Reslice]. It connects for the
// call.
func RunReslice(
	ctx context.Context, cfg config.Config, log *slog.Logger, want slots.ResliceOptions,
) (slots.ResliceReport, error) {
	mongo, err := newClients(cfg.MongoDB, cfg.Node, slot.MaxSlots, log, nil)
	if err != nil {
		return slots.ResliceReport{}, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		mongo.disconnect(ctx)
	}()
	brokers, err := NewKafka(cfg, log, nil)
	if err != nil {
		return slots.ResliceReport{}, err
	}
	defer brokers.Close()
	return slots.Reslice(ctx, cfg, log, mongo.state, fence.NewClient(brokers), want)
}
