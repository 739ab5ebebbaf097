package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
)

// Kafka is the name of the server in an [Unusable].
const Kafka = "Kafka"

// Unusable is the reason why MongoDB or Kafka cannot be used, with the fix.
type Unusable struct {
	Server      string // MongoDB or [Kafka]
	Detail, Fix string
	Lasting     bool // the same attempt fails again, for example because of a wrong password
}

func (u *Unusable) Error() string {
	text := u.Server + " cannot be used: " + logging.Clean(u.Detail)
	if u.Fix != "" {
		text += "; " + strings.ReplaceAll(logging.Clean(u.Fix), "\n", "; ")
	}
	return text
}

// Is reports whether target is [kafkawire.ErrAway], and u an outage of Kafka.
func (u *Unusable) Is(target error) bool {
	return target == kafkawire.ErrAway && u.Server == Kafka && !u.Lasting
}

// ReachMongo connects to MongoDB like the relay and logs in. It returns nil or an *[Unusable]. It takes at most about
// ten seconds.
func ReachMongo(ctx context.Context, cfg config.Config) error {
	examination := &examination{cfg: cfg, limit: Limit, found: map[string]finding{}}
	defer examination.mongo.disconnect()
	return examination.reachMongo(ctx)
}

// reachMongo is ReachMongo, with the connection of the examination.
func (x *examination) reachMongo(ctx context.Context) error {
	checks := mongoChecks{x}
	if finding := checks.checkConnection(ctx); finding.status == Fail {
		return &Unusable{"MongoDB", finding.detail, finding.fix, finding.lasting}
	}
	if finding := checks.checkReplicaSet(ctx); finding.status == Fail {
		// A primary is elected soon, and a new replica set is initiated soon. A standalone server stays one.
		standalone := x.mongo.hello.SetName == "" && !x.mongo.hello.Ghost
		return &Unusable{"MongoDB", finding.detail, finding.fix, standalone}
	}
	return nil
}

// ReachKafka connects to the brokers like the relay and logs in. With topics.create, it also lets a broker check the
// settings of new topics. It returns nil or an *[Unusable]. It takes at most about ten seconds.
func ReachKafka(ctx context.Context, cfg config.Config) error {
	brokers, err := connect.NewKafka(cfg, connect.KafkaHost{}, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return err
	}
	defer brokers.Close()

	examination := &examination{cfg: cfg, limit: Limit, brokers: brokers, found: map[string]finding{}}
	if finding := (kafkaChecks{examination}).checkKafka(ctx); finding.status == Fail {
		return &Unusable{Kafka, finding.detail, finding.fix, finding.lasting}
	}
	return examination.checkTopicSettings(ctx)
}

// Reach is [ReachMongo] and [ReachKafka] for a relay. It also returns an *[Unusable] if the MongoDB user lacks a right without which
// no event is delivered.
func Reach(ctx context.Context, cfg config.Config) error {
	scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	examination := &examination{cfg: cfg, limit: Limit, scope: scope, found: map[string]finding{}}

	defer examination.mongo.disconnect()
	if err := examination.reachMongo(ctx); err != nil {
		return err
	}
	if err := (privilegeChecks{examination}).requireRights(ctx); err != nil {
		return err
	}
	return ReachKafka(ctx, cfg)
}

// ReasonOf returns the [Unusable] that err is or wraps. For another error it returns the zero value.
func ReasonOf(err error) Unusable {
	if unusable, ok := errors.AsType[*Unusable](err); ok {
		return *unusable
	}
	return Unusable{}
}

// settingsProbe is the name of the topic whose creation checkTopicSettings asks to validate. It is never created.
const settingsProbe = "outrelay.settings.check"

// checkTopicSettings returns an error if the broker rejects the settings of topics.create, for example an unknown one.
func (x *examination) checkTopicSettings(ctx context.Context) error {
	how := x.cfg.Topics.Create
	if how == nil || len(how.Configs) == 0 {
		return nil
	}

	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	err := x.brokers.ValidateTopic(call, settingsProbe, topicCreation(how))
	if !errors.Is(err, kafkawire.InvalidConfig) {
		// Everything else concerns single topics and the rights to create them. The relay reports it for these topics.
		return nil
	}
	return &Unusable{Kafka, fmt.Sprintf("topics.create.configs is rejected: %v", err), "correct the names and values in topics.create.configs", true}
}

// topicCreation returns the settings of topics.create for the broker.
func topicCreation(how *config.Create) kafkawire.TopicCreate {
	return kafkawire.TopicCreate{Partitions: how.Partitions, Replication: how.Replication, Configs: how.Configs}
}

// isLasting reports whether MongoDB rejects this configuration, and not only does not respond now.
func (x mongoChecks) isLasting(err error) bool {
	switch serverCode(err) {
	case 11, 13, 18, 8000:
		return true
	}
	if isCertificateProblem(err) {
		return true
	}

	for host, seen := range x.mongo.seen.all() {
		if isCertificateProblem(seen.err) {
			return true
		}
		// These two states end when the set is initiated, or when it elects a primary.
		if _, mismatch := x.explainMismatch(host, seen); mismatch && seen.kind != "RSGhost" && seen.kind != "RSSecondary" {
			return true
		}
	}
	return false
}

// isCertificateProblem reports whether one side does not accept the certificate of the other, or only one side speaks TLS.
func isCertificateProblem(err error) bool {
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return true
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return true
	}
	if _, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true
	}

	return isTLSAlert(err)
}

// isLasting reports whether every broker rejects this configuration.
func (x kafkaChecks) isLasting(ctx context.Context, err error) bool {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			if !x.isLasting(ctx, one) {
				return false
			}
		}
		return true
	}

	diagnosis, ok := errors.AsType[*kafkawire.Diagnosis](err)
	return ok && (diagnosis.Rejected() || isCertificateProblem(diagnosis.Err) || isTLSMismatch(ctx, diagnosis.Broker, x.cfg.Kafka.TLS != nil, x.speakPlain))
}
