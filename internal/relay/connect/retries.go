package connect

import (
	"cmp"
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/event"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// retryPause is the pause after a command that the server could not serve. It is short enough for every timeout of a call.
const retryPause = 100 * time.Millisecond

// pauseRetries returns a monitor that delays each repetition of a command. If the context of a command has a deadline, the driver
// repeats the command until then without a pause. A server that accepts connections and closes them would get more than a
// thousand connections in a second. next is the monitor of the host, or nil.
func pauseRetries(next *event.CommandMonitor) *event.CommandMonitor {
	return monitorFailures(next, func(ctx context.Context, failure error) {
		if mongodb.IsRetried(failure) {
			// At the end of ctx, the driver does not repeat the command.
			_ = retry.Sleep(ctx, retryPause)
		}
	})
}

// monitorFailures returns a copy of next that also calls failed after each command that has failed. next is the monitor of the host, which may
// have other clients, or nil.
func monitorFailures(next *event.CommandMonitor, failed func(ctx context.Context, failure error)) *event.CommandMonitor {
	monitor := *cmp.Or(next, &event.CommandMonitor{})
	report := monitor.Failed
	monitor.Failed = func(ctx context.Context, ev *event.CommandFailedEvent) {
		if report != nil {
			report(ctx, ev)
		}
		failed(ctx, ev.Failure)
	}
	return &monitor
}
