package admin

import (
	"cmp"
	"context"
	"encoding/json"
)

// scheduledCancelled is the entry of the audit log for the cancellation of scheduled events.
const scheduledCancelled = "scheduled_cancelled"

// maxCancellations bounds the cancellations that are read: the same id may have been named again after its event was canceled.
const maxCancellations = 20

// withCancellation returns the result with the cancellation of the event, if nothing else is stored of it. It passes err on.
func (r LookupResult) withCancellation(ctx context.Context, op Operator, id string, err error) (LookupResult, error) {
	if err != nil || id == "" || len(r.Envelopes) > 0 {
		return r, err
	}
	page, err := op.Audit(ctx, AuditFilter{Watcher: op.Watcher, Kinds: []string{scheduledCancelled}, Object: id}, maxCancellations, "")
	if err != nil {
		return r, err
	}

	for _, entry := range page.Items {
		// A cancellation that found only some of several ids does not show which.
		var fields struct {
			IDs   []string `json:"ids"`
			Count int      `json:"count"`
		}
		if err := json.Unmarshal(entry.Fields, &fields); err != nil {
			return r, wrapError("reading entry "+entry.ID+" of the audit log", err)
		}
		if fields.Count > 0 && fields.Count >= len(fields.IDs) {
			r.Canceled = &Cancellation{At: entry.At, Actor: cmp.Or(entry.Actor, "an operator")}
			break
		}
	}
	return r, nil
}
