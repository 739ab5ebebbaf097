package kafkawire_test

import (
	"errors"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// Brokers reject a transaction timeout above their transaction.max.timeout.ms, which is 15 minutes here.
func TestTransactionTimeoutFitsTheBrokers(t *testing.T) {
	t.Parallel()
	c, err := kafkawire.NewClient(kafkawire.Config{Brokers: stacktest.Brokers(t), TransactionTimeout: 4 * time.Hour, Patience: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	var got batch.Producer
	stacktest.Eventually(t, "a producer id", func() bool {
		got, err = c.InitProducerID(t.Context(), "outrelay.test."+stacktest.Name(t), batch.Producer{ID: -1, Epoch: -1})
		if errors.Is(err, kafkawire.InvalidTransactionTimeout) {
			t.Fatal(err)
		}
		return err == nil || !kafkawire.IsRetriable(err)
	})
	if err != nil || got.ID < 0 {
		t.Errorf("got %v, %v", got, err)
	}
}
