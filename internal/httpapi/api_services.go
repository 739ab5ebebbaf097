package httpapi

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// sagaTypes is the answer of the list of types.
type sagaTypes struct {
	Types []admin.SagaType `json:"types"`
}

// inboxes is the answer of the list of inboxes.
type inboxes struct {
	Inboxes []admin.InboxCounts `json:"inboxes"`
}

// inboxMarks is the answer of the watermarks.
type inboxMarks struct {
	Marks []admin.InboxMark `json:"marks"`
}

// Database names the database of a service.
type Database struct {
	Database string `query:"database" required:"true" minLength:"1" maxLength:"63"`
}

func (a *api) services() {
	look(a, "/lookup", "look-up", "Everything that is known of an event, or of the events of an ordering key", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Collection
		ID    string    `query:"id" maxLength:"4096"`
		Key   string    `query:"key" maxLength:"4096"`
		From  time.Time `query:"from" doc:"For a key: written then or later; an hour ago by default."`
		To    time.Time `query:"to"`
		Limit int       `query:"limit" minimum:"1" maximum:"1000" default:"100"`
	},
	) (admin.LookupResult, error) {
		return op.Lookup(ctx, admin.LookupQuery{ID: in.ID, Key: in.Key, Collection: in.Collection.Collection, From: in.From, To: in.To, Limit: in.Limit})
	})
	look(a, "/history", "history", "Where marked envelopes stand in Kafka (recording: mark)", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Paging
		Collections []string  `query:"collection" maxItems:"100"`
		IDs         []string  `query:"id" maxItems:"1000"`
		Key         string    `query:"key" maxLength:"4096"`
		From        time.Time `query:"from"`
		To          time.Time `query:"to"`
	},
	) (admin.History, error) {
		return op.History(ctx, admin.HistoryQuery{Collections: in.Collections, IDs: in.IDs, Key: in.Key, From: in.From, To: in.To, Limit: in.Limit, After: in.After})
	})
	a.sagas()
	a.inbox()
}

func (a *api) sagas() {
	look(a, "/sagas/types", "list-saga-types", "The kinds of sagas in the databases of the watcher's outboxes", func(ctx context.Context, op admin.Operator, _ *Empty) (sagaTypes, error) {
		list, err := op.Sagas().Types(ctx)
		return sagaTypes{list}, err
	})
	look(a, "/sagas", "list-sagas", "Instances of one kind, those that changed last first", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Paging
		Database
		Saga string `query:"saga" required:"true" minLength:"1" maxLength:"200"`
	},
	) (admin.SagaPage, error) {
		return op.Sagas().List(ctx, in.Database.Database, in.Saga, in.Limit, in.After)
	})
	look(a, "/sagas/one", "show-saga", "One instance; its state only where it is asked for", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Database
		Saga    string `query:"saga" required:"true" minLength:"1" maxLength:"200"`
		ID      string `query:"id" required:"true" minLength:"1" maxLength:"1024"`
		Payload bool   `query:"payload" doc:"Show the state too; for roles that may see it."`
	},
	) (admin.Saga, error) {
		if err := mayShow(ctx, in.Payload); err != nil {
			return admin.Saga{}, err
		}
		return op.Sagas().Show(ctx, in.Database.Database, in.Saga, in.ID, in.Payload)
	})
}

func (a *api) inbox() {
	look(a, "/inbox", "list-inboxes", "The inboxes in the databases of the watcher's outboxes, with counts", func(ctx context.Context, op admin.Operator, _ *Empty) (inboxes, error) {
		list, err := op.Inboxes().List(ctx)
		return inboxes{list}, err
	})
	look(a, "/inbox/marks", "list-inbox-marks", "How far each consumer is, by partition and lane", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Database
		Collection string `query:"collection" maxLength:"200" doc:"The collection of markers; inbox by default."`
	},
	) (inboxMarks, error) {
		list, err := op.Inboxes().Marks(ctx, in.Database.Database, in.Collection)
		return inboxMarks{list}, err
	})
	act(a, "/inbox/purge", "purge-inbox", "Remove markers of messages that were handled so long ago", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Database   string  `json:"database" minLength:"1" maxLength:"63"`
			Collection string  `json:"collection,omitempty" maxLength:"200"`
			OlderThanS float64 `json:"older_than_s" minimum:"60" maximum:"315360000"`
			DryRun     bool    `json:"dry_run,omitempty"`
		}
	},
	) (admin.InboxPurged, error) {
		b := &in.Body
		return op.Inboxes().Purge(ctx, admin.InboxPurge{Database: b.Database, Collection: b.Collection, OlderThan: seconds(b.OlderThanS), DryRun: b.DryRun})
	})
	act(a, "/inbox/release", "release-inbox", "Remove the leases of claimed messages, so that they can be handled again at once", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Database   string `json:"database" minLength:"1" maxLength:"63"`
			Collection string `json:"collection,omitempty" maxLength:"200"`
			Force      bool   `json:"force,omitempty" doc:"Also those that somebody holds."`
			DryRun     bool   `json:"dry_run,omitempty"`
		}
	},
	) (admin.InboxReleased, error) {
		return op.Inboxes().Release(ctx, in.Body.Database, in.Body.Collection, in.Body.Force, in.Body.DryRun)
	})
}
