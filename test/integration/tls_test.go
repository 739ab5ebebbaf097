//go:build unix

package integration

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// A relay with TLS and a client certificate to both servers keeps running while all certificates are replaced:
// its own, the servers' and their authority's.
func TestCertificatesAreReplacedWhileARelayRuns(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true,
		Mongo: devstack.MongoOptions{TLS: true},
		Kafka: devstack.KafkaOptions{TLS: true, Props: map[string]string{"listener.name.ssl.ssl.client.auth": "required"}},
	})
	brokers, err := stack.BrokersOn(devstack.TLS)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ca, cert, key := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	write := func() {
		t.Helper()
		chain, private, err := stack.ClientCert("relay")
		if err != nil {
			t.Fatal(err)
		}
		for path, text := range map[string][]byte{ca: stack.CA(), cert: chain, key: private} {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	write()
	files := map[string]any{"ca": ca, "cert": cert, "key": key}
	s := kit.New(t, kit.Options{Stack: stack, Brokers: brokers, Set: map[string]any{"mongodb.tls": files, "kafka.tls": files}})
	topics := s.ReadTopics()
	relay := s.StartRelay()
	relay.WaitTookOver()
	s.StartLoad(kit.Load{Events: 40}).WaitDone()
	s.CheckDelivery(topics)

	if err := stack.RenewTLS(); err != nil {
		t.Fatal(err)
	}
	for _, m := range append(stack.Mongods(), stack.Kafkas()...) {
		if err := m.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// The relay still trusts only the old authority, and the servers have only certificates of the new one.
	s.StartLoad(kit.Load{Events: 40, Prefix: "later-", Tolerant: true}).WaitDone()
	write()
	relay.WaitForLog("TLS files have changed and apply to new connections")
	s.CheckDelivery(topics)
	select {
	case <-relay.Done():
		t.Error("the relay ended")
	default:
	}
	if code, _, errOut := s.RunCommand("doctor"); code != 0 {
		t.Errorf("doctor: exit code %d\n%s", code, errOut)
	}
}
