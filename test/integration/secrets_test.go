//go:build unix

package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

// The planted secrets. Each is a different word, so that a leak shows its source.
const (
	plantedPassword   = "planted-mongo-password"
	plantedKafka      = "planted-kafka-password"
	plantedToken      = "planted-collector-token"
	plantedPassphrase = "planted-key-passphrase"
	plantedPayload    = "planted-payload"
	plantedHeader     = "planted-header-value"
	plantedOperator   = "planted-operator-token"
	plantedReference  = "planted-reference"
	plantedKey        = "planted-ordering-key"
)

var allPlanted = []string{plantedPassword, plantedKafka, plantedToken, plantedPassphrase, plantedPayload, plantedHeader, plantedOperator, plantedReference, plantedKey}

// leaks returns the planted words in a text, each with its surroundings.
func findLeaks(text string) (out []string) {
	for _, word := range allPlanted {
		if at := strings.Index(text, word); at >= 0 {
			out = append(out, word+" in …"+text[max(0, at-200):min(len(text), at+len(word)+40)])
		}
	}
	return out
}

func TestLeaksAreSeen(t *testing.T) {
	t.Parallel()
	if got := findLeaks("x " + plantedKafka + " y"); len(got) != 1 || !strings.HasPrefix(got[0], plantedKafka) {
		t.Errorf("%q", got)
	}
}

// No output of a relay or a command, at the finest level and in both formats, contains a secret, a payload, the
// value of a header or an ordering key. This holds in normal operation, when servers reject and events fail,
// for the goroutine dump of a process killed by a signal, and with the log of the driver.
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
	s := kit.New(t, kit.Options{Stack: stack, Brokers: brokers, MongoURI: uri, Env: []string{"PLANTED_TOKEN=" + plantedToken, "PLANTED_OPERATOR=" + plantedOperator, "PLANTED_REFERENCE=" + plantedReference, "MONGODB_LOG_ALL=debug", "GOTRACEBACK=all"}, Set: map[string]any{
		"kafka.sasl": map[string]any{"mechanism": "plain", "username": "relay", "password": "${file:" + write("password", []byte(plantedKafka+"\n")) + "}"},
		"otel":       map[string]any{"endpoint": "http://collector:" + plantedToken + "@127.0.0.1:1", "token": "${env:PLANTED_TOKEN}", "metrics_interval": "1s"},
		// A reference at a key that is no secret.
		"record.headers": map[string]any{"x-planted": "${env:PLANTED_REFERENCE}"},
		"http.admin":     map[string]any{"listen": "127.0.0.1:0", "token": "${env:PLANTED_OPERATOR}"},
		"retry":          map[string]any{"max_attempts": 2, "base": "50ms"},
	}})

	var texts strings.Builder
	keep := func(name, text string) {
		texts.WriteString(text)
		for _, leak := range findLeaks(text) {
			t.Errorf("%s: %s", name, leak)
		}
	}

	command := func(args ...string) {
		t.Helper()
		_, out, errOut := s.RunCommand(args...)
		keep(strings.Join(args, " "), out+errOut)
	}

	for n, format := range []string{"text", "json"} {
		s.SetConfig("log.format", format)
		relay := s.StartRelay()
		relay.WaitTookOver()
		plantEvents(t, s, format)
		stacktest.Eventually(t, "one is dead and one waits", func() bool {
			dead, err := s.State.Collection("letters").CountDocuments(t.Context(), bson.D{})
			return err == nil && dead == int64(n+1) && s.CountHeld() == n+1
		})

		for _, path := range []string{"/livez", "/readyz", "/metrics", "/status", "/debug/pprof/", "/nothing"} {
			_, body := relay.Get(path)
			keep("GET "+path, body)
		}
		readAsOperator(t, relay, func(path, text string) {
			// An operator may see keys.
			keep("GET "+path, strings.ReplaceAll(text, plantedKey, ""))
		})
		for _, args := range [][]string{{"status"}, {"status", "--json"}, {"doctor"}, {"doctor", "--json"}, {"validate"}, {"validate", "--json"}, {"config", "print"}, {"roles"}, {"version"}} {
			command(args...)
		}

		relay.DumpGoroutines()
		<-relay.Done()
		if !strings.Contains(relay.ReadLog(), "goroutine ") {
			t.Error("the runtime printed no goroutines")
		}

		keep("log as "+format, relay.ReadLog())
	}

	// Errors of the servers are printed without the values that were tried.
	s.SetConfig("mongodb.uri", strings.Replace(uri, plantedPassword, plantedPassword+"-wrong", 1))
	s.SetConfig("kafka.sasl.password", plantedKafka+"-wrong")
	for _, args := range [][]string{{"doctor"}, {"status"}, {"pause"}, {"config", "print"}} {
		command(args...)
	}

	s.SetConfig("mongodb.uri", "mongodb:/root:"+plantedPassword+"@h")
	s.SetConfig("retention", "${env:PLANTED_TOKEN}")
	command("run")
	if !strings.Contains(texts.String(), "mongodb://***@") || !strings.Contains(texts.String(), "its records are parked") {
		t.Error("the output is too short for a meaningful test")
	}
}

