package httpapi

import (
	"context"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// Database names the database of a service.
type Database struct {
	Database string `query:"database" required:"true" minLength:"1" maxLength:"63"`
}

func (a *api) addLookup() {
	addQuery(a, "/lookup", "look-up", "Show the state and history of an event, or of the events of an ordering key",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.LookupQuery
		},
		) (admin.LookupResult, error) {
			return op.Lookup(ctx, input.LookupQuery)
		})

	addQuery(a, "/history", "history", "List recorded deliveries with their offsets in Kafka (recording: mark)",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.HistoryQuery
		},
		) (admin.History, error) {
			return op.History(ctx, input.HistoryQuery)
		})
}

func (a *api) addSagas() {
	addList(a, "/sagas/types", "list-saga-types", "List the saga types in the databases of services", "types",
		func(ctx context.Context, op admin.Operator, _ *Empty) ([]admin.SagaType, error) {
			return op.Sagas().Types(ctx)
		})

	addQuery(a, "/sagas", "list-sagas", "List the instances of one type, latest change first",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Paging
			Database
			Saga string `query:"saga" required:"true" minLength:"1" maxLength:"200"`
		},
		) (admin.Page[admin.Saga], error) {
			return op.Sagas().List(ctx, input.Database.Database, input.Saga, input.Limit, input.After)
		})

	addQuery(a, "/sagas/one", "show-saga", "Show one instance; its state only on request",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Database
			Saga    string `query:"saga" required:"true" minLength:"1" maxLength:"200"`
			ID      string `query:"id" required:"true" minLength:"1" maxLength:"1024"`
			Payload bool   `query:"payload" doc:"Include the state, if the caller may see it."`
		},
		) (admin.Saga, error) {
			if err := checkPayloadAccess(ctx, input.Payload); err != nil {
				return admin.Saga{}, err
			}
			return op.Sagas().Show(ctx, input.Database.Database, input.Saga, input.ID, input.Payload)
		})
}

func (a *api) addInboxes() {
	addList(a, "/inbox", "list-inboxes", "List the inboxes in the databases of services, with counts", "inboxes",
		func(ctx context.Context, op admin.Operator, _ *Empty) ([]admin.InboxCounts, error) {
			return op.Inboxes().List(ctx)
		})

	addList(a, "/inbox/marks", "list-inbox-marks", "List the progress of each consumer by partition and lane", "marks",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Database
			Collection string `query:"collection" maxLength:"200" doc:"The collection of the marks. Default: inbox."`
		},
		) ([]admin.InboxMark, error) {
			return op.Inboxes().Marks(ctx, input.Database.Database, input.Collection)
		})

	addAction(a, "/inbox/purge", "purge-inbox", "Remove the marks of messages that were handled long ago",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				Database   string  `json:"database" minLength:"1" maxLength:"63"`
				Collection string  `json:"collection,omitempty" maxLength:"200"`
				OlderThanS float64 `json:"older_than_s" minimum:"60" maximum:"315360000"`
				DryRun     bool    `json:"dry_run,omitempty"`
			}
		},
		) (admin.InboxPurged, error) {
			body := &input.Body
			return op.Inboxes().Purge(ctx, admin.InboxPurge{
				Database: body.Database, Collection: body.Collection, OlderThan: toDuration(body.OlderThanS), DryRun: body.DryRun,
			})
		})

	addAction(a, "/inbox/release", "release-inbox", "Remove the claims of messages, so that they can be handled again immediately",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				Database   string `json:"database" minLength:"1" maxLength:"63"`
				Collection string `json:"collection,omitempty" maxLength:"200"`
				Force      bool   `json:"force,omitempty" doc:"Also live claims."`
				DryRun     bool   `json:"dry_run,omitempty"`
			}
		},
		) (admin.InboxReleased, error) {
			return op.Inboxes().Release(ctx, input.Body.Database, input.Body.Collection, input.Body.Force, admin.Effect(input.Body.DryRun))
		})
}
