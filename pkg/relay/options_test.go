package relay_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/relay"
)

// A relay that was made and never run has connected to nothing.
func TestNothingConnectsBeforeRun(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepted atomic.Int32
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			_ = conn.Close()
		}
	}()

	address := listener.Addr().String()
	r, err := relay.New(configOf("mongodb://"+address+"/shop?directConnection=true", address))
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Status(); got.Ready || got.Phase != relay.Starting {
		t.Errorf("status: got %+v, want starting", got)
	}

	// A connection of the test itself arrives after any that New has begun.
	own, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	// Wait until the listener has closed the connection.
	_, _ = own.Read(make([]byte, 1))
	_ = own.Close()
	_ = listener.Close()
	<-closed
	if n := accepted.Load(); n != 1 {
		t.Errorf("connections: got %d, want only that of the test", n)
	}
}

// The relay connects with the options and certificates of the service, and leaves the options as they were.
func TestRelayConnectsWithOptionsOfTheService(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true,
		Mongo: devstack.MongoOptions{TLS: true}, Kafka: devstack.KafkaOptions{TLS: true},
	})
	brokers, err := stack.BrokersOn(devstack.TLS)
	if err != nil {
		t.Fatal(err)
	}
	chain, key, err := stack.ClientCert("relay")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(stack.CA())
	secured := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}

	var commands atomic.Int32
	uri, _, _ := strings.Cut(stack.MongoURI(), "&tls")
	fromService := options.Client().ApplyURI(uri).SetTLSConfig(secured).SetMonitor(&event.CommandMonitor{
		Started: func(context.Context, *event.CommandStartedEvent) { commands.Add(1) },
	})
	client, err := mongo.Connect(options.MergeClientOptions(options.Client(), fromService))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(context.WithoutCancel(t.Context())) })
	box, err := outbox.New(client.Database("shop"), outbox.WithoutTransaction())
	if err != nil {
		t.Fatal(err)
	}

	cfg := configOf("", brokers...)
	cfg.Watch, cfg.Topics = []string{"shop.outbox"}, relay.Topics{Template: "orders", Create: &relay.Create{Partitions: 1}}
	r, err := relay.New(cfg, relay.WithMongoOptions(fromService), relay.WithKafkaTLS(secured), relay.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	before := commands.Load()
	s := &scene{box: box, topic: "orders"}
	s.run(t, r)
	waitPhases(t, r, relay.Owner)
	s.append(t, 3)
	if got := s.valuesFrom(t, brokers, 3, kgo.DialTLSConfig(secured)); !slices.Equal(got, []string{"0", "1", "2"}) {
		t.Errorf("records: got %v", got)
	}
	if commands.Load() == before {
		t.Error("the monitor of the service has seen no command of the relay")
	}
	if fromService.AppName != nil || fromService.HeartbeatInterval != nil {
		t.Error("the relay has changed the options of the service")
	}
}

// Options and keys that contradict each other are errors that name both.
func TestContradictingConnectionsAreRejected(t *testing.T) {
	t.Parallel()
	cfg := configOf("mongodb://localhost/shop", "localhost:9092")
	cfg.Kafka.TLS = &relay.TLS{}
	_, err := relay.New(cfg, relay.WithMongoOptions(options.Client().ApplyURI("mongodb://localhost/shop")), relay.WithKafkaTLS(&tls.Config{})) //nolint:gosec // never used
	for _, want := range []string{"mongodb.uri", "WithMongoOptions", "kafka.tls", "WithKafkaTLS"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want one that names %s", err, want)
		}
	}

	_, err = relay.New(configOf("mongodb://localhost/shop", "localhost:9092"), relay.WithMongoClient(&mongo.Client{}), relay.WithMongoOptions(options.Client().ApplyURI("mongodb://localhost/shop")))
	for _, want := range []string{"mongodb.uri or mongodb.tls is set as well as WithMongoClient", "WithMongoOptions is set as well as WithMongoClient"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want one that contains %s", err, want)
		}
	}
}

// A router of the service comes before the rules, and topics.allow applies to its topics too.
func TestRouterOfTheServiceChoosesTopics(t *testing.T) {
	t.Parallel()
	s := setup(t)
	other := stacktest.Topic(t, 1)
	r, err := relay.New(s.config, relay.WithLogger(slog.New(slog.DiscardHandler)),
		relay.WithRouter(func(aggregateType, name string) []string {
			if aggregateType == "order" && name == "Placed" {
				return []string{s.topic, other, other}
			}
			return nil
		}))
	if err != nil {
		t.Fatal(err)
	}

	s.run(t, r)
	waitPhases(t, r, relay.Owner)
	s.append(t, 4)
	s.readValues(t, 4)
	elsewhere := &scene{topic: other}
	if got := elsewhere.readValues(t, 4); len(got) != 4 {
		t.Errorf("records in the second topic: got %d, want 4", len(got))
	}
}

// The hook gets each change of the phase, from the start to the end.
func TestStatusHookGetsEveryPhase(t *testing.T) {
	t.Parallel()
	s := setup(t)
	var mu sync.Mutex
	var phases []relay.Phase
	r, err := relay.New(s.config, relay.WithLogger(slog.New(slog.DiscardHandler)), relay.WithStatusHook(func(st relay.Status) {
		mu.Lock()
		defer mu.Unlock()
		if len(phases) == 0 || phases[len(phases)-1] != st.Phase {
			phases = append(phases, st.Phase)
		}
	}))
	if err != nil {
		t.Fatal(err)
	}

	stop := s.run(t, r)
	waitPhases(t, r, relay.Owner)
	stacktest.Eventually(t, "the hook has got the phase of the owner", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.Contains(phases, relay.Owner)
	})

	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprint(phases); !strings.Contains(text, string(relay.Owner)) || phases[len(phases)-1] == relay.Owner {
		t.Errorf("phases: got %s, want the owner before another last phase", text)
	}
}
