package scheduled

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// overdue is when a test fails because an expected event has not come. It only bounds a hang, so it is longer than a
// test may wait for the fail point of the server.
const overdue = 4 * time.Minute

func newDatabase(t *testing.T) *mongo.Database {
	t.Helper()
	return stacktest.Database(t, stacktest.Client(t))
}
