//go:build unix

package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

// What is planted, each a word of its own, so that a find says where it came from.
const (
	plantedPassword   = "planted-mongo-password"
	plantedKafka      = "planted-kafka-password"
	plantedToken      = "planted-collector-token"
	plantedPassphrase = "planted-key-passphrase"
	plantedPayload    = "planted-payload"
	plantedHeader     = "planted-header-value"
	plantedKey        = "planted-ordering-key"
)

var allPlanted = []string{plantedPassword, plantedKafka, plantedToken, plantedPassphrase, plantedPayload, plantedHeader, plantedKey}

// leaks are the planted words in a text, each with what stands around it.
func leaks(text string) (out []string) {
	for _, word := range allPlanted {
		if at := strings.Index(text, word); at >= 0 {
			out = append(out, word+" in …"+text[max(0, at-200):min(len(text), at+len(word)+40)])
		}
	}
	return out
}

func TestLeaksAreSeen(t *testing.T) {
	t.Parallel()
	if got := leaks("x " + plantedKafka + " y"); len(got) != 1 || !strings.HasPrefix(got[0], plantedKafka) {
		t.Errorf("%q", got)
	}
}

// Nothing that a relay and the commands print, at the finest level and in both formats, holds a secret, a payload, a
// header's value or an ordering key: neither while all goes well, nor when servers refuse and events fail, nor in what the
// runtime prints of a process that is killed by a signal, even if the driver's own log is asked for.
func TestNothingThatIsPrintedHoldsASecret(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true,
		Mongo: devstack.MongoOptions{TLS: true, Root: devstack.User{Name: "root", Password: plantedPassword}},
		Kafka: devstack.KafkaOptions{Users: []devstack.User{{Name: "relay", Password: plantedKafka}}},
	})
	brokers, err := stack.BrokersOn(devstack.SASL)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	chain, private, err := stack.ClientCert("relay")
	if err != nil {
		t.Fatal(err)
	}
	uri := stack.MongoURI() + "&tls=true&tlsCAFile=" + write("ca.pem", stack.CA()) +
		"&tlsCertificateKeyFile=" + write("both.pem", append(private, chain...)) + "&tlsCertificateKeyFilePassword=" + plantedPassphrase
	s := kit.New(t, kit.Options{Stack: stack, Brokers: brokers, MongoURI: uri, Env: []string{"PLANTED_TOKEN=" + plantedToken, "MONGODB_LOG_ALL=debug", "GOTRACEBACK=all"}, Set: map[string]any{
		"kafka.sasl": map[string]any{"mechanism": "plain", "username": "relay", "password": "${file:" + write("password", []byte(plantedKafka+"\n")) + "}"},
		"otel":       map[string]any{"endpoint": "http://collector:" + plantedToken + "@127.0.0.1:1", "token": "${env:PLANTED_TOKEN}", "metrics_interval": "1s"},
		"retry":      map[string]any{"max_attempts": 2, "base": "50ms"},
	}})
	var said strings.Builder
	keep := func(name, text string) {
		said.WriteString(text)
		for _, leak := range leaks(text) {
			t.Errorf("%s: %s", name, leak)
		}
	}
	command := func(args ...string) {
		t.Helper()
		_, out, errOut := s.Run(args...)
		keep(strings.Join(args, " "), out+errOut)
	}
	for n, format := range []string{"text", "json"} {
		s.Set("log.format", format)
		relay := s.Start()
		relay.TookOver()
		plantEvents(t, s, format)
		kit.Eventually(t, "one is dead and one waits", func() bool {
			dead, err := s.DB.Collection("outbox_dead").CountDocuments(t.Context(), bson.D{})
			return err == nil && dead == int64(n+1) && s.Held() == n+1
		})
		for _, path := range []string{"/livez", "/readyz", "/metrics", "/status", "/debug/pprof/", "/nothing"} {
			_, body := relay.Get(path)
			keep("GET "+path, body)
		}
		for _, args := range [][]string{{"status"}, {"status", "--json"}, {"doctor"}, {"doctor", "--json"}, {"validate"}, {"validate", "--json"}, {"config", "print"}, {"roles"}, {"version"}} {
			command(args...)
		}
		relay.Quit()
		<-relay.Done()
		if !strings.Contains(relay.Log(), "goroutine ") {
			t.Error("the runtime printed no goroutines")
		}
		keep("log as "+format, relay.Log())
	}
	// What the servers refuse is said without what was tried.
	s.Set("mongodb.uri", strings.Replace(uri, plantedPassword, plantedPassword+"-wrong", 1))
	s.Set("kafka.sasl.password", plantedKafka+"-wrong")
	for _, args := range [][]string{{"doctor"}, {"status"}, {"pause"}, {"config", "print"}} {
		command(args...)
	}
	s.Set("mongodb.uri", "mongodb:/root:"+plantedPassword+"@h")
	s.Set("retention", "${env:PLANTED_TOKEN}")
	command("run")
	if !strings.Contains(said.String(), "mongodb://***@") || !strings.Contains(said.String(), "fates of envelopes are written") {
		t.Error("too little was printed for the test to mean anything")
	}
}

// plantEvents appends one event that is delivered, one whose topic is missing and one that can never be sent.
func plantEvents(t *testing.T, s *kit.Scene, name string) {
	t.Helper()
	box, err := outbox.New(s.DB, outbox.WithoutTransaction())
	if err != nil {
		t.Fatal(err)
	}
	payload := bson.D{{Key: "secret", Value: plantedPayload}}
	for _, aggregate := range []string{"order", "missing"} {
		if err := box.Append(t.Context(), event.New(aggregate, plantedKey, "Placed", payload, event.WithHeader("x-planted", []byte(plantedHeader)))); err != nil {
			t.Fatal(err)
		}
	}
	wrong := bson.D{{Key: "_id", Value: "wrong-" + name}, {Key: "aggregatetype", Value: 5}, {Key: "key", Value: plantedKey}, {Key: "payload", Value: payload}}
	if _, err := s.Outbox().InsertOne(t.Context(), wrong); err != nil {
		t.Fatal(err)
	}
}
