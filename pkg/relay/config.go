package relay

import (
	"fmt"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// Config is the configuration of a relay: the keys of outrelay.yaml, which docs/configuration.md describes, with the same
// meaning. Start from [Default] or [Load]: in a field that has a default, zero is a value like any other, as in the file. MongoDB.URI
// and Kafka.Brokers are required. A text is used as it is: ${env:NAME} and ${file:path} have a meaning only in a file, see [Load].
type Config config.Config

// Sections and values of a Config.
type (
	MongoDB     = config.MongoDB
	State       = config.State
	TLS         = config.TLS
	Kafka       = config.Kafka
	ReadBack    = config.ReadBack
	SASL        = config.SASL
	Token       = config.Token
	OIDC        = config.OIDC
	Mapping     = config.Mapping
	Topics      = config.Topics
	Rule        = config.Rule
	Match       = config.Match
	Create      = config.Create
	Record      = config.Record
	Purge       = config.Purge
	DeadLetters = config.DeadLetters
	Lease       = config.Lease
	Retry       = config.Retry
	Limits      = config.Limits
	HTTP        = config.HTTP
	Admin       = config.Admin
	OTel        = config.OTel
	Log         = config.Log

	Start  = config.Start  // where a watcher without a position begins; zero: with the events in the outbox
	Size   = config.Size   // a number of bytes
	URI    = config.URI    // an address that may contain a login, which is printed as ***; see [NewURI]
	Secret = config.Secret // a text that is printed as ***; see [NewSecret]
)

// NewURI returns a value for MongoDB.URI and OTel.Endpoint.
func NewURI(text string) URI { return config.NewURI(text) }

// NewSecret returns a value for passwords and tokens.
func NewSecret(text string) Secret { return config.NewSecret(text) }

// Default returns the defaults of outrelay.yaml, except that the relay does not listen: the service mounts [Relay.Handler].
// Defaults that depend on other values, such as Watch, are unset in it.
func Default() Config {
	cfg := config.Default()
	cfg.HTTP.Listen = "off"
	return Config(cfg)
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
