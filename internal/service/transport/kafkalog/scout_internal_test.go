package kafkalog

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/service/transport"
)

// A topic that its first event creates is read within two seconds, and topics that exist cost a request every ten.
func TestMissingTopicsAreLookedForEverySecond(t *testing.T) {
	t.Parallel()
	cfg, err := transport.Config{Brokers: []string{"127.0.0.1:9092"}}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	look := &scout{cfg: &cfg}
	if got := look.interval(true); got != time.Second {
		t.Errorf("while topics are missing: every %v, want 1s", got)
	}
	if got := look.interval(false); got != cfg.WatchPartitions {
		t.Errorf("while all topics exist: every %v, want %v", got, cfg.WatchPartitions)
	}
}
