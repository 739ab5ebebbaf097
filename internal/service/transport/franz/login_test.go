package franz_test

import (
	"context"
	"errors"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/franz"
)

// A transport logs in with each mechanism, in any case, for reading, publishing and joining.
func TestLogin(t *testing.T) {
	t.Parallel()
	for _, mechanism := range []string{"plain", "SCRAM-SHA-256", "scram-sha-512"} {
		cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"), kfake.EnableSASL(),
			kfake.Superuser("PLAIN", "alice", "secret"), kfake.Superuser("SCRAM-SHA-256", "alice", "secret"),
			kfake.Superuser("SCRAM-SHA-512", "alice", "secret"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(cluster.Close)
		k, err := franz.New(transport.Config{
			Brokers: cluster.ListenAddrs(),
			SASL:    &transport.SASL{Mechanism: mechanism, Username: "alice", Password: "secret"},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(k.Close)

		if err := k.Publish(t.Context(), "orders", []transport.Record{{Key: []byte("k"), Value: []byte("v")}}); err != nil {
			t.Errorf("%s: publishing: %v", mechanism, err)
		}
		served := make(served, 1)
		if err := k.Join(t.Context(), "group", []string{"orders"}, served); err == nil || len(<-served) != 1 {
			t.Errorf("%s: joining: %v", mechanism, err)
		}
	}
}

// served has the partitions of the first generation, which ends Join.
type served chan []transport.TopicPartition

func (s served) Serve(_ context.Context, g transport.Generation) error {
	change := <-g.Changes()
	change.Done()
	s <- change.Added
	return errors.New("enough")
}

func (served) Fault(error) {}
