package app

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"

	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/crypto/ocsp"

	"github.com/outrelay/outrelay/internal/config"
)

// SecureMongo has the client of opts connect as t says, over what its address says of TLS; with nil it is left to the
// address. The files are looked at again for each connection, see [config.TLS.Source], which calls reloaded.
//
// The driver takes one configuration for the life of a client, and in it the authorities are fixed. Where they are named
// by a file the handshake is done while dialling, by the same rules as always, and the driver sees a connection that is
// ready. What the driver would do beyond that, asking the responder of the certificate's issuer, is then not done; an
// answer of the responder that the server brings along still counts.
//
// The driver's own log stays off, whatever its environment variables say: at its finest it prints documents.
func SecureMongo(opts *options.ClientOptions, t *config.TLS, log *slog.Logger, reloaded func(ok bool)) error {
	opts.SetLoggerOptions(options.Logger().SetSink(noLog{}))
	next, err := t.Source(log, reloaded)
	if next == nil || err != nil {
		return err
	}
	if t.CA == "" {
		opts.SetTLSConfig(next()) // its own certificate it asks for at each handshake
		return nil
	}
	opts.SetTLSConfig(nil)
	opts.SetDialer(tlsDialer(next))
	return nil
}

// noLog is where the driver logs to.
type noLog struct{}

// Info implements the driver's sink.
func (noLog) Info(int, string, ...any) {}

// Error implements the driver's sink.
func (noLog) Error(error, string, ...any) {}

// tlsDialer asks for the configuration of each connection.
type tlsDialer func() *tls.Config

// DialContext implements the driver's dialer.
func (d tlsDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conf := d().Clone()
	if conf.ServerName == "" {
		conf.ServerName = host
	}
	if !conf.InsecureSkipVerify {
		conf.VerifyConnection = verifyNotRevoked
	}
	t := tls.Client(nc, conf)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, err
	}
	return t, nil
}

var errRevoked = errors.New("the server's certificate was revoked by its issuer")

// verifyNotRevoked believes the answer of the issuer's responder that the server staples to its certificate, if it does.
func verifyNotRevoked(s tls.ConnectionState) error {
	if len(s.OCSPResponse) == 0 || len(s.VerifiedChains) == 0 || len(s.VerifiedChains[0]) < 2 {
		return nil
	}
	answer, err := ocsp.ParseResponseForCert(s.OCSPResponse, s.PeerCertificates[0], s.VerifiedChains[0][1])
	if err == nil && answer.Status == ocsp.Revoked {
		return errRevoked
	}
	return nil
}
