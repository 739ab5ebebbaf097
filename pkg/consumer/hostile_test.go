package consumer_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
)

// faults are the errors that a transport reports.
type faults chan error

func (f faults) Serve(ctx context.Context, _ transport.Generation) error {
	<-ctx.Done()
	return nil
}

func (f faults) Fault(err error) {
	select {
	case f <- err:
	default:
	}
}

// For all bytes of a listener or of another member of the group, the consumer stays alive, and its error names the
// address.
func TestBrokerThatLiesAboutLengthsIsReported(t *testing.T) {
	t.Parallel()
	for name, addr := range map[string]string{
		"versions":         stacktest.Hostile(t, stacktest.HugeVersions),
		"metadata":         stacktest.Hostile(t, stacktest.HugeMetadata),
		"a web server":     stacktest.WebServer(t),
		"a group's leader": hugeAssignment(t),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			k, err := kafkago.New(transport.Config{Brokers: []string{addr}, JoinBackoff: 10 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}

			reported, ended := make(faults, 1), make(chan error, 1)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			go func() { ended <- k.Join(ctx, "g", []string{"a"}, reported) }()

			select {
			case err := <-reported:
				if !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), "does not speak the Kafka protocol") {
					t.Errorf("%v", err)
				}
			case <-ctx.Done():
				t.Error("nothing is reported")
			}

			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// hugeAssignment is a broker of a group whose leader assigns two thousand million topics.
func hugeAssignment(t *testing.T) string {
	t.Helper()
	c, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(c.Close)
	c.ControlKey(int16(kmsg.SyncGroup), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		resp := req.ResponseKind().(*kmsg.SyncGroupResponse)
		resp.MemberAssignment = stacktest.HugeArray(2)
		return resp, nil, true
	})

	return c.ListenAddrs()[0]
}
