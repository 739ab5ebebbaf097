package connect

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

const (
	// loginCheckAfter is the time in which a rejected command gives its connection back. The client then uses this connection for the next
	// command.
	loginCheckAfter = 20 * time.Millisecond
	// loginCheckTimeout bounds the look for the user of the connection.
	loginCheckTimeout = 2 * time.Second
)

// logins closes the connections of a client if MongoDB has ended their logins. If a user is dropped, also to be created again, the server
// keeps the connections of the user open and rejects all of their commands. The driver does not log in again on an open connection, so
// without logins the client would never work again. The relay and its commands use it; the client of a host stays as it is.
type logins struct {
	client   *mongo.Client
	dialer   options.ContextDialer
	log      *slog.Logger
	checking sync.Mutex // held by checkLogin

	mu   sync.Mutex
	open map[*loggedIn]struct{}
}

// connectWithLogins connects as [mongo.Connect] does. If opts have a login, the client logs in again when its logins have ended.
func connectWithLogins(opts *options.ClientOptions, log *slog.Logger) (client *mongo.Client, err error) {
	if opts.Auth == nil {
		return mongo.Connect(opts)
	}
	watched := &logins{dialer: opts.Dialer, log: log, open: map[*loggedIn]struct{}{}}
	if opts.Dialer == nil {
		watched.dialer = &net.Dialer{}
	}
	opts.SetDialer(watched)

	opts.SetMonitor(monitorFailures(opts.Monitor, func(_ context.Context, failure error) {
		if mongodb.HasCode(failure, mongodb.CodeUnauthorized) {
			time.AfterFunc(loginCheckAfter, watched.checkLogin)
		}
	}))

	// No command runs before the client is known.
	watched.client, err = mongo.Connect(opts)
	return watched.client, err
}

// checkLogin closes all connections if the server has ended the login of the connection that the client uses. The reason for a rejection is
// usually a missing privilege, and then the connection has a user. If the client opens another connection for checkLogin, a later check finds
// the end of the login.
func (l *logins) checkLogin() {
	if !l.checking.TryLock() {
		return
	}
	defer l.checking.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), loginCheckTimeout)
	defer cancel()
	var status struct {
		AuthInfo struct {
			Users []bson.Raw `bson:"authenticatedUsers"`
		} `bson:"authInfo"`
	}
	err := l.client.Database("admin").RunCommand(ctx, bson.D{{Key: "connectionStatus", Value: 1}}).Decode(&status)
	hasEnded := status.AuthInfo.Users != nil && len(status.AuthInfo.Users) == 0
	if err != nil || !hasEnded {
		return
	}

	l.log.Warn("MongoDB has ended the login because its user was dropped or created again; connecting again")
	l.mu.Lock()
	list := slices.Collect(maps.Keys(l.open))
	l.mu.Unlock()
	for _, conn := range list {
		_ = conn.Close()
	}
}

// DialContext implements the driver's dialer.
func (l *logins) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := l.dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}

	conn := &loggedIn{Conn: nc, logins: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open[conn] = struct{}{}
	return conn, nil
}

// loggedIn is a connection of a client.
type loggedIn struct {
	net.Conn
	logins *logins
}

// Close closes the connection.
func (c *loggedIn) Close() error {
	c.logins.mu.Lock()
	delete(c.logins.open, c)
	c.logins.mu.Unlock()
	return c.Conn.Close()
}
