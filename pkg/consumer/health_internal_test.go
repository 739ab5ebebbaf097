package consumer

import (
	"errors"
	"testing"
	"time"
)

// TestAnOutageOfKafkaIsOneTroubleUntilItEnds: when the group loses the member, nothing measures Kafka any more. /readyz fails 30 s
// after the beginning of the outage, and not after the latest change of its reason.
func TestAnOutageOfKafkaIsOneTroubleUntilItEnds(t *testing.T) {
	t.Parallel()
	consumer := newHealth()
	now := time.Now()
	consumer.now = func() time.Time { return now }
	expectReady := func(want bool, text string) {
		t.Helper()
		ready, reasons := consumer.isReady()
		if ready != want || len(reasons) != 1 || reasons[0] != text {
			t.Errorf("ready %v because of %q, want %v because of %q", ready, reasons, want, text)
		}
	}
	consumer.begin()
	consumer.join(true)

	consumer.note(healthKafka, errors.New("EOF"))
	now = now.Add(10 * time.Second)
	consumer.note(healthKafka, errors.New("timeout"))
	expectReady(true, healthKafka+": timeout")
	consumer.join(false)
	expectReady(true, healthGroup)
	now = now.Add(readyAfter - 10*time.Second)
	expectReady(false, healthGroup)

	// A rebalance without an outage begins at its own time.
	consumer.join(true)
	consumer.join(false)
	expectReady(true, healthGroup)
}
