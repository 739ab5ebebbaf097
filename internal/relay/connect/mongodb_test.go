package connect

import (
	"log/slog"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// The pool of the state client has a limit, and the given minimum is above it.
func TestOneClientIsNotLeftOpen(t *testing.T) {
	t.Parallel()
	var opened atomic.Int64
	monitor := &event.ServerMonitor{
		TopologyOpening: func(*event.TopologyOpeningEvent) { opened.Add(1) },
	}
	given := options.Client().ApplyURI("mongodb://127.0.0.1:1").SetMinPoolSize(50).SetServerMonitor(monitor)
	_, err := NewClients(config.MongoDB{ReadPreference: "primary"}, MongoHost{Options: given}, "node", 1, slog.New(slog.DiscardHandler), nil)
	if err == nil || opened.Load() != 0 {
		t.Errorf("got %v, %d clients were opened", err, opened.Load())
	}
}
