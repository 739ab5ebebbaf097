package httpapi

import (
	"context"
	"errors"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// recovered is the answer to an order to sweep.
type recovered struct {
	DryRun      bool               `json:"dry_run"`
	Ordered     bool               `json:"ordered"`
	Collections []admin.SweepCount `json:"collections"`
	Envelopes   int64              `json:"envelopes"`
}

func (a *api) maintenance() {
	act(a, "/purge", "purge", "Remove delivered envelopes now; nothing that waits, and nothing that the watcher has not passed", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Collections []string `json:"collections,omitempty" maxItems:"1000"`
			OlderThanS  float64  `json:"older_than_s,omitempty" minimum:"0" maximum:"315360000"`
			Rate        int      `json:"rate,omitempty" minimum:"0" maximum:"10000000" doc:"Envelopes a second; 0 is no limit."`
			DryRun      bool     `json:"dry_run,omitempty"`
		}
	},
	) (admin.PurgeReport, error) {
		return op.Purge(ctx, admin.Purge{Collections: in.Body.Collections, OlderThan: seconds(in.Body.OlderThanS), Rate: in.Body.Rate, DryRun: in.Body.DryRun})
	})
	act(a, "/recover", "recover", "Order a sweep: the next owner delivers every envelope again that its place does not cover", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Slotted
		Body struct {
			From   *time.Time `json:"from,omitempty" doc:"Of envelopes from then on; none is everything."`
			DryRun bool       `json:"dry_run,omitempty"`
		}
	},
	) (recovered, error) {
		out := recovered{DryRun: in.Body.DryRun, Collections: []admin.SweepCount{}}
		list, err := op.RecoverPlan(ctx, or(in.Body.From))
		if err != nil && !errors.Is(err, admin.ErrNoCollections) { // a document that vanished may have left none to count
			return out, err
		}
		out.Collections = append(out.Collections, list...)
		for _, s := range list {
			out.Envelopes += s.Envelopes
		}
		if in.Body.DryRun {
			return out, nil
		}
		out.Ordered = true
		return out, op.Recover(ctx, or(in.Body.From))
	})
	act(a, "/recover/adopt", "adopt", "Make state that was copied from another replica set this one's", func(ctx context.Context, op admin.Operator, _ *struct {
		Scope
		Slotted
	},
	) (done, error) {
		return done{true, "adopted"}, op.Adopt(ctx)
	})
	act(a, "/recover/release", "release-collection", "Give up the watcher's claim on a collection", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Collection string `json:"collection" minLength:"3" maxLength:"255"`
		}
	},
	) (done, error) {
		if _, err := op.Collections(ctx, in.Body.Collection); err != nil { // an error where there is no such claim
			return done{}, err
		}
		ok, err := op.Release(ctx, in.Body.Collection)
		return done{ok, "released " + in.Body.Collection}, err
	})
	look(a, "/indexes", "verify-indexes", "How the indexes of the watched collections differ from what is declared", func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Verification, error) {
		return op.Indexes().Verify(ctx, false)
	})
	act(a, "/indexes/rebuild", "rebuild-indexes", "Make, replace and drop indexes until they are what is declared", func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Verification, error) {
		return op.Indexes().Rebuild(ctx)
	})
	look(a, "/migrations", "list-migrations", "The ledger of migrations", func(ctx context.Context, op admin.Operator, _ *Empty) (admin.MigrationStatus, error) {
		return op.Indexes().Migrations(ctx)
	})
	act(a, "/clear", "clear", "Empty collections for good; confirm is what the preview shows", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			What       []string `json:"what" minItems:"1" maxItems:"10" enum:"envelopes,dead,inbox,sagas,events,replays"`
			Collection string   `json:"collection,omitempty" maxLength:"255"`
			Confirm    string   `json:"confirm,omitempty" maxLength:"200"`
			Force      bool     `json:"force,omitempty" doc:"Also while a relay works."`
			DryRun     bool     `json:"dry_run,omitempty"`
		}
	},
	) (admin.Cleared, error) {
		b := &in.Body
		return op.Clear(ctx, admin.ClearOrder{What: b.What, Collection: b.Collection, Confirm: b.Confirm, Force: b.Force, DryRun: b.DryRun})
	})
}
