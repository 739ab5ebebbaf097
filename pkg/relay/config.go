package relay

import (
	"fmt"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// Config is the configuration of a relay: the keys of outrelay.yaml, which docs/configuration.md describes, with the same
// meaning. Start from [Default] or [Load]: in a field that has a default, zero is a value like any other, as in the file. MongoDB.URI
// and Kafka.Brokers are required. A text is used as it is: ${env:NAME} and ${file:path} have a meaning only in a file, see [Load].
type Config config.Config

// The sections and values of a Config.
type (
	// MongoDB is the replica set that holds the outbox.
	MongoDB = config.MongoDB
	// State is the place of outrelay's own documents: leases, positions, waiting events, dead letters, nodes, the audit log.
	State = config.State
	// TLS names the files for one side of a TLS connection.
	TLS = config.TLS
	// Kafka is the cluster that receives the records.
	Kafka = config.Kafka
	// ReadBack limits the read-back of each topic after a takeover.
	ReadBack = config.ReadBack
	// SASL is a login to Kafka.
	SASL = config.SASL
	// Token is the source of bearer tokens.
	Token = config.Token
	// OIDC requests tokens with the grant client_credentials, the next one after 80 % of the lifetime of the last one.
	OIDC = config.OIDC
	// Mapping names the fields of the documents that hold the parts of an envelope, for outboxes that other programs write.
	Mapping = config.Mapping
	// Topics selects the topics of each envelope.
	Topics = config.Topics
	// Rule sends the matching envelopes to one or several topics.
	Rule = config.Rule
	// Match selects the envelopes of a rule.
	Match = config.Match
	// Create holds the settings of new topics.
	Create = config.Create
	// Record is the format of the Kafka records.
	Record = config.Record
	// Purge configures the removal of delivered envelopes after retention.
	Purge = config.Purge
	// DeadLetters configures the dead letters.
	DeadLetters = config.DeadLetters
	// Consumers describes the services that handle events, for operators.
	Consumers = config.Consumers
	// Lease is the exclusive right of an owner to send.
	Lease = config.Lease
	// Retry limits the attempts for an envelope whose record Kafka rejects.
	Retry = config.Retry
	// Limits bound memory and sizes.
	Limits = config.Limits
	// HTTP configures the HTTP servers of the process.
	HTTP = config.HTTP
	// Admin configures the operator's page at / and the API below /api/v1.
	Admin = config.Admin
	// OTel configures the export of traces and metrics by OTLP over HTTP with protobuf.
	OTel = config.OTel
	// Log configures the log on standard error.
	Log = config.Log
	// Start is where a watcher without a position begins; zero: with the events in the outbox.
	Start = config.Start
	// Size is a number of bytes.
	Size = config.Size
	// URI is an address that may contain a login, which is printed as ***; see [NewURI].
	URI = config.URI
	// Secret is a text that is printed as ***; see [NewSecret].
	Secret = config.Secret
)

// NewURI returns a value for MongoDB.URI and OTel.Endpoint.
func NewURI(text string) URI { return config.NewURI(text) }

// NewSecret returns a value for passwords and tokens.
func NewSecret(text string) Secret { return config.NewSecret(text) }

// Default returns the defaults of outrelay.yaml, except that the relay does not listen: the service mounts [Relay.Handler].
// Defaults that depend on other values, such as Watch, are unset in it, except that Retention is 24h also for a Mapping: set it to 0 to
// keep the documents.
func Default() Config {
	cfg := config.Default()
	cfg.HTTP.Listen = "off"
	return Config(cfg)
}

// DefaultAdmin returns the defaults of http.admin, except that there is no listener: the service mounts the page, see
// operate.Operator.Handler. Set a token in it.
func DefaultAdmin() *Admin {
	admin := config.DefaultAdmin()
	admin.Listen = "off"
	return &admin
}

// Load returns the configuration in a YAML file, overridden by the variables OUTRELAY_… of environ,
// which has the format of [os.Environ]. An empty path reads no file, and nil no environment. Load
// replaces ${env:NAME} and ${file:path}. The error lists every problem, an unknown key among them.
func Load(path string, environ []string) (Config, error) {
	cfg, _, err := config.LoadOver(config.Config(Default()), path, environ, nil)
	if err != nil {
		return Config{}, fmt.Errorf("relay: %w", err)
	}
	return Config(cfg), nil
}

// Validate returns every problem of the configuration in one error, with the fix for each, or nil. New
// returns the same error. Validate reads the files that the configuration names.
func (c Config) Validate() error {
	_, _, err := c.resolve()
	return err
}

// String returns the configuration with its defaults as YAML. Secrets are replaced by ***. If the
// configuration is invalid, String returns the problems.
func (c Config) String() string {
	resolved, _, err := c.resolve()
	if err != nil {
		return err.Error()
	}
	return resolved.YAML()
}

// resolve returns the configuration of the program and its warnings.
func (c Config) resolve() (config.Config, []string, error) {
	resolved, warnings, err := config.Config(c).Resolve()
	if err != nil {
		return config.Config{}, nil, fmt.Errorf("relay: %w", err)
	}
	return resolved, warnings, nil
}
