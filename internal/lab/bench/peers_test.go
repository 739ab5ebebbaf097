package bench

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
)

func TestPeersResult(t *testing.T) {
	t.Parallel()
	run := func(eps, silence float64, repeats int) peerRun {
		return peerRun{DrainEPS: eps, Latency: []peerLatency{{100, 1, 2}}, SilenceMS: silence, Repeats: repeats, MongodCPU: -1, CPUPerMillion: 12345, PeakRSS: 60}
	}
	if d := cmp.Diff(run(20, 200, 5), medianRun([]peerRun{run(30, 100, 9), run(20, 300, 5), run(10, 200, 1)})); d != "" {
		t.Errorf("medians: %s", d)
	}

	r := PeersResult{
		Date: "2026-01-02", Machine: Machine{CPU: "CPU", Cores: 2}, Versions: map[string]string{"mongodb": "6", "kafka_connect": "4"},
		Events: 1000, Payload: 1000, Runs: 1, Rates: []int{1000}, OtherCPUPct: 7,
		Systems: []PeerSystem{{Title: "a", DrainRatio: 0.5, Median: run(1234, 1500, 3)}},
	}
	want := "| system | drain, events/s (÷ outrelay) | p50 / p99 ms at 1,000/s |"
	row := "| a | 1,234 (0.50) | 1.0 / 2.0 | 12,345, unknown | 60 | silent 1.5 s, 3 repeats |\n"
	if text := r.Markdown(); !strings.Contains(text, want) || !strings.HasSuffix(text, row) || !strings.Contains(text, "one round") || !strings.Contains(text, "up to 7 %") {
		t.Errorf("table:\n%s", text)
	}
}

// TestCountedArrivals: silence and repeats count from the kill on only.
func TestCountedArrivals(t *testing.T) {
	t.Parallel()
	c, at := newCounted(1), time.Now()
	arrive := func(number, ms int) { c.recordArrival(number, at.Add(time.Duration(ms)*time.Millisecond), sender{}) }

	arrive(1, 0)
	arrive(1, 500)
	arrive(2, 1000)

	c.beginGap()
	arrive(1, 1100)
	arrive(3, 3000)
	arrive(3, 3001)
	arrive(4, 3010)

	if silence, repeats := c.endGap(); silence != 2000 || repeats != 2 {
		t.Errorf("silence %v ms, %d repeats", silence, repeats)
	}
}

