//go:build unix

package fault

import (
	"strings"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// silent makes the server of proxies with a logger that says nothing, without naming the logger's type.
func silent[M, L any](newServer func(M, L) *toxiproxy.ApiServer, m M) *toxiproxy.ApiServer {
	var none L
	return newServer(m, none)
}

// between is a proxy in front of an address, for as long as the test runs.
func between(t *testing.T, upstream string) *toxiproxy.Proxy {
	t.Helper()
	addr, err := devstack.FreeAddress() // it is left for a while
	must(t, err)
	p := toxiproxy.NewProxy(silent(toxiproxy.NewServer, toxiproxy.NewMetricsContainer(nil)), "proxy", addr, upstream)
	must(t, p.Start())
	t.Cleanup(p.Stop)
	return p
}

// The network between the relay and MongoDB is cut, swallows everything, and is slow, for longer than a lease lasts. The
// relay goes on where it was; as nobody else took the lease, it is suspended and never lost (N2).
func TestConnectionsToMongoDBAreCut(t *testing.T) {
	t.Parallel()
	direct := options.Client().ApplyURI(stacktest.MongoURI(t))
	proxy := between(t, direct.Hosts[0])
	s := kit.New(t, kit.Options{MongoURI: "mongodb://" + proxy.Listen + "/?directConnection=true"})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	epoch := s.CurrentEpoch()
	load := s.StartLoad(kit.Load{Rate: 70})
	listen := proxy.Listen
	for name, fault := range map[string]func() (heal func()){
		"cut": func() func() {
			proxy.Stop()
			return func() {
				proxy.Listen = listen
				must(t, proxy.Start())
			}
		},
		"swallowed": func() func() {
			return toxic(t, proxy, `{"name":"hole","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
		},
		"slow": func() func() {
			return toxic(t, proxy, `{"name":"slow","type":"latency","stream":"downstream","attributes":{"latency":150,"jitter":50}}`)
		},
	} {
		topics.WaitDistinct(s.Ledger.CountCommitted() + 100)
		heal := fault()
		longerThanALease(t)
		heal()
		began := time.Now()
		topics.WaitDistinct(s.Ledger.CountCommitted())
		t.Logf("%s: everything delivered %s after it was healed", name, time.Since(began).Round(time.Millisecond))
	}

	load.Stop()
	t.Log(s.CheckDelivery(topics))
	history.CheckHistory()
	if now := s.CurrentEpoch(); now != epoch {
		t.Errorf("epoch %d, and %d before: nobody else wanted the lease", now, epoch)
	}
}

// longerThanALease waits while the load goes on.
func longerThanALease(t *testing.T) {
	t.Helper()
	pause(t, 3*time.Second)
}

func toxic(t *testing.T, p *toxiproxy.Proxy, json string) func() {
	t.Helper()
	x, err := p.Toxics.AddToxicJson(strings.NewReader(json))
	must(t, err)
	return func() { must(t, p.Toxics.RemoveToxic(t.Context(), x.Name)) }
}
