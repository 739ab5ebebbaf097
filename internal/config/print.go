package config

import (
	"bytes"

	"go.yaml.in/yaml/v3"
)

// Redacted is the configuration in effect as YAML, every secret replaced by ***. Without secrets, [Load] reads it again.
func (c Config) Redacted() string {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(c); err != nil {
		panic("config: a configuration that cannot be printed: " + err.Error()) // every type in it can be
	}
	return b.String()
}
