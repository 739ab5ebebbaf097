package config

import (
	"bytes"

	"go.yaml.in/yaml/v3"
)

// Redacted returns the configuration as YAML, with *** in place of each secret. If there are no secrets, [Load] can read it.
func (c Config) Redacted() string {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)

	// All types in the configuration can be encoded.
	if err := e.Encode(c); err != nil {
		panic("config: encoding the configuration: " + err.Error())
	}
	return b.String()
}
