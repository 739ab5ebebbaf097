package consumer

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// Inbox is the part of an inbox that a consumer uses. *inbox.Inbox implements it and documents the contract of each method.
// If the inbox has a method EnsureIndexes(ctx) error, the consumer calls it when it starts.
type Inbox interface {
	Admit(ctx context.Context, list []inbox.Entry) (fresh []bool, err error)
	Check(ctx context.Context, list []inbox.Entry) (fresh []bool, err error)
	Pass(ctx context.Context, list []inbox.Entry) error
	Claim(ctx context.Context, e inbox.Entry, lease time.Duration) (inbox.Claim, error)
	Attach(ctx context.Context, consumer, topic string, part int32, l inbox.Log) (inbox.Generation, error)
	Release(ctx context.Context, consumer, topic string, part int32) error
}

var _ Inbox = (*inbox.Inbox)(nil)
