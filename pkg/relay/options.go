package relay

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/pkg/bearer"
)

// Option passes a value that a file cannot contain.
type Option interface{ apply(*settings) }

// settings has the values of the options.
type settings struct {
	log      *slog.Logger
	host     process.Host
	onStatus func(Status)
	onDead   func(GivenUp)
	onLost   func(LostHistory)
}

type optionFunc func(*settings)

func (f optionFunc) apply(settings *settings) { f(settings) }

// WithLogger sets the logger. Defaults to [slog.Default] at the time of New, and nil is the default.
// The relay never uses Config.Log.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(settings *settings) { settings.log = cmp.Or(log, slog.Default()) })
}

// WithMongoOptions connects to MongoDB with the options of the service instead of Config.MongoDB.URI and
// TLS, which must then be empty: hosts, login, TLS, dialer and monitors. The relay makes its own clients
// from a copy, because its lease needs shorter timeouts than a service has, and must not wait for a
// connection of the service. It ignores concerns, the read preference, Timeout, encryption and the BSON
// registry of the options.
func WithMongoOptions(clientOptions *options.ClientOptions) Option {
	return optionFunc(func(settings *settings) { settings.host.Mongo.Options = clientOptions })
}

// WithMongoClient uses the client of the service for everything, instead of clients of the relay.
// Config.MongoDB.URI and TLS must then be empty, and Config.Watch defaults to *.outbox. Prefer
// WithMongoOptions: with it, a busy service cannot delay the lease, and an election is noticed within a second.
//
// The client must have no Timeout, which would end the wait for events: otherwise Run returns an error. It
// must have no AutoEncryptionOptions, and room in its pool for 16 connections of the relay, and 4 more for
// each slot after the first. Without it, a relay loses its lease, and another one takes over. Its concerns,
// read preference, BSON options and registry do not matter: the relay sets them for each collection. Writes
// may be retryable, but the server then stores a copy of the lease at each renewal.
//
// The relay does not disconnect the client. Disconnect it after Run has returned.
func WithMongoClient(client *mongo.Client) Option {
	return optionFunc(func(settings *settings) { settings.host.Mongo.Client = client })
}

// WithKafkaTLS connects to Kafka with this configuration instead of Config.Kafka.TLS, which must then be
// nil.
func WithKafkaTLS(tlsConfig *tls.Config) Option {
	return optionFunc(func(settings *settings) { settings.host.Kafka.TLS = tlsConfig })
}

// WithKafkaToken logs in to Kafka by SASL OAUTHBEARER with tokens of this source, from package bearer or of
// the service. Config.Kafka.SASL may only have extensions of the token then.
func WithKafkaToken(source bearer.Source) Option {
	return optionFunc(func(settings *settings) { settings.host.Kafka.Token = source })
}

// WithRouter chooses the topics of events by a function, for events that name no topic themselves. If it
// returns none, Config.Topics decides. It must always return the same topics for the same arguments,
// because the relay caches them and asks again after a takeover. Config.Topics.Allow applies to them too.
func WithRouter(topics func(aggregateType, eventName string) []string) Option {
	return optionFunc(func(settings *settings) { settings.host.Route = topics })
}

// The hooks of a relay have the same rules. The calls of one hook come from one goroutine, in order. No lock is held, and the
// relay does not wait: if 1,000 calls of a hook wait, further ones are left out, and the log says so. A panic is logged, and the
// relay continues. Run waits for the calls before its end for at most five seconds.

// WithStatusHook calls hook with the first status of a running relay and after each change of its phase, of Ready and of the parts with a
// problem, at most 50 times in a second, for example to alert or to start work that only the owner does.
func WithStatusHook(hook func(Status)) Option {
	return optionFunc(func(settings *settings) { settings.onStatus = hook })
}

