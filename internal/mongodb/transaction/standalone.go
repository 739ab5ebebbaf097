package transaction

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// ErrStandalone means that a transaction was started on a standalone server, which has no transactions.
var ErrStandalone = errors.New("transactions need a replica set, and this server is a standalone: " +
	"restart mongod with --replSet and run rs.initiate()")

// illegalOperation is the error code of the server for a transaction on a standalone. The server uses it for
// other errors as well.
const illegalOperation = 20

// explainStandalone adds ErrStandalone to err if the server is a standalone. Because the error code is
// ambiguous, it reads the server's kind.
func explainStandalone(ctx context.Context, client *mongo.Client, err error) error {
	var server mongo.ServerError
	if !errors.As(err, &server) || !server.HasErrorCode(illegalOperation) {
		return err
	}

	if standalone, helloErr := IsStandalone(ctx, client); helloErr != nil || !standalone {
		return err
	}
	return fmt.Errorf("%w: %w", ErrStandalone, err)
}

// IsStandalone reports whether the server is a standalone. It sends one command of at most 5 s, outside of the transaction of ctx, also
// if ctx has ended.
func IsStandalone(ctx context.Context, client *mongo.Client) (bool, error) {
	ctx, cancel := context.WithTimeout(Outside(context.WithoutCancel(ctx)), 5*time.Second)
	defer cancel()

	var is struct {
		SetName string `bson:"setName"`
		Msg     string `bson:"msg"`
	}
	err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&is)
	// A member of a replica set has a set name, and a mongos responds with isdbgrid.
	return err == nil && is.SetName == "" && is.Msg != "isdbgrid", err
}
