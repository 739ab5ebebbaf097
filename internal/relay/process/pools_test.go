package process_test

import (
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestPoolsAreMeasured: the connections of both clients of the relay are metrics from the start.
func TestPoolsAreMeasured(t *testing.T) {
	t.Parallel()
	b := setup(t)
	address := freeAddress(t)
	b.start("http.listen=" + address)
	b.append(1)
	b.consume(1)

	stacktest.Eventually(t, "both clients have connections", func() bool {
		page := scrape(t, "http://"+address+"/metrics")
		for _, series := range []string{
			`outrelay_mongodb_connections{client="state",state="open"} `, `outrelay_mongodb_connections{client="stream",state="open"} `,
			`outrelay_mongodb_checkouts_total{client="state"} `, `outrelay_mongodb_checkout_seconds_total{client="stream"} `,
		} {
			_, value, found := strings.Cut(page, series)
			if !found || strings.HasPrefix(value, "0\n") {
				return false
			}
		}
		return strings.Contains(page, `outrelay_mongodb_connections{client="state",state="waiting"} `)
	})
}
