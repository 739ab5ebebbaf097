package memory

import (
	"fmt"

	"github.com/outrelay/outrelay/internal/service/consuming"
	engine "github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/rates"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// Inbox is an inbox in a DB: an *inbox.Inbox for services, and an inbox for consumers. Several Inboxes of one collection behave as those of
// several processes. It is safe for concurrent use.
type Inbox struct {
	*inbox.Inbox
	ofConsumers
	db *DB
}

// ofConsumers has the methods that only consumers use. The methods of *inbox.Inbox take precedence.
type ofConsumers struct{ *engine.Inbox }

var _ consuming.Inbox = (*Inbox)(nil)

// NewInbox returns an inbox in db, with the options of package inbox. WithoutTTL has no effect: a
// marker is ignored when its retention is over. The error joins the problems of all options.
func NewInbox(db *DB, opts ...inbox.Option) (*Inbox, error) {
	opened := Inbox{db: db}
	var err error
	opened.Inbox, err = inbox.NewOver(func(settings engine.Settings) (_ *engine.Inbox, err error) {
		opened.ofConsumers.Inbox, err = openInbox(db, settings)
		return opened.ofConsumers.Inbox, err
	}, opts...)
	if err != nil {
		return nil, err
	}
	return &opened, nil
}

// Waiting returns the messages in the DB that consumers have set aside.
func (x *Inbox) Waiting() setaside.Store { return newSetAsideStore(x.db) }

// Rates returns the rate limits in the DB.
func (x *Inbox) Rates() rates.Store { return &x.db.rates }

// openInbox returns the inbox without its public type.
func openInbox(db *DB, settings engine.Settings) (*engine.Inbox, error) {
	return engine.New(settings, func(settings engine.Settings) (engine.Store, error) {
		if db == nil {
			return nil, fmt.Errorf("inbox: %w: the database is nil", engine.ErrInvalid)
		}
		return &inboxStore{
			db:        db,
			retention: settings.Retention,
			markers:   db.findOrAddTable(settings.Collection),
			offsets:   db.findOrAddTable(settings.Collection + "_offsets"),
			claims:    db.findOrAddTable(settings.Collection + "_claims"),
		}, nil
	})
}
