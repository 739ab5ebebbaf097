package process

import (
	"testing"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// Nodes that handle the same envelope in different ways have different fingerprints.
func TestTheFingerprintContainsWhatBecomesOfAnEnvelope(t *testing.T) {
	t.Parallel()
	for key, change := range map[string]func(cfg *config.Config){
		"on_drop":       func(cfg *config.Config) { cfg.OnDrop = "keep" },
		"expired":       func(cfg *config.Config) { cfg.Expired = "drop" },
		"limits.record": func(cfg *config.Config) { cfg.Limits.Record /= 2 },
	} {
		cfg := config.Default()
		change(&cfg)
		if configFingerprint(cfg) == configFingerprint(config.Default()) {
			t.Errorf("a change of %s keeps the fingerprint", key)
		}
	}
}
