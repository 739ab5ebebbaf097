//go:build unix

package fault

import (
	"strings"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// silent returns a proxy server whose logger discards everything. The type parameters avoid naming the type of
// the logger.
func newSilentServer[M, L any](newServer func(M, L) *toxiproxy.ApiServer, m M) *toxiproxy.ApiServer {
	var none L
	return newServer(m, none)
}

// newProxy returns a proxy for an address, which runs until the end of the test.
func newProxy(t *testing.T, upstream string) *toxiproxy.Proxy {
	t.Helper()
	// The address stays free for some time.
	addr, err := devstack.FreeAddress()
	mustSucceed(t, err)
	return newProxyAt(t, addr, upstream)
}

// newProxyAt is newProxy with the address of the proxy.
func newProxyAt(t *testing.T, addr, upstream string) *toxiproxy.Proxy {
	t.Helper()
	p := toxiproxy.NewProxy(newSilentServer(toxiproxy.NewServer, toxiproxy.NewMetricsContainer(nil)), "proxy", addr, upstream)
	mustSucceed(t, p.Start())
	t.Cleanup(p.Stop)
	return p
}

// The network between the relay and MongoDB is cut, drops all packets, or is slow, for longer than a lease. The
// relay then continues from its position. No other node has acquired the lease, so it is suspended and not lost
// (N2).
func TestConnectionsToMongoDBAreCut(t *testing.T) {
	t.Parallel()
	direct := options.Client().ApplyURI(stacktest.MongoURI(t))
	proxy := newProxy(t, direct.Hosts[0])
	s := kit.New(t, kit.Options{MongoURI: "mongodb://" + proxy.Listen + "/?directConnection=true"})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	epoch := s.CurrentEpoch()
	load := s.StartLoad(kit.Load{Rate: steadyRate()})
	listen := proxy.Listen
	for name, fault := range map[string]func() (heal func()){
		"cut": func() func() {
			proxy.Stop()
			return func() {
				proxy.Listen = listen
				mustSucceed(t, proxy.Start())
			}
		},
		"swallowed": func() func() {
			return addToxic(t, proxy, `{"name":"hole","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
		},
		"slow": func() func() {
			return addToxic(t, proxy, `{"name":"slow","type":"latency","stream":"downstream","attributes":{"latency":150,"jitter":50}}`)
		},
	} {
		topics.WaitDistinct(s.Ledger.CountCommitted() + 100)
		heal := fault()
		outlastLease(t)
		heal()
		began := time.Now()
		topics.WaitDistinct(s.Ledger.CountCommitted())
		t.Logf("%s: everything delivered %s after it was healed", name, time.Since(began).Round(time.Millisecond))
	}

	load.Stop()
	t.Log(s.CheckDelivery(topics))
	history.CheckHistory()
	if now := s.CurrentEpoch(); now != epoch {
		t.Errorf("epoch %d, want %d: no other node wanted the lease", now, epoch)
	}
}

// outlastLease waits for longer than a lease, while the load continues.
func outlastLease(t *testing.T) {
	t.Helper()
	waitFor(t, 3*time.Second)
}

func addToxic(t *testing.T, p *toxiproxy.Proxy, json string) func() {
	t.Helper()
	x, err := p.Toxics.AddToxicJson(strings.NewReader(json))
	mustSucceed(t, err)
	return func() { mustSucceed(t, p.Toxics.RemoveToxic(t.Context(), x.Name)) }
}
