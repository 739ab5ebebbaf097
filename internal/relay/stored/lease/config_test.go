package lease

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestClientOptionsSuitALease(t *testing.T) {
	t.Parallel()
	o := Tune(options.Client().ApplyURI(stacktest.MongoURI(t)))
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	if *o.RetryWrites || *o.ServerSelectionTimeout > 5*time.Second || *o.HeartbeatInterval > 2*time.Second ||
		o.Timeout != nil {
		t.Errorf("%+v", o)
	}
}
