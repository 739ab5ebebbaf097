package term

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/internal/watched"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// indexKeeper creates the indexes that the relay wants on the watched collections, and sets the configured expiries.
type indexKeeper struct {
	client       *mongo.Client
	cfg          *config.Config
	collections  *watched.Collections
	pause        time.Duration // between two attempts
	log          *slog.Logger
	inBackground func(func(context.Context))
}

// indexesShare bounds the cost of repeated attempts: after an attempt, the pause is at least this
// many times as long as the attempt took.
const indexesShare = 10

// ensureAllIndexes creates the indexes of all watched collections, concurrently with the delivery: without an index
// nothing is lost, but the purge is slow.
func (k *indexKeeper) ensureAllIndexes(ctx context.Context) {
	k.ensureUntilDone(ctx, k.collections.WatchedOutboxes, connect.WantedIndexes(*k.cfg))
}

// ensureIndexes creates the indexes of a collection that appeared while the relay runs. It does not
// wait for them.
func (k *indexKeeper) ensureIndexes(outbox outboxes.Outbox) {
	k.ensureInBackground(outbox, connect.WantedIndexes(*k.cfg))
}

// ensureInBackground creates the selected indexes of a collection, such as that of scheduled envelopes when the first
// one is seen. It does not wait for them.
func (k *indexKeeper) ensureInBackground(outbox outboxes.Outbox, want outboxes.Indexes) {
	list := func() []outboxes.Outbox { return []outboxes.Outbox{outbox} }
	k.inBackground(func(ctx context.Context) { k.ensureUntilDone(ctx, list, want) })
}

// ensureScheduled creates the index of scheduled envelopes on an outbox that got its first one. It does not wait for it.
func (k *indexKeeper) ensureScheduled(ns string) {
	for _, o := range k.collections.WatchedOutboxes() {
		if o.NS() == ns {
			k.ensureInBackground(o, outboxes.Indexes{Scheduled: true})
		}
	}
}

// ensureUntilDone creates indexes and sets expiries until all of them exist or ctx ends.
// Obstacles are retried: a privilege may be granted, and a long transaction may end. It logs each
// obstacle once.
func (k *indexKeeper) ensureUntilDone(ctx context.Context, list func() []outboxes.Outbox, want outboxes.Indexes) {
	logged := map[string]bool{}
	warnOnce := func(text string, args ...any) {
		if key := text + fmt.Sprint(args...); !logged[key] && ctx.Err() == nil {
			logged[key] = true
			k.log.Warn(text, args...)
		}
	}

	for {
		began := time.Now()
		done := true
		for _, o := range list() {
			if ctx.Err() != nil {
				return
			}
			done = k.ensureOnce(ctx, o, want, warnOnce) && done
		}
		if done || retry.Sleep(ctx, max(k.pause, indexesShare*time.Since(began))) != nil {
			return
		}
	}
}

// ensureOnce makes one attempt for one collection. It reports whether another attempt would change nothing.
func (k *indexKeeper) ensureOnce(
	ctx context.Context, outbox outboxes.Outbox, want outboxes.Indexes, warnOnce func(text string, args ...any),
) bool {
	// Without the UUID, an index could create a collection that was dropped.
	if !outbox.Identified() {
		if len(want.List()) > 0 || k.cfg.Purge.TTL > 0 {
			warnOnce("an index is missing because of a missing privilege", "collection", outbox.NS(), "grant", "listCollections", "on", outbox.DB)
		}
		return true
	}

	done := true
	if k.cfg.MongoDB.Indexes {
		created, err := want.Ensure(ctx, k.client, outbox)
		for _, statement := range created {
			k.log.Info("created an index", "collection", outbox.NS(), "statement", statement)
		}
		done = k.isSettled(err, outbox, warnOnce)
	}

	if _, err := outboxes.EnsureSentTTL(ctx, k.client, outbox, k.cfg.Purge.TTL); err != nil && !errors.Is(err, mongodb.ErrCollectionGone) {
		done = done && errors.Is(err, mongodb.ErrIndexConflict)
		warnOnce("purge.ttl is not in force for this collection", "collection", outbox.NS(), "error", err)
	}
	return done
}

// isSettled logs the error of an attempt. It reports whether another attempt would fail in the same way, or err is nil.
func (k *indexKeeper) isSettled(err error, outbox outboxes.Outbox, warnOnce func(text string, args ...any)) bool {
	var rejected *mongodb.PrivilegeError
	switch {
	case err == nil || errors.Is(err, mongodb.ErrCollectionGone):
		return true
	case errors.Is(err, mongodb.ErrIndexConflict):
		warnOnce("an index of others has the keys or the name of one that the relay wants; queries may be slow",
			"collection", outbox.NS(), "error", err)
		return true
	case errors.As(err, &rejected):
		warnOnce("an index is missing because of a missing privilege; the purge and scheduled deliveries read the whole collection",
			"collection", outbox.NS(), "grant", rejected.Action, "on", rejected.On, "fix", rejected.Fix)
		return false
	}
	warnOnce("an index is missing; the purge and scheduled deliveries read the whole collection", "collection", outbox.NS(), "error", err)
	return false
}
