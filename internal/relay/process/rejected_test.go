package process_test

import (
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"

	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/process"
)

// A program that embeds the relay goes on after an error of New, and has nothing to close.
func TestARejectedConfigurationLeavesNoClient(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cfg, _, err := config.Load("", b.env, nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg.OTel.TLS = &config.TLS{CA: filepath.Join(t.TempDir(), "missing")}

	var open atomic.Int64
	monitor := &mongoevent.ServerMonitor{
		TopologyOpening: func(*mongoevent.TopologyOpeningEvent) { open.Add(1) },
		TopologyClosed:  func(*mongoevent.TopologyClosedEvent) { open.Add(-1) },
	}
	host := process.Host{Mongo: connect.MongoHost{Options: options.Client().ApplyURI(stacktest.MongoURI(t)).SetServerMonitor(monitor)}}
	if _, err := process.New(cfg, "test", slog.New(slog.DiscardHandler), process.EmbeddedIn(host)); err == nil {
		t.Fatal("a certificate authority that does not exist is accepted")
	}
	if n := open.Load(); n != 0 {
		t.Errorf("%d clients of MongoDB are left open", n)
	}
}
