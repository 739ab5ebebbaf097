package scheduled

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestMain(m *testing.M) {
	stacktest.Wide(8)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}
