package doctor

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/relay/connect"
)

// mismatchTimeout bounds the second attempt at a server that closed the first connection.
const mismatchTimeout = 3 * time.Second

// isTLSMismatch connects to addr in the other way: without TLS if the configuration uses it, and with TLS otherwise. A
// server that hangs up may be starting or stopping. Only one that responds in the other way shows that the
// configuration is wrong. A server that accepts both hung up for another reason, such as the certificate of the client.
// speakPlain connects without TLS.
func isTLSMismatch(ctx context.Context, addr string, usesTLS bool, speakPlain func(ctx context.Context, addr string) error) bool {
	ctx, cancel := context.WithTimeout(ctx, mismatchTimeout)
	defer cancel()
	if usesTLS {
		return speakPlain(ctx, addr) == nil && !acceptsTLS(ctx, addr)
	}
	return acceptsTLS(ctx, addr)
}

// acceptsTLS reports whether the server at addr responds to a TLS handshake, with any certificate.
func acceptsTLS(ctx context.Context, addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	dialer := tls.Dialer{Config: &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err == nil {
		return conn.Close() == nil
	}

	// The certificate does not matter here.
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	return untrusted || isTLSAlert(err)
}

// isTLSAlert reports whether the other side ended a TLS handshake with an alert.
func isTLSAlert(err error) bool {
	alert, ok := errors.AsType[*net.OpError](err)
	return ok && alert.Op == "remote error"
}

// speakPlainMongo sends hello to the server at addr, without TLS and login.
func speakPlainMongo(ctx context.Context, addr string) error {
	client, err := mongo.Connect(options.Client().SetHosts([]string{addr}).SetDirect(true).
		SetAppName("outrelay doctor").SetServerSelectionTimeout(mismatchTimeout))
	if err != nil {
		return err
	}
	// A client that has not connected cannot fail to disconnect.
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()
	return client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Err()
}

// speakPlain requests the versions of the broker at addr, without TLS and login.
func (x kafkaChecks) speakPlain(ctx context.Context, addr string) error {
	cfg := x.cfg
	cfg.Kafka.TLS, cfg.Kafka.SASL = nil, nil
	client, err := connect.NewKafka(cfg, connect.KafkaHost{}, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return err
	}
	defer client.Close()

	link, err := client.Dial(ctx, addr)
	if err == nil {
		link.Close()
	}
	return err
}
