package transaction

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
)

// poolAbortTimeout bounds the abort of a transaction whose callback panicked.
const poolAbortTimeout = 5 * time.Second

// Pool lends sessions to transactions. Nothing but these transactions uses the sessions: they never return to the pool of
// the driver, which lends its sessions to every operation of the client. So whoever ends a session of a Pool on the server
// interrupts no other work of the service. A Pool is safe for concurrent use.
//
// A Pool has as many sessions as there were transactions at the same time, and keeps them. The server forgets a session that
// is idle for 30 minutes, and accepts it again afterwards.
type Pool struct {
	client *mongo.Client

	mu   sync.Mutex
	idle []*mongo.Session
}

// NewPool returns a Pool of the client. It does no I/O.
func NewPool(client *mongo.Client) *Pool { return &Pool{client: client} }

// Run is Run in a session of the pool. If ctx has a session, Run uses that one.
func (p *Pool) Run(ctx context.Context, fn func(context.Context) error) error {
	if mongo.SessionFromContext(ctx) != nil {
		return Run(ctx, p.client, fn)
	}

	sess, err := p.takeSession()
	if err != nil {
		return fmt.Errorf("transaction: starting a session: %w", err)
	}
	return inLentSession(ctx, sess, readconcern.Majority(), fn, func(ctx context.Context) { p.returnSession(ctx, sess) })
}

// takeSession returns an idle session, or a new one.
func (p *Pool) takeSession() (*mongo.Session, error) {
	p.mu.Lock()
	defer p.mu.Unlock()

	// The session that was used last is the least likely one that the server has forgotten.
	if n := len(p.idle); n > 0 {
		sess := p.idle[n-1]
		p.idle = p.idle[:n-1]
		return sess, nil
	}
	return p.client.StartSession()
}

// returnSession makes the session idle, unless it has ended. It aborts a transaction that a panic has left open.
func (p *Pool) returnSession(ctx context.Context, sess *mongo.Session) {
	if sess.TransactionRunning() {
		ctx, cancel := context.WithTimeout(ctx, poolAbortTimeout)
		defer cancel()
		// The next transaction of the session ends this one in any case.
		_ = sess.AbortTransaction(ctx)
	}
	// A callback that ends its session gives it to the driver, which rejects each later transaction in it.
	if hasEnded := sess.AdvanceClusterTime(nil) != nil; hasEnded {
		return
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, sess)
}
