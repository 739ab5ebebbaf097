package httpapi

import (
	"context"
	"errors"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/tasks"
)

// recovered is the response to an order of a sweep.
type recovered struct {
	DryRun      bool               `json:"dry_run"`
	Ordered     bool               `json:"ordered"`
	Collections []admin.SweepCount `json:"collections"`
	Envelopes   int64              `json:"envelopes"`
}

// orderSweep counts the envelopes of a sweep with plan, and orders it with give unless the call is a dry run.
func orderSweep(dryRun bool, plan func() ([]admin.SweepCount, error), give func() error) (recovered, error) {
	out := recovered{DryRun: dryRun, Collections: []admin.SweepCount{}}

	// A lost watcher document may leave no collections to count.
	list, err := plan()
	if err != nil && !errors.Is(err, admin.ErrNoCollections) {
		return out, err
	}
	out.Collections = append(out.Collections, list...)
	for _, s := range list {
		out.Envelopes += s.Envelopes
	}
	if dryRun {
		return out, nil
	}

	out.Ordered = true
	return out, give()
}

func (a *api) addMaintenance() {
	addLongAction(a, "/purge", "purge", "Remove delivered envelopes that the watcher has passed and that do not wait",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				Collections []string `json:"collections,omitempty" maxItems:"1000"`
				OlderThanS  float64  `json:"older_than_s,omitempty" minimum:"0" maximum:"315360000"`
				Rate        int      `json:"rate,omitempty" minimum:"0" maximum:"10000000" doc:"Envelopes per second; 0 means no limit."`
				DryRun      bool     `json:"dry_run,omitempty"`
			}
		}, task *tasks.Task,
		) (admin.PurgeReport, error) {
			body := &input.Body
			return op.Purge(ctx, admin.Purge{
				Collections: body.Collections, OlderThan: toDuration(body.OlderThanS), Rate: body.Rate, DryRun: body.DryRun, Progress: task.SetDone,
			})
		})

	addAction(a, "/recover", "recover", "Order a sweep: the next owner sends all envelopes again that its position does not cover",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Slotted
			Body struct {
				From   time.Time `json:"from,omitzero" doc:"Only envelopes written at this time or later. Default: all envelopes."`
				DryRun bool      `json:"dry_run,omitempty"`
			}
		},
		) (recovered, error) {
			return orderSweep(input.Body.DryRun,
				func() ([]admin.SweepCount, error) { return op.Recovery().PlanSweep(ctx, input.Body.From) },
				func() error { return op.Recovery().OrderSweep(ctx, input.Body.From) })
		})

	addAction(a, "/recover/accept-copy", "accept-copy", "Accept state that was copied from another replica set, and order a sweep from its position",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Slotted
			Body *struct {
				DryRun bool `json:"dry_run,omitempty"`
			}
		},
		) (recovered, error) {
			return orderSweep(input.Body != nil && input.Body.DryRun,
				func() ([]admin.SweepCount, error) { return op.Recovery().PlanAdoption(ctx) },
				func() error { return op.Recovery().Adopt(ctx) })
		})

	addAction(a, "/recover/skip", "skip-event", "Pass over one event that the stream cannot read or deliver; it becomes a dead letter",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Slotted
			Body admin.SkipOrder
		},
		) (admin.SkippedEvent, error) {
			return op.Recovery().PassOver(ctx, input.Body)
		})

	addAction(a, "/recover/release", "release-collection", "Remove the watcher's registration for a collection",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				Collection string `json:"collection" minLength:"3" maxLength:"255"`
			}
		},
		) (done, error) {
			// Returns an error if the watcher is not registered.
			if _, err := op.Collections(ctx, input.Body.Collection); err != nil {
				return done{}, err
			}
			ok, err := op.Recovery().ReleaseCollection(ctx, input.Body.Collection)
			return done{ok, "released " + input.Body.Collection}, err
		})

	addAction(a, "/clear", "clear", "Remove all documents of collections permanently; requires the phrase from the preview",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body admin.ClearOrder
		},
		) (admin.Cleared, error) {
			return op.Clear(ctx, input.Body)
		})
}
