package reconciler

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// overdue is when a test fails because an expected event has not come. It only bounds a hang, so it is longer than a
// test may wait for the fail point of the server.
const overdue = 4 * time.Minute
