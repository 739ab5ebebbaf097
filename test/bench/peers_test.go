//go:build unix

package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// The flag enables the tests with other publishers, which Maven fetches (about 70 MB).
var _ = flag.Bool("bench.peers", false, "compare with real Debezium and MongoDB Kafka connector; needs a JDK with Maven")

// smallComparison are the flags of a comparison that is too short for figures.
var smallComparison = []string{"--events", "3000", "--rates", "50", "--seconds", "1", "--runs", "1"}

// TestComparisonOnSecuredServers: bench --peers measures on servers of a user, with passwords and TLS for each publisher.
func TestComparisonOnSecuredServers(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches Kafka Connect and its connectors with Maven", "bench.peers")
	user := devstack.User{Name: "bench", Password: "bench-pw"}
	s := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1,
		Mongo: devstack.MongoOptions{TLS: true, Root: user},
		Kafka: devstack.KafkaOptions{TLS: true, Users: []devstack.User{user}},
	})
	brokers, err := s.BrokersOn(devstack.SASLTLS)
	if err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	ca, file := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "outrelay.yaml")
	config := fmt.Sprintf(`watcher: bench
watch: [shop.outbox]
mongodb: { uri: "${env:BENCH_URI}", tls: { ca: %[1]s } }
kafka:
  brokers: ["%[2]s"]
  tls: { ca: %[1]s }
  sasl: { mechanism: scram-sha-512, username: %[3]s, password: "${env:BENCH_PASSWORD}" }
`, ca, brokers[0], user.Name)
	if err := errors.Join(os.WriteFile(ca, s.CA(), 0o600), os.WriteFile(file, []byte(config), 0o600)); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := kit.Context(t)
	defer cancel()
	args := append([]string{"bench", "--json", "--config", file, "--peers", "debezium,mongo-kafka"}, smallComparison...)
	cmd := exec.CommandContext(ctx, kit.Binary(t), args...)
	cmd.Env = append(os.Environ(), "BENCH_URI="+s.MongoURI(), "BENCH_PASSWORD="+user.Password)
	var progress bytes.Buffer
	cmd.Stderr = &progress
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s%s", err, &progress, text)
	}

	var r struct {
		Systems []struct {
			Name   string `json:"name"`
			Median struct {
				DrainEPS float64 `json:"drain_eps"`
				Latency  []any   `json:"latency"`
				Lost     int     `json:"lost"`
			} `json:"median"`
		} `json:"systems"`
	}
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Systems) != 6 {
		t.Errorf("%d systems", len(r.Systems))
	}
	for _, s := range r.Systems {
		if s.Median.DrainEPS <= 0 || len(s.Median.Latency) != 1 || s.Median.Lost != 0 {
			t.Errorf("%s: %+v", s.Name, s.Median)
		}
	}
}

// TestConnectEndsWithTheComparison: after kill -9 of the benchmark, no Kafka Connect goes on.
func TestConnectEndsWithTheComparison(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches Kafka Connect and its connectors with Maven", "bench.peers")
	stacktest.LockMachine(t)
	p := kit.Launch(t, "bench", kit.Binary(t), nil, append([]string{"bench", "--peers", "mongo-kafka"}, smallComparison...)...)
	const connect = "Kafka Connect with mongo-kafka is process "
	stacktest.EventuallyIn(t, 10*kit.Patience, "the turn of the connector, after outrelay", func() bool { return p.HasLogged(connect) })
	line := p.WaitForLog(connect)
	pid, err := strconv.Atoi(regexp.MustCompile(`[0-9]+$`).FindString(strings.TrimSpace(line)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("Kafka Connect does not run: %v", err)
	}

	p.Kill()
	stacktest.Eventually(t, fmt.Sprintf("process %d of Kafka Connect ends", pid), func() bool { return kit.IsGone(pid) })
}
