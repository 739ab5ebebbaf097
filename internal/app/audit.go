package app

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/pipeline"
)

const (
	// auditEvery is the interval at which the gates are compared with the collections (N15).
	auditEvery = 10 * time.Second
	// auditShare bounds the cost of audits: after an audit, the pause is at least this many times
	// as long as it took.
	auditShare = 50
)

// auditPeriodically compares the gates with the waiting envelopes in the collections and counts the
// envelopes, until ctx ends.
func (t *term) auditPeriodically(ctx context.Context) error {
	out := t.reconciler.outlet
	audit := t.dispatcher.NewAudit()
	wait := auditEvery
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}

		began := time.Now()
		if err := t.auditOnce(ctx, out, audit); err != nil && ctx.Err() == nil {
			t.log.Debug("cannot count the waiting envelopes", "reason", err)
		}
		wait = max(auditEvery, auditShare*time.Since(began))
	}
}

func (t *term) auditOnce(ctx context.Context, out *pipeline.Outlet, audit *pipeline.Audit) error {
	if len(t.dirty.dirtyOutboxes()) == 0 && t.dispatcher.CountGated() == 0 {
		t.slot.metrics.Exceptions.Reset()
		t.slot.waitingCount.Store(0)
		return nil
	}

	if err := t.auditGates(ctx, out, audit); err != nil {
		return err
	}

	counts, err := t.reconciler.exceptions.Counts(ctx)
	if err != nil {
		return err
	}
	t.slot.metrics.Exceptions.Reset()
	waiting := int64(0)
	for _, c := range counts {
		t.slot.metrics.Exceptions.WithLabelValues(c.State).Add(float64(c.N))
		if c.State != "scheduled" {
			waiting += c.N
		}
	}
	t.slot.waitingCount.Store(waiting)
	return nil
}

// auditGates compares the gates with the collections and corrects the gates.
func (t *term) auditGates(ctx context.Context, out *pipeline.Outlet, audit *pipeline.Audit) error {
	look := audit.StartComparison()
	held := func(ns, topic, key string) { look.AddStored(out.RecordNamespace(ns), topic, key) }
	behind := func(string) bool { return false }
	known := func(string, byte, []byte, []string) {}
	if _, err := t.reconciler.exceptions.Load(ctx, behind, held, known); err != nil {
		return err
	}

	t.reconciler.exceptions.EachKeyInFlight(func(ns, key string) { look.MarkInFlight(out.RecordNamespace(ns), key) })
	if n := look.CorrectGates(); n > 0 {
		t.log.Warn("corrected gates that did not match the waiting envelopes", "keys", n)
		t.appendEvent(ctx, "gates_mended", bson.D{{Key: "keys", Value: n}})
		t.reconciler.exceptions.Wake("")
	}
	return nil
}