// GivenUp is an event that the relay gave up: it has stored a dead letter, which package operate finds and requeues.
type GivenUp struct {
	Letter     string // id of the letter
	Collection string // the outbox, as database.collection
	ID         string // of the event
	Delivery   int    // 0 is the first delivery; each requeue adds one
	Topic      string // the topic that rejected it; "" if no topic did
	Class      string // the kind of failure
	Reason     string // for people; it contains no payload
}

// WithGivenUpHook calls hook after the relay has stored a dead letter, for example to alert the owner of an order. Only the
// owner of the watcher, or of a slot, gives up events. A process that dies between the letter and the call makes no call: the
// dead letters themselves are complete.
func WithGivenUpHook(hook func(GivenUp)) Option {
	return optionFunc(func(settings *settings) { settings.onDead = hook })
}

// LostHistory is a range of the change stream that MongoDB could not deliver any more, for example because the relay was down
// for longer than the oplog reaches. No event is lost: the relay has sent the events of that time from the outboxes, and some
// of them may have been sent twice.
type LostHistory struct {
	Slot    string // the slot of the watcher; 0of1 unless the relay is configured for more
	Reason  string
	From    time.Time // start of the range; zero if it is unknown
	To      time.Time
	Swept   int64 // events that were sent from the outboxes
	Repeats int64 // of them, the events that may have been sent before
}

// WithLostHistoryHook calls hook after the relay has sent the events of lost history. Lost history is also a problem of the watcher,
// which package operate lists, for seven days or until an operator acknowledges it.
func WithLostHistoryHook(hook func(LostHistory)) Option {
	return optionFunc(func(settings *settings) { settings.onLost = hook })
}

// replaceConnections returns cfg with the address of the caller's options for MongoDB. The error lists the
// keys that an option contradicts.
func (s *settings) replaceConnections(cfg Config) (Config, error) {
	var bad []error
	if s.host.Kafka.TLS != nil && cfg.Kafka.TLS != nil {
		bad = append(bad, errors.New("relay: kafka.tls is set as well as WithKafkaTLS; remove one of the two"))
	}

	if s.host.Kafka.Token != nil {
		var login SASL
		if cfg.Kafka.SASL != nil {
			login = *cfg.Kafka.SASL
		}
		var token Token
		if login.Token != nil {
			token = *login.Token
		}
		hasToken := token.File != "" || len(token.Command) > 0 || token.OIDC != nil
		if hasToken || login.Mechanism != "" && login.Mechanism != sasl.OAuth {
			bad = append(bad, errors.New("relay: kafka.sasl is set as well as WithKafkaToken; remove one of the two"))
		}
		// The rest of the program shows this source.
		token.Command = []string{"WithKafkaToken"}
		login.Mechanism, login.Token = sasl.OAuth, &token
		cfg.Kafka.SASL = &login
	}

	host := s.host.Mongo
	isSet := !cfg.MongoDB.URI.IsZero() || cfg.MongoDB.TLS != nil
	if host.Options != nil && host.Client != nil {
		bad = append(bad, errors.New("relay: WithMongoOptions is set as well as WithMongoClient; remove one of the two"))
	}
	if host.Client != nil {
		if isSet {
			bad = append(bad, errors.New("relay: mongodb.uri or mongodb.tls is set as well as WithMongoClient; remove one of the two"))
		}
		// The rest of the program shows this address.
		cfg.MongoDB.URI = NewURI("mongodb://WithMongoClient")
	}
	if clientOptions := host.Options; clientOptions != nil {
		if isSet {
			bad = append(bad, errors.New("relay: mongodb.uri or mongodb.tls is set as well as WithMongoOptions; remove one of the two"))
		}
		if err := clientOptions.Validate(); err != nil {
			bad = append(bad, fmt.Errorf("relay: WithMongoOptions: %w", err))
		}
		// The rest of the program shows this address and derives the default of Config.Watch from it.
		cfg.MongoDB.URI = NewURI(cmp.Or(clientOptions.GetURI(), "mongodb://"+strings.Join(clientOptions.Hosts, ",")))
	}

	return cfg, errors.Join(bad...)
}