// plantEvents appends one event that is delivered, one without a topic, and one that cannot be sent.
func plantEvents(t *testing.T, s *kit.Scene, name string) {
	t.Helper()
	box, err := outbox.New(s.DB, outbox.WithoutTransaction())
	if err != nil {
		t.Fatal(err)
	}

	payload := bson.D{{Key: "secret", Value: plantedPayload}}
	for _, aggregate := range []string{"order", "missing"} {
		if err := box.Append(t.Context(), event.New(event.Aggregate{Type: aggregate, ID: plantedKey}, "Placed", event.Document(payload), event.WithHeader("x-planted", []byte(plantedHeader)))); err != nil {
			t.Fatal(err)
		}
	}

	wrong := bson.D{{Key: "_id", Value: "wrong-" + name}, {Key: "aggregatetype", Value: 5}, {Key: "key", Value: plantedKey}, {Key: "payload", Value: payload}}
	if _, err := s.Outbox().InsertOne(t.Context(), wrong); err != nil {
		t.Fatal(err)
	}
}

// readAsOperator reads everything that the API and the page show to an operator without payloads.
func readAsOperator(t *testing.T, relay *kit.Process, keep func(path, text string)) {
	t.Helper()
	_, address, _ := strings.Cut(relay.WaitForLog("operator's page and API are served"), "address")
	address = "http://" + strings.TrimSpace(strings.SplitN(strings.Trim(address, `=": `), "\"", 2)[0])
	client := &http.Client{Timeout: kit.Patience}
	defer client.CloseIdleConnections()
	get := func(path, token string) string {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+path, nil)
		if err != nil {
			t.Fatal(err)
		}

		req.Header.Set("Authorization", "Bearer "+token)
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}

		keep(path, string(text)+fmt.Sprint(res.Header))
		return string(text)
	}

	var api struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := json.Unmarshal([]byte(get("/api/openapi.json", plantedOperator)), &api); err != nil {
		t.Fatal(err)
	}

	n := 0
	for path, item := range api.Paths {
		if _, get := item["get"]; !get || strings.HasSuffix(path, "/live") {
			continue
		}
		n++
		path = strings.NewReplacer("{watcher}", "w", "{id}", "x").Replace(path)
		for _, query := range []string{"", "?id=wrong-text", "?limit=nothing"} {
			get(path+query, plantedOperator)
		}
	}

	for _, path := range []string{"/", "/strip", "/waiting", "/dead", "/dead/letter?id=wrong-text", "/lookup?q=wrong-text", "/nodes", "/log", "/scheduled", "/sagas", "/inbox", "/control", "/nothing"} {
		get(path, plantedOperator)
	}

	get("/", plantedOperator+"-wrong")
	if n < 20 || !strings.Contains(get("/api/v1/dead", plantedOperator), "wrong-text") {
		t.Errorf("%d operations were called, want at least 20 and a letter in the list", n)
	}
}
