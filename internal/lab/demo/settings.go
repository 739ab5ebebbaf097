package demo

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// ownKeys are the configuration keys that the demo chooses, so that its page, its checks and its keys work.
// A key covers the keys of its section.
var ownKeys = []string{
	"watcher", "watch", "slots", "node", "address", "tasks", "http", "mongodb.uri", "state",
	"kafka.brokers", "kafka.tls", "kafka.sasl", "topics.template",
}

// CheckSettings returns all problems of settings for [Options.Settings]: keys that the demo chooses, and
// those that `outrelay run` would reject.
func CheckSettings(settings []string) error {
	var errs []error
	for _, s := range settings {
		key, _, _ := strings.Cut(s, "=")
		if slices.ContainsFunc(ownKeys, func(reserved string) bool { return key == reserved || strings.HasPrefix(key, reserved+".") }) {
			errs = append(errs, fmt.Errorf("%s: dev chooses this key; to set it, start `outrelay run` next to dev", key))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}

	// The demo replaces the values of these keys.
	needed := []string{"mongodb.uri=mongodb://127.0.0.1/?replicaSet=rs0", "kafka.brokers=127.0.0.1:9092", "watch=shop.outbox"}
	_, _, err := config.Load("", nil, append(needed, settings...))
	return err
}
