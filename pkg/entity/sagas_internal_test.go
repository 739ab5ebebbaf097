package entity

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/sagas"
)

// Another process may define a saga after the first call of a method.
func TestASagaThatIsDefinedLaterIsFound(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("orders")
	check := sagaCheck{coll: coll}
	if err := check.run(t.Context()); err != nil {
		t.Fatal(err)
	}

	types := sagas.NewMongo(coll.Database())
	if _, err := types.Prepare(t.Context(), sagas.Type{Name: "orders", Owner: "payments"}); err != nil {
		t.Fatal(err)
	}
	if err := check.run(t.Context()); err != nil {
		t.Errorf("the types are read again at once: %v", err)
	}
	long := time.Now().Add(-sagaCheckInterval)
	check.passed.Store(&long)
	if err := check.run(t.Context()); err == nil {
		t.Error("the saga is not found")
	}
}
