package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/relay/connect"
)

// selection is how long to wait for a primary. It is long enough to learn the reason of every host.
const selection = 4 * time.Second

// mongoFacts are the results that the steps about MongoDB share.
type mongoFacts struct {
	client   *mongo.Client
	opts     *options.ClientOptions
	seen     *sightings
	hello    helloResponse
	access   access
	outboxes outboxFacts
}

// mongoChecks check the connection to MongoDB and the deployment.
type mongoChecks struct{ *examination }

// connectMongo creates the client. It does no I/O, except a DNS lookup for a mongodb+srv address.
func (x mongoChecks) connectMongo() error {
	facts := &x.mongo
	facts.seen = &sightings{last: map[string]sighting{}}
	facts.opts = options.Client().ApplyURI(x.cfg.MongoDB.URI.Reveal()).
		SetAppName("outrelay doctor").
		SetHeartbeatInterval(time.Second).SetConnectTimeout(3 * time.Second).SetServerSelectionTimeout(selection).
		SetMaxPoolSize(4).SetServerMonitor(facts.seen.monitor())
	// The checks have their own deadlines, so a timeout in the address must not count.
	facts.opts.Timeout = nil
	if err := connect.SecureMongo(facts.opts, x.cfg.MongoDB.TLS, slog.New(slog.DiscardHandler), nil); err != nil {
		return err
	}

	// Like the relay, the reads ignore the concerns of the address. They are a separate finding.
	own := *facts.opts
	own.SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary())
	var err error
	facts.client, err = mongo.Connect(&own)
	return err
}

func (m *mongoFacts) disconnect() {
	if m.client == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = m.client.Disconnect(ctx)
}

// getParameter reads a parameter of the server.
func (m *mongoFacts) getParameter(ctx context.Context, name string, into any) error {
	return m.runAdminCommand(ctx, bson.D{{Key: "getParameter", Value: 1}, {Key: name, Value: 1}}, into)
}

// runAdminCommand runs a command on the database admin.
func (m *mongoFacts) runAdminCommand(ctx context.Context, cmd bson.D, into any) error {
	ctx, cancel := context.WithTimeout(ctx, selection+time.Second)
	defer cancel()
	return m.client.Database("admin").RunCommand(ctx, cmd).Decode(into)
}

// sighting is the last information of the driver about a host.
type sighting struct {
	kind, set string
	err       error
}

// sightings records the sighting of each host. The error of a failed server selection contains the
// reasons only as text.
type sightings struct {
	mu   sync.Mutex
	last map[string]sighting
}

func (s *sightings) monitor() *event.ServerMonitor {
	return &event.ServerMonitor{
		ServerDescriptionChanged: func(changed *event.ServerDescriptionChangedEvent) {
			if changed.NewDescription.Kind == "Unknown" {
				// The event of the failed heartbeat contains the reason.
				return
			}

			s.put(changed.Address.String(), sighting{kind: changed.NewDescription.Kind, set: changed.NewDescription.SetName})
		},
		ServerHeartbeatFailed: func(failed *event.ServerHeartbeatFailedEvent) {
			host, _, _ := strings.Cut(failed.ConnectionID, "[")
			// The driver cancels a heartbeat when it removes a host.
			if !errors.Is(failed.Failure, context.Canceled) {
				s.put(host, sighting{err: failed.Failure})
			}
		},
	}
}

func (s *sightings) put(host string, what sighting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last[host] = what
}

func (s *sightings) all() map[string]sighting {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.last)
}

// helloResponse is the response to hello, which requires no login.
type helloResponse struct {
	SetName   string    `bson:"setName"`
	Msg       string    `bson:"msg"` // isdbgrid for a mongos
	Primary   string    `bson:"primary"`
	Hosts     []string  `bson:"hosts"`
	Passives  []string  `bson:"passives"`
	Arbiters  []string  `bson:"arbiters"`
	Ghost     bool      `bson:"isreplicaset"` // started with --replSet, but not initiated
	Wire      int       `bson:"maxWireVersion"`
	LocalTime time.Time `bson:"localTime"`
}