// TestDrainOfAPeerIsChecked: a drain counts if each event of the backlog has arrived once.
func TestDrainOfAPeerIsChecked(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrived []int
		want    string
	}{
		"whole":    {[]int{2, 0, 1, 3}, ""},
		"hole":     {[]int{0, 2, 3}, "1 of 3 events did not arrive, and 0 were repeated"},
		"no end":   {[]int{0}, "2 of 3 events did not arrive, and 0 were repeated"},
		"repeated": {[]int{0, 1, 1, 2}, "0 of 3 events did not arrive, and 1 were repeated"},
	} {
		counted := newCounted(1)
		for _, number := range c.arrived {
			counted.recordArrival(number, time.Now(), sender{})
		}

		if err := counted.checkDrain(3); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestWarmUpOfAPeerIsNoRate: each requested rate is measured, also that of the warm-up.
func TestWarmUpOfAPeerIsNoRate(t *testing.T) {
	t.Parallel()
	var calls []int
	list, err := measureRates([]int{100, warmRate / 2, 1000}, func(rate int) (*hdrhistogram.Histogram, error) {
		calls = append(calls, rate)
		return hdrhistogram.New(1, 1000, 3), nil
	})
	want := []peerLatency{{Rate: 100}, {Rate: warmRate / 2}, {Rate: 1000}}
	if d := cmp.Diff(want, list) + cmp.Diff([]int{warmRate / 2, 100, warmRate / 2, 1000}, calls); err != nil || d != "" {
		t.Errorf("%v %s", err, d)
	}
}

// TestComparisonBeginsWithAWarmUp: the first measurement of all is on cold servers, and does not count.
func TestComparisonBeginsWithAWarmUp(t *testing.T) {
	t.Parallel()
	want := []turn{{0, 0}, {1, 0}, {1, 1}, {1, 2}, {2, 1}, {2, 2}, {2, 0}}
	if got := listTurns(3, 2); !slices.Equal(want, got) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestTextNumber: the number is found in the payload, and in a document that contains it.
func TestTextNumber(t *testing.T) {
	t.Parallel()
	payload := newTextPayload(77, 200)
	document, err := json.Marshal(map[string]string{"id": "65ab", "payload": string(payload)})
	if err != nil || len(payload) != 200 || !json.Valid(payload) {
		t.Fatalf("%d bytes, %v: %s", len(payload), err, payload)
	}
	for _, text := range [][]byte{payload, document} {
		if n, ok := textNumber(text); n != 77 || !ok {
			t.Errorf("%d %v in %s", n, ok, text)
		}
	}

	for _, text := range []string{"", "#", "#1", "#a#", "1"} {
		if n, ok := textNumber([]byte(text)); ok {
			t.Errorf("%d in %q", n, text)
		}
	}
}

// TestForeignEnvelopesAreAsLarge: drains of both kinds read the same number of bytes.
func TestForeignEnvelopesAreAsLarge(t *testing.T) {
	t.Parallel()
	for _, i := range []int{0, 7, 99, 12345} {
		own, err := newEnvelope(i, 1024)
		if err != nil {
			t.Fatal(err)
		}
		foreign, err := newForeignEnvelope(i, 1024)
		if err != nil || len(own) != len(foreign) {
			t.Errorf("event %d: %d and %d bytes, %v", i, len(own), len(foreign), err)
		}
		if _, err := foreign.LookupErr("ts"); err == nil {
			t.Error("the foreign document has a stamp")
		}
	}

	var doc bson.M
	if err := bson.Unmarshal(must(newForeignEnvelope(1, 64)), &doc); err != nil || len(doc) != 6 {
		t.Errorf("%v, %v", doc, err)
	}
}

func must(raw bson.Raw, err error) bson.Raw {
	if err != nil {
		panic(err)
	}
	return raw
}

// TestConnectorSecurity: the login of outrelay in the words of Kafka Connect, for each of its clients.
func TestConnectorSecurity(t *testing.T) {
	t.Parallel()
	if s, err := connectorSecurity(config.Kafka{}); err != nil || len(s) != 0 {
		t.Errorf("without login: %v, %v", s, err)
	}

	cfg, _, err := config.Load("", nil, []string{
		"watcher=w", "watch=a.b", "mongodb.uri=mongodb://h/?replicaSet=r", "kafka.brokers=h:1",
		"kafka.sasl.mechanism=scram-sha-512", "kafka.sasl.username=u", `kafka.sasl.password=p"\`,
	})
	if err != nil {
		t.Fatal(err)
	}
	login := cfg.Kafka
	login.TLS = &config.TLS{CA: "/ca.pem"}
	s, err := connectorSecurity(login)
	if err != nil {
		t.Fatal(err)
	}
	for _, prefix := range []string{"", "producer.", "consumer.", "admin."} {
		got := []string{s[prefix+"security.protocol"], s[prefix+"sasl.mechanism"], s[prefix+"sasl.jaas.config"], s[prefix+"ssl.truststore.location"]}
		want := []string{"SASL_SSL", "SCRAM-SHA-512", `org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="p\"\\";`, "/ca.pem"}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%q: %s", prefix, d)
		}
	}

	login.SASL.Mechanism, login.TLS = "plain", nil
	if s, err := connectorSecurity(login); err != nil || s["security.protocol"] != "SASL_PLAINTEXT" {
		t.Errorf("%v, %v", s, err)
	}
	for name, k := range map[string]config.Kafka{
		"oauthbearer": {SASL: &config.SASL{Mechanism: "oauthbearer"}},
		"server_name": {TLS: &config.TLS{ServerName: "x"}},
	} {
		if _, err := connectorSecurity(k); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestVersionsOfPeers(t *testing.T) {
	t.Parallel()
	for _, name := range append(Peers(), "connect") {
		if v := kafkaconnect.Version(name); !strings.Contains(v, ".") {
			t.Errorf("%s has version %q", name, v)
		}
	}
}
