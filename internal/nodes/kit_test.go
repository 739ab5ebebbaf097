package nodes

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

func newDatabase(t *testing.T) *mongo.Database {
	t.Helper()
	return stacktest.Database(t, stacktest.Client(t))
}
