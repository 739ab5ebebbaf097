// Package schema changes collections that services write to. createIndexes, dropIndexes and collMod need the collection for
// themselves for a moment, so they wait for the transactions that have written to it, and MongoDB lets each insert that comes
// meanwhile wait behind them.
package schema

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/retry"
)

const (
	probeAfter   = 250 * time.Millisecond // what a change may take before it is asked whether writers wait behind it
	probeTimeout = 100 * time.Millisecond // what a write may wait then
	maxDuration  = time.Minute            // of Change
	killTimeout  = 5 * time.Second
)

// attemptBackoff is between two attempts: writers get as much time as they had to wait, and more.
var attemptBackoff = retry.Policy{Base: 500 * time.Millisecond, Cap: 5 * time.Second}

// ErrBusy says that transactions had written to the collection and were open, each time that its change was tried.
var ErrBusy = errors.New("transactions keep the collection busy; the change is tried again later, or make it when there are no long transactions")

// Change runs change, one command that changes coll, without keeping writers from it for more than about 350 ms at a time: an
// attempt that waits for open transactions is ended, and made again later, for up to a minute; then the error is ErrBusy. change has to
// use the context that it is given, and not to mind being repeated. The change of a large collection goes on for as long as it
// takes once it has begun; at its end it waits for the transactions of that moment, which MongoDB does not let anybody bound.
func Change(ctx context.Context, coll *mongo.Collection, change func(ctx context.Context) error) error {
	back := attemptBackoff.Start()
	for began := time.Now(); ; {
		err := attemptChange(ctx, coll, change)
		if !errors.Is(err, ErrBusy) || time.Since(began) > maxDuration || back.Wait(ctx) != nil {
			return err
		}
	}
}

// turns are one for each collection: several changes at once would make writers wait for each of them.
var turns sync.Map

func acquireTurn(ctx context.Context, coll *mongo.Collection) (giveBack func(), err error) {
	turn, _ := turns.LoadOrStore(coll.Database().Name()+"."+coll.Name(), make(chan struct{}, 1))
	select {
	case turn.(chan struct{}) <- struct{}{}:
		return func() { <-turn.(chan struct{}) }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// attemptChange runs the command in a session of its own, by which it can be ended while it waits for the collection.
func attemptChange(ctx context.Context, coll *mongo.Collection, change func(ctx context.Context) error) error {
	giveBack, err := acquireTurn(ctx, coll)
	if err != nil {
		return err
	}
	defer giveBack()
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
		_ = client.Database("admin").RunCommand(kill, bson.D{{Key: "killSessions", Value: bson.A{session.ID()}}}).Err()
		switch err := <-ended; {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("changing %s.%s: %w", coll.Database().Name(), coll.Name(), ctx.Err())
		}
		return fmt.Errorf("changing %s.%s: %w", coll.Database().Name(), coll.Name(), ErrBusy)
	}

	select {
	case err := <-ended:
		return err
	case <-ctx.Done(): // the server goes on by itself
		cancel()
		<-ended //nolint:errcheck // the cause says what ended the call
		return context.Cause(ctx)
	}
}

// writersBlocked tries a write that changes nothing, which has to wait where every other write has to.
func writersBlocked(ctx context.Context, coll *mongo.Collection) bool {
	nothing := bson.D{{Key: "q", Value: bson.D{{Key: "_id", Value: bson.NewObjectID()}}}, {Key: "u", Value: bson.D{{Key: "$unset", Value: bson.D{{Key: "none", Value: ""}}}}}}
	err := coll.Database().RunCommand(mongo.NewSessionContext(ctx, nil), bson.D{
		{Key: "update", Value: coll.Name()}, {Key: "updates", Value: bson.A{nothing}}, {Key: "maxTimeMS", Value: probeTimeout.Milliseconds()},
	}).Err()
	const maxTimeExpired = 50
	var se mongo.ServerError
	return mongo.IsTimeout(err) || errors.As(err, &se) && se.HasErrorCode(maxTimeExpired)
}
