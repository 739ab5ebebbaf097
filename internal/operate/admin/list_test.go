package admin_test

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// A program that has found nothing to act on must not act on everything.
func TestAnEmptyListOfIDsSelectsNothing(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	f.moveToDead(f.a, record.Malformed, letterOf("d1", planted))
	f.giveUp(f.a, deadletter.DefaultCollection, "h", "m1")
	f.insertWaiting(f.a, "w1", "retry", "k1", "orders")
	f.setAside(f.a, "g/h", "key", 1, 3)
	shop, _, schedule := dueShop(t)
	schedule(0, "a", time.Hour)

	for name, count := range map[string]func(ids []string) (int64, error){
		"letters of the relay": func(ids []string) (int64, error) {
			out, err := f.op.Letters().Discard(t.Context(), admin.DeadFilter{Source: admin.FromRelay, IDs: ids, All: true}, admin.DryRun, nil)
			return out.Matched, err
		},
		"letters of handlers": func(ids []string) (int64, error) {
			out, err := f.op.Letters().Discard(t.Context(), admin.DeadFilter{Source: admin.FromHandler, IDs: ids, All: true}, admin.DryRun, nil)
			return out.Matched, err
		},
		"waiting envelopes": func(ids []string) (int64, error) {
			page, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{IDs: ids}, 0, "")
			return page.Total, err
		},
		"messages of handlers": func(ids []string) (int64, error) {
			out, err := f.op.HandlerWaiting().Retry(t.Context(), admin.HandlerWaitingFilter{IDs: ids, All: true}, admin.DryRun)
			return out.Matched, err
		},
		"scheduled envelopes": func(ids []string) (int64, error) {
			page, err := shop.Schedule().List(t.Context(), admin.ScheduledFilter{IDs: ids}, 0, "")
			return int64(len(page.Items)), err
		},
	} {
		if n, err := count(nil); n != 1 || err != nil {
			t.Errorf("%s without ids: got %d (%v), want 1", name, n, err)
		}
		if n, err := count([]string{}); n != 0 || err != nil {
			t.Errorf("%s with an empty list: got %d (%v), want none", name, n, err)
		}
	}
}
