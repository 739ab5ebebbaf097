package admin

import (
	"context"
	"slices"
	"strings"
	"time"
)

// describePause returns a sentence about the pause, or the missing owner, because of which an event of the result is not sent, or "". It
// reads nothing if every event was sent or given up.
func describePause(ctx context.Context, op Operator, found []FoundEnvelope) (string, error) {
	isUnsent := func(event FoundEnvelope) bool {
		return event.State == stateAppended || event.State == stateScheduled || event.State == stateWaiting
	}
	if !slices.ContainsFunc(found, isUnsent) {
		return "", nil
	}
	status, err := ReadStatus(ctx, op.State)
	if err != nil {
		return "", err
	}
	var paused []string
	var order *SlotStatus // one of the paused slots
	slots, owned := 0, 0
	for i := range status.Slots {
		if status.Slots[i].Name != op.Watcher {
			continue
		}
		slots++
		if status.Slots[i].HasOwner() {
			owned++
		}
		if status.Slots[i].Paused {
			paused, order = append(paused, status.Slots[i].Slot), &status.Slots[i]
		}
	}
	switch {
	case len(paused) == 0 && owned == 0 && slots > 0:
		return "no process sends for watcher " + op.Watcher + ", so events wait: start outrelay run", nil
	case len(paused) == 0:
		return "", nil
	}

	text := "watcher " + op.Watcher + " is paused"
	// The other slots send their events.
	if len(paused) < slots {
		text += " in slot " + strings.Join(paused, ", ")
	}
	if order.PausedBy != "" && order.PausedAt != nil {
		text += ", by " + order.PausedBy + " since " + order.PausedAt.Format(time.RFC3339)
	}
	return text + ", so events wait: outrelay resume ends the pause", nil
}
