package connect

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/pkg/bearer"
)

// KafkaHost has the parts of the connection to Kafka that an embedding program supplies. A nil field replaces nothing.
type KafkaHost struct {
	TLS   *tls.Config   // replaces kafka.tls
	Token bearer.Source // replaces kafka.sasl.token
}

// NewMSKToken returns the source of tokens for [sasl.MSK] in an AWS region. The program sets it, so that services which embed
// the relay do not link the AWS SDK.
var NewMSKToken func(region string) bearer.Source

// errNoMSK is the error of [sasl.MSK] in a program without [NewMSKToken].
var errNoMSK = errors.New("kafka.sasl.mechanism: this program does not contain " + sasl.MSK + ": use " + sasl.OAuth +
	" and relay.WithKafkaToken(msk.Token(region)), from package pkg/bearer/msk")

// NewKafka returns the client of the configured cluster. It connects at the first use.
func NewKafka(cfg config.Config, host KafkaHost, log *slog.Logger, metricSet *metrics.Set) (*kafkawire.Client, error) {
	metricSet = metrics.OrNew(metricSet)
	current, err := cfg.Kafka.TLS.Source(log, func(ok bool) { metricSet.Reloaded(metrics.Certificates, ok) })
	if err != nil {
		return nil, fmt.Errorf("kafka.tls: %w", err)
	}

	wire := kafkawire.Config{
		Brokers:    cfg.Kafka.Brokers,
		TLS:        host.TLS,
		CurrentTLS: current,
		Reached:    reportReached(log, metricSet),

		TransactionTimeout: cfg.Kafka.TransactionTimeout,
	}
	if sasl := cfg.Kafka.SASL; sasl != nil {
		if wire.SASL, err = NewLogin(*sasl, host.Token); err != nil {
			return nil, err
		}
	}
	return kafkawire.NewClient(wire)
}

// reportReached returns a function that reports whether a broker responds: in the metrics, and in the log once at the start of an
// outage and once at its end.
func reportReached(log *slog.Logger, metricSet *metrics.Set) func(error) {
	var away atomic.Bool
	return func(err error) {
		metricSet.KafkaReachable.Set(metrics.Bool(err == nil))
		if away.Swap(err != nil) == (err != nil) {
			return
		}
		if err != nil {
			log.Warn("Kafka cannot be used; events wait in MongoDB", "error", err)
		} else {
			log.Info("Kafka can be used again; events are sent")
		}
	}
}

// NewLogin returns the login saslConfig. token replaces the source of its tokens, unless it is nil.
func NewLogin(saslConfig config.SASL, token bearer.Source) (*sasl.Login, error) {
	login := &sasl.Login{Mechanism: saslConfig.Mechanism}
	mechanism, _ := sasl.Find(saslConfig.Mechanism)
	switch mechanism.Credential {
	case sasl.Token:
		login.Token = token
		if token == nil {
			login.Token = tokenSource(*saslConfig.Token)
		}
		if saslConfig.Token != nil {
			login.Extensions = saslConfig.Token.Extensions
		}

	case sasl.AWS:
		if NewMSKToken == nil {
			return nil, errNoMSK
		}
		login.Token = NewMSKToken(saslConfig.Region)

	default:
		login.User = saslConfig.Username
		login.Password = func() (string, error) { return saslConfig.Password.Current(), nil }
	}
	return login, nil
}

// tokenSource returns the one source of token.
func tokenSource(token config.Token) bearer.Source {
	switch {
	case token.File != "":
		return bearer.FromFile(token.File)
	case len(token.Command) > 0:
		return bearer.FromCommand(token.Command[0], token.Command[1:]...)
	default:
		return bearer.FromClientCredentials(bearer.ClientCredentials{
			TokenURL: token.OIDC.URL,
			ClientID: token.OIDC.ClientID,
			Secret:   token.OIDC.ClientSecret.Current,
			Scopes:   token.OIDC.Scopes,
			Audience: token.OIDC.Audience,
		})
	}
}
