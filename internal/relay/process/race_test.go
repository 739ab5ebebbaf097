package process_test

import (
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// TestN05_LosingARaceForTheIdHaltsNobody: during the takeover, the coordinator reports again and again that another
// process has the transactional id. The owner retries until it has the id.
func TestN05_LosingARaceForTheIdHaltsNobody(t *testing.T) {
	t.Parallel()
	b := setup(t)
	kc, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, b.topic))
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(kc.Close)
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, Err: kerr.ProducerFenced, Count: 4})
	b.env = append(b.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(kc.ListenAddrs(), ","))
	b.start()
	log := b.log.wait(t, "took over")
	if strings.Contains(log, "halted") || strings.Contains(log, "epoch=2") {
		t.Errorf("a race for the id ended the term:\n%s", log)
	}
}
