package config

import (
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/routing"
)

// DocumentMapping returns how envelopes are read from documents. nil means the fields of the contract. The configuration must
// be valid.
func (c *Config) DocumentMapping() *envelope.Mapping {
	mapping, _ := envelope.NewMapping(c.fieldNames())
	return mapping
}

// fieldNames returns the arguments of [envelope.NewMapping].
func (c *Config) fieldNames() (names envelope.Names, java bool) {
	return routing.FieldNames(c.Record.Preset, envelope.Names(c.Mapping))
}

// readsForeignDocuments reports whether the watched documents have the shape of another program.
func (c *Config) readsForeignDocuments() bool {
	return c.Mapping != Mapping{} || c.Record.Preset == routing.Connector
}

// Routing returns the configuration of the router.
func (c *Config) Routing() routing.Config {
	cfg := routing.Config{Template: c.Topics.Template, Allow: c.Topics.Allow, Max: c.Topics.Max, Mapping: c.DocumentMapping()}
	for _, rule := range c.Topics.Rules {
		cfg.Rules = append(cfg.Rules, routing.Rule{
			AggregateType: rule.Match.AggregateType,
			Type:          rule.Match.Type,
			Database:      rule.Match.Database,
			Collection:    rule.Match.Collection,
			Headers:       rule.Match.Headers,
			Fields:        rule.Match.Fields,
			To:            rule.To,
			Drop:          rule.Drop,
		})
	}
	return cfg
}

// Preset returns the configuration of the record format.
func (c *Config) Preset() routing.PresetConfig {
	return routing.PresetConfig{
		Name: c.Record.Preset, Watcher: c.Watcher, Structured: c.Record.Structured, Source: c.Record.Source, Headers: c.Record.Headers,
		Placement: c.Record.Placement, JSON: c.Record.JSON, Mapping: c.DocumentMapping(), MaxRecord: int(c.Limits.Record),
	}
}
