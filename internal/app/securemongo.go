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

// SecureMongo sets the TLS configuration t in opts, in addition to the TLS options of the URI. If t
// is nil, only the URI applies. The files are checked for changes at each connection, and reloaded
// is called for each change: see [config.TLS.Source].
//
// The driver takes one configuration for the lifetime of a client, and its certificate authorities
// cannot change. If they come from a file, the handshake is therefore done while dialing, with the
// same rules, and the driver gets a connection that is ready. Then the driver does not send an OCSP
// request to the issuer of the certificate. An OCSP response that the server staples is still
// checked.
//
// The log of the driver stays off, whatever its environment variables contain: at its finest level
// it prints documents.
func SecureMongo(opts *options.ClientOptions, t *config.TLS, log *slog.Logger, reloaded func(ok bool)) error {
	opts.SetLoggerOptions(options.Logger().SetSink(noLog{}))
	next, err := t.Source(log, reloaded)
	if next == nil || err != nil {
		return err
	}

	// Without a file of authorities, the configuration reads the client certificate at each
	// handshake.
	if t.CA == "" {
		opts.SetTLSConfig(next())
		return nil
	}
	opts.SetTLSConfig(nil)
	opts.SetDialer(tlsDialer(next))
	return nil
}

// noLog discards the log of the driver.
type noLog struct{}

// Info implements the driver's sink.
func (noLog) Info(int, string, ...any) {}

// Error implements the driver's sink.
func (noLog) Error(error, string, ...any) {}

// tlsDialer dials with TLS. It is called for the configuration of each connection.
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

// verifyNotRevoked returns an error if the server staples a response of the issuer's OCSP responder
// to its certificate, and the response says that the certificate is revoked.
func verifyNotRevoked(s tls.ConnectionState) error {
	if len(s.OCSPResponse) == 0 || len(s.VerifiedChains) == 0 || len(s.VerifiedChains[0]) < 2 {
		return nil
	}
	response, err := ocsp.ParseResponseForCert(s.OCSPResponse, s.PeerCertificates[0], s.VerifiedChains[0][1])
	if err == nil && response.Status == ocsp.Revoked {
		return errRevoked
	}
	return nil
}
