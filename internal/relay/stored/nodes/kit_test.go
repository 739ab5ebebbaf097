package nodes

import (
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

func newDatabase(t *testing.T) state.Database {
	t.Helper()
	return state.Of(stacktest.Database(t, stacktest.Client(t)))
}