func (h helloResponse) mongos() bool { return h.Msg == "isdbgrid" }

func (x mongoChecks) checkConnection(ctx context.Context) finding {
	facts := &x.mongo
	if err := x.connectMongo(); err != nil {
		if bad, ok := errors.AsType[*config.Problems](err); ok {
			return failed("correct mongodb.tls in the configuration", "%v", bad)
		}

		// A wrong address is rejected before a connection, so an explanation that is certain applies here as well.
		if certain, finding := explainConnection(err); certain {
			return finding
		}

		return failed("correct mongodb.uri", "the driver rejects the address: %s", logging.Clean(err.Error()))
	}

	if err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "hello", Value: 1}}, &facts.hello); err != nil {
		return x.explainUnreachable(ctx, err)
	}

	// hello succeeds without a login. ping makes sure that the login works.
	began := time.Now()
	var pong bson.Raw
	if err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "ping", Value: 1}}, &pong); err != nil {
		return x.explainUnreachable(ctx, err)
	}
	return passed("%s responds in %v", joinFew(facts.opts.Hosts, 3), time.Since(began).Round(100*time.Microsecond))
}

// explainUnreachable returns the reason why MongoDB does not respond.
func (x mongoChecks) explainUnreachable(ctx context.Context, err error) finding {
	if finding, ok := x.explainTLSMismatch(ctx); ok {
		return finding
	}
	finding := x.describeUnreachable(err)
	finding.lasting = x.isLasting(err)
	return finding
}

// explainTLSMismatch returns the finding for a server that hangs up because only one side uses TLS.
func (x mongoChecks) explainTLSMismatch(ctx context.Context) (explained finding, ok bool) {
	seen := x.mongo.seen.all()
	usesTLS := x.cfg.MongoDB.TLS != nil || x.mongo.opts.TLSConfig != nil
	for _, host := range slices.Sorted(maps.Keys(seen)) {
		if !isHangUp(seen[host].err) || !isTLSMismatch(ctx, host, usesTLS, speakPlainMongo) {
			continue
		}

		explained = failed("set mongodb.tls, or use a port without TLS", "%s expects TLS, and mongodb.tls is not set", host)
		if usesTLS {
			explained = failed("remove mongodb.tls and tls=true, or use a port with TLS", "%s does not use TLS", host)
		}
		explained.lasting = true
		return explained, true
	}
	return finding{}, false
}

func (x mongoChecks) describeUnreachable(err error) finding {
	switch code := serverCode(err); code {
	// AuthenticationFailed, UserNotFound, and the code of Atlas for both.
	case 18, 11, 8000:
		return failed("correct the user, the password and authSource (the database that defines the user) in mongodb.uri\npercent-encode characters such as : / ? # [ ] @ %",
			"the server rejects the user or the password (%d)", code)
	case 13:
		return failed("set a user and a password in mongodb.uri", "the server requires a login (13)")
	}

	if certain, finding := explainConnection(err); certain {
		return finding
	}

	// A server that responds but does not fit explains more than the servers that do not respond.
	seen := x.mongo.seen.all()
	// The order of a map is random, and the report has to be the same in each run.
	for _, host := range slices.Sorted(maps.Keys(seen)) {
		if finding, ok := x.explainMismatch(host, seen[host]); ok {
			return finding
		}
	}

	var reasons, fixes []string
	for _, host := range slices.Sorted(maps.Keys(seen)) {
		if seen[host].err == nil {
			continue
		}

		_, finding := explainConnection(seen[host].err)
		// A server that rejects a client certificate may close the connection without an alert.
		if tlsConfig := x.cfg.MongoDB.TLS; tlsConfig != nil && tlsConfig.Cert != "" && isHangUp(seen[host].err) {
			finding = failed("set mongodb.tls.cert and mongodb.tls.key to a certificate that the server trusts; if the server does not use TLS, remove mongodb.tls",
				"the server closes the connection during the TLS handshake: it rejects the client certificate, or does not use TLS")
		}
		reasons = append(reasons, host+": "+finding.detail)
		if !slices.Contains(fixes, finding.fix) {
			fixes = append(fixes, finding.fix)
		}
	}

	if len(reasons) > 0 {
		return failed(joinLines(fixes, 3), "%s", joinFew(reasons, 5))
	}

	return failed("check the servers in mongodb.uri: one of them has to be a primary",
		"no primary responds within %v", selection)
}

