package consumer

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// Inbox is what a consumer needs of an inbox; *inbox.Inbox is one, and its comments say what each method promises. One that
// also has a method EnsureIndexes(ctx) error is asked for it when the consumer starts.
type Inbox interface {
	Admit(ctx context.Context, list []inbox.Entry) (fresh []bool, err error)
	Pass(ctx context.Context, list []inbox.Entry) error
	Claim(ctx context.Context, e inbox.Entry, lease time.Duration) (inbox.Claim, error)
	Attach(ctx context.Context, consumer, topic string, part int32, l inbox.Log) (inbox.Generation, error)
	Release(ctx context.Context, consumer, topic string, part int32) error
}

var _ Inbox = (*inbox.Inbox)(nil)
