package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// Retire removes the watermarks and the set-aside messages of a deleted handler. Its dead letters stay, and the marks of its
// messages expire. Retire cannot be undone: if the handler returns and gets old records again, it handles them again, unless
// their marks have not expired.
//
// c needs the group, the database and the options of the members, and does not run. Retire returns ErrRunning while the group has
// a member, also one without the handler: during a rolling update, an old member may have it. It also returns ErrRunning if a
// member that ran the handler has crashed less than a day ago.
func (c *Consumer) Retire(ctx context.Context, name string) error {
	if err := c.retire(ctx, name); err != nil {
		return fmt.Errorf("consumer: retiring handler %q of group %s: %w", name, c.group, err)
	}
	return nil
}

func (c *Consumer) retire(ctx context.Context, name string) error {
	if c.db == nil || name == "" {
		return errors.New("the database or the name is missing")
	}

	// The messages and the watermarks of a running handler are in use.
	state, err := c.transport.DescribeGroup(ctx, c.group)
	if err != nil {
		return err
	}
	if state.Members > 0 {
		return fmt.Errorf("%w: the group has %d members: stop them", ErrRunning, state.Members)
	}
	handler := c.group + "/" + name
	store := mongostore.New(c.db, inbox.Settings{Collection: cmp.Or(c.s.inbox.settings.Collection, inbox.DefaultCollection)})
	held, err := store.IsHeld(ctx, handler)
	if err != nil {
		return err
	}
	if held {
		return fmt.Errorf("%w: a member that has crashed holds partitions for a day, or until another member of the group takes them over", ErrRunning)
	}

	// The messages go first: a watermark without messages is harmless, but a message without its watermark would run again.
	if _, err := setaside.New(c.db, setaside.DefaultCollection).Retire(ctx, handler); err != nil {
		return err
	}
	_, err = store.Forget(ctx, handler, "")
	return err
}
