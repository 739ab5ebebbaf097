// Package local reads the addresses of the servers for the examples from the environment. The defaults are the default ports
// of MongoDB and Kafka on this machine.
package local

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// MongoURI returns MONGODB_URI.
func MongoURI() string {
	return cmp.Or(os.Getenv("MONGODB_URI"), "mongodb://127.0.0.1:27017/?replicaSet=rs0")
}

// Brokers returns KAFKA_BROKERS, a list that is separated by commas.
func Brokers() []string {
	return strings.Split(cmp.Or(os.Getenv("KAFKA_BROKERS"), "127.0.0.1:9092"), ",")
}

// Main runs an example with the database shop until it ends or the process gets an interrupt. It exits with 1 after an error.
func Main(run func(ctx context.Context, db *mongo.Database) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	client, err := mongo.Connect(options.Client().ApplyURI(MongoURI()))
	if err == nil {
		err = run(ctx, client.Database("shop"))
		// The process ends now, so a connection that cannot be closed does no harm.
		_ = client.Disconnect(context.WithoutCancel(ctx))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:gocritic // the signal handler ends with the process
	}
}