// explainMismatch returns the finding for a server that responds but does not match the address.
func (x mongoChecks) explainMismatch(host string, sighting sighting) (finding, bool) {
	asked := ""
	if x.mongo.opts.ReplicaSet != nil {
		asked = *x.mongo.opts.ReplicaSet
	}
	switch {
	case sighting.kind == "Standalone":
		return explainStandalone(host), true
	case sighting.kind == "RSGhost":
		return failed(initiateCommand(host), "%s was started with --replSet, but the replica set was never initiated", host), true
	case sighting.set != "" && asked != "" && sighting.set != asked:
		return failed(fmt.Sprintf("set replicaSet=%s in mongodb.uri, or use another server", sighting.set), "mongodb.uri names replica set %s, but %s belongs to %s", asked, host, sighting.set), true
	case sighting.kind == "RSSecondary":
		return failed("run in mongosh: rs.status()\na majority of the members has to be up", "%s responds, but its replica set %s has no primary", host, sighting.set), true
	}

	return finding{}, false
}

func explainStandalone(host string) finding {
	return failed("restart mongod with --replSet rs0, then:\n"+initiateCommand(host),
		"%s is a standalone server, which has neither change streams nor transactions", host)
}

func initiateCommand(host string) string {
	return fmt.Sprintf(`mongosh --host %s --eval 'rs.initiate()'`, host)
}

// explainConnection describes an error of a connection. certain is false if the error may be temporary
// or may combine several causes.
func explainConnection(err error) (certain bool, finding finding) {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return true, failed("correct mongodb.uri, or the name service of this machine", "the name %q cannot be resolved", dns.Name)
	}

	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return true, failed("set mongodb.tls.ca to the certificate of that authority", "the server's certificate is signed by an unknown authority")
	}

	if hostnameErr, ok := errors.AsType[x509.HostnameError](err); ok {
		return true, failed("use a name of the certificate in mongodb.uri, or set mongodb.tls.server_name", "the server's certificate does not contain the name %q", hostnameErr.Host)
	}

	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		return true, failed("renew the certificate, or correct this machine's clock", "the server's certificate is not valid: %v", invalid)
	}

	if alert, ok := errors.AsType[*net.OpError](err); ok && alert.Op == "remote error" {
		return true, failed("set mongodb.tls.cert and mongodb.tls.key to a certificate that the server trusts", "the server rejects the TLS handshake: %v", alert.Err)
	}

	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true, failed("remove mongodb.tls and tls=true, or use a port with TLS", "the server does not use TLS")
	}

	switch timeout, ok := errors.AsType[net.Error](err); {
	case errors.Is(err, syscall.ECONNREFUSED):
		return false, failed("correct the host and the port in mongodb.uri, or start the server", "connection refused: no server listens on this port")
	case isHangUp(err):
		return false, failed("if the server expects TLS, set mongodb.tls; otherwise remove mongodb.tls", "the server closes the connection at the first message: only one of the two sides expects TLS")
	case ok && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded):
		return false, failed("correct mongodb.uri, or allow the connection in firewalls and network policies", "the server does not respond in time")
	}

	return false, failed("correct mongodb.uri, or the network between this machine and the server", "connecting failed: %s", logging.Clean(err.Error()))
}

func isHangUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// serverCode returns the code that the server returned, or 0 if the error has none.
func serverCode(err error) int {
	if se, ok := errors.AsType[mongo.ServerError](err); ok {
		if all := se.ErrorCodes(); len(all) > 0 {
			return all[0]
		}
	}
	return 0
}
