package mongodb_test

import (
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

func database(t *testing.T) *mongo.Database {
	t.Helper()
	return stacktest.Database(t, stacktest.Client(t))
}

func TestAMissingPrivilegeNamesTheGrant(t *testing.T) {
	t.Parallel()
	err := mongodb.DescribeErrorWithFix(mongo.CommandError{Code: 13}, "listing", "listIndexes", "shop.outbox", "do it yourself")
	var pe *mongodb.PrivilegeError
	if !errors.As(err, &pe) || pe.Action != "listIndexes" {
		t.Fatal(err)
	}
	if want := "listing: not allowed: grant the action listIndexes on shop.outbox to the relay's user, or do it yourself"; err.Error() != want {
		t.Errorf("%q", err)
	}
	if err := mongodb.DescribeError(mongo.CommandError{Code: 11}, "listing", "x", "y"); errors.As(err, &pe) && pe.Action == "x" {
		t.Error("another error was taken for a missing privilege")
	}
}
