package consumer

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/setaside"
)

// HandlerID names a handler of a group.
type HandlerID struct{ Group, Name string }

// Retire removes the watermarks and the set-aside messages of a deleted handler from db. Its dead letters stay, and the marks
// of its messages expire. Retire cannot be undone: if the handler returns and gets old records again, it handles them again,
// unless their marks have not expired.
//
// Retire returns ErrRunning if a member of the group runs the handler, or crashed less than a day ago. It does not detect
// members whose handlers have handled nothing for a day. Retire expects the collections with their default names.
func Retire(ctx context.Context, db *mongo.Database, id HandlerID) error {
	if db == nil || id.Group == "" || id.Name == "" {
		return errors.New("consumer: retiring a handler: the database, the group or the name is missing")
	}

	handler := id.Group + "/" + id.Name
	store := mongostore.New(db, inbox.Settings{Collection: inbox.DefaultCollection})
	// Removing the marks of a running handler would make it handle its messages again.
	held, err := store.IsHeld(ctx, handler)
	if err != nil {
		return fmt.Errorf("consumer: retiring handler %s: %w", handler, err)
	}
	if held {
		return fmt.Errorf("consumer: retiring handler %s: %w: stop the members that have it", handler, ErrRunning)
	}

	// The messages go first: a watermark without messages is harmless, but a message without its watermark would run again.
	if _, err := setaside.New(db, setaside.DefaultCollection).Retire(ctx, handler); err != nil {
		return fmt.Errorf("consumer: retiring handler %s: %w", handler, err)
	}
	if _, err := store.Forget(ctx, handler, ""); err != nil {
		return fmt.Errorf("consumer: retiring handler %s: %w", handler, err)
	}
	return nil
}
