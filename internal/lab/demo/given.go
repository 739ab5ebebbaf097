package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/operate/doctor"
)

// reachGiven returns a *[doctor.Unusable] if a server that the environment names cannot be used. The text is that of
// `outrelay doctor` and `outrelay run`, with the variables of the environment in place of the keys of the configuration.
func reachGiven(ctx context.Context, options devstack.Options) error {
	cfg := config.Default()
	uri, brokers := options.Given()
	if uri != "" {
		cfg.MongoDB.URI = config.NewURI(uri)
		if err := doctor.ReachMongo(ctx, cfg); err != nil {
			return nameVariable(err, "mongodb.uri", devstack.EnvMongoDB)
		}
	}

	if brokers != "" {
		cfg.Kafka.Brokers = strings.Split(brokers, ",")
		if err := doctor.ReachKafka(ctx, cfg); err != nil {
			return nameVariable(err, "kafka.brokers", devstack.EnvKafka)
		}
	}
	return nil
}

// nameVariable replaces a key of the configuration in the fix of err by the variable that has its value.
func nameVariable(err error, key, variable string) error {
	unusable, ok := errors.AsType[*doctor.Unusable](err)
	if !ok {
		return fmt.Errorf("%s: %w", variable, err)
	}
	named := *unusable
	named.Fix = strings.ReplaceAll(unusable.Fix, key, variable)
	return &named
}
