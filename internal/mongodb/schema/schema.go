// Package schema changes the indexes and options of collections that services write to. createIndexes,
// dropIndexes and collMod need exclusive access to the collection for a moment. So they wait for the
// transactions that have written to it, and MongoDB queues each later insert behind them.
//
// Blocking: Change blocks for at most about a minute, and for the time of the build itself. It blocks writers for
// about 350 ms at a time. Cost: one probing update in each attempt. In one process, one change of a collection runs
// at a time.
package schema

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
)

const (
	probeAfter   = 250 * time.Millisecond // how long a change may take before writersBlocked checks it
	probeTimeout = 100 * time.Millisecond // how long a write may wait in that check
	maxDuration  = time.Minute            // of Change
	killTimeout  = 5 * time.Second
)

// attemptBackoff is the wait between two attempts. Writers get at least as much time as they had to wait.
var attemptBackoff = retry.Policy{Base: 500 * time.Millisecond, Cap: 5 * time.Second}

// ErrBusy is the error when open transactions had written to the collection in each attempt.
var ErrBusy = errors.New("open transactions keep the collection busy; " +
	"try again while no long transaction is open")

// Change runs change, one command that changes coll, and blocks writers for at most about 350 ms at a time.
// If an attempt waits for open transactions, Change ends it and repeats it later, for up to a minute. Then
// the error is ErrBusy. change must use the context that it receives and must be repeatable. Once the
// change of a large collection has started, it runs to its end. At its end it waits for the transactions
// that began during the change and have written to the collection. MongoDB ignores killSessions, killOp and
// dropIndexes during this wait, so ending the change would release no writer and would waste the build.
func Change(ctx context.Context, coll *mongo.Collection, change func(ctx context.Context) error) error {
	back := attemptBackoff.Start()
	started := time.Now()
	for {
		err := attemptChange(ctx, coll, change)
		if !errors.Is(err, ErrBusy) || time.Since(started) > maxDuration || back.Wait(ctx) != nil {
			return err
		}
	}
}

// turns has an entry for each collection that is changed at the moment: a channel that is closed at the end of the change. With several
// concurrent changes, writers would wait for each.
var turns sync.Map

// acquireTurn blocks until no other change of the collection runs in this process.
func acquireTurn(ctx context.Context, coll *mongo.Collection) (release func(), err error) {
	name := coll.Database().Name() + "." + coll.Name()
	ended := make(chan struct{})
	for {
		other, busy := turns.LoadOrStore(name, ended)
		if !busy {
			return func() {
				turns.Delete(name)
				close(ended)
			}, nil
		}

		select {
		case <-other.(chan struct{}):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// attemptChange runs the command once, in a session of its own. By the session the command can be ended
// while it waits for the collection.
func attemptChange(ctx context.Context, coll *mongo.Collection, change func(ctx context.Context) error) error {
	release, err := acquireTurn(ctx, coll)
	if err != nil {
		return err
	}
	defer release()

	client := coll.Database().Client()
	session, err := client.StartSession()
	if err != nil {
		return fmt.Errorf("starting session: %w", err)
	}
	defer session.EndSession(context.WithoutCancel(ctx))

	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- change(mongo.NewSessionContext(run, session)) }()

	select {
	case err := <-ended:
		return err
	case <-time.After(probeAfter):
	case <-ctx.Done():
	}

	if ctx.Err() != nil || writersBlocked(ctx, coll) {
		kill, done := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
		defer done()
		command := bson.D{{Key: "killSessions", Value: bson.A{session.ID()}}}
		_ = client.Database("admin").RunCommand(kill, command).Err()

		// The change may have succeeded before the server executed the kill.
		if err := <-ended; err == nil {
			return nil
		}
		ns := coll.Database().Name() + "." + coll.Name()
		if ctx.Err() != nil {
			return fmt.Errorf("changing %s: %w", ns, ctx.Err())
		}
		return fmt.Errorf("changing %s: %w", ns, ErrBusy)
	}

	// Writers are not blocked, so the change may run to its end. If ctx ends now, the server continues the
	// change without this process.
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		cancel()
		<-ended //nolint:errcheck // the cause says what ended the call
		return context.Cause(ctx)
	}
}

// writersBlocked reports whether writes to coll have to wait. It sends an update that matches no document.
// Such an update waits like any other write.
func writersBlocked(ctx context.Context, coll *mongo.Collection) bool {
	noMatch := bson.D{{Key: "_id", Value: bson.NewObjectID()}}
	unset := bson.D{{Key: "$unset", Value: bson.D{{Key: "none", Value: ""}}}}
	err := coll.Database().RunCommand(mongo.NewSessionContext(ctx, nil), bson.D{
		{Key: "update", Value: coll.Name()},
		{Key: "updates", Value: bson.A{bson.D{{Key: "q", Value: noMatch}, {Key: "u", Value: unset}}}},
		{Key: "maxTimeMS", Value: probeTimeout.Milliseconds()},
	}).Err()

	const maxTimeExpired = 50
	var se mongo.ServerError
	return mongo.IsTimeout(err) || errors.As(err, &se) && se.HasErrorCode(maxTimeExpired)
}
