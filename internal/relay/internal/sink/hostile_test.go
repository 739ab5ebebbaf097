package sink

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/kafkawire/response"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// TestBrokerThatLiesAboutLengthsIsNamed: any server may listen at a configured address. The relay
// stays alive, and its error names the address.
func TestBrokerThatLiesAboutLengthsIsNamed(t *testing.T) {
	t.Parallel()
	for name, addr := range map[string]string{
		"versions":     stacktest.Hostile(t, stacktest.HugeVersions),
		"metadata":     stacktest.Hostile(t, stacktest.HugeMetadata),
		"a web server": stacktest.WebServer(t),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOpener(t, testConfig{Brokers: []string{addr}})
			c := o.kafka
			requireNamed := func(err error) {
				t.Helper()
				if !errors.Is(err, response.ErrNotKafka) || !strings.Contains(err.Error(), addr) {
					t.Errorf("got error %v, want ErrNotKafka with the address", err)
				}
			}
			_, err := c.Metadata(t.Context(), []string{"a"})
			requireNamed(err)
			requireNamed(c.Diagnose(t.Context()))
			_, err = o.fence.Health(t.Context(), []string{"a"})
			requireNamed(err)

			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if _, err := o.Open(ctx, TakeOver{Fence: fence.In{TransactionalID: "x"}}, &claims{}, newLedger(t)); err == nil {
				t.Error("a takeover succeeded without Kafka")
			}
		})
	}
}
