package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestMain(m *testing.M) {
	stacktest.Wide(8)
	// The runtime's signal goroutine never ends. Start it before the check for leaked goroutines.
	c := make(chan os.Signal, 1)
	signal.Notify(c, os.Interrupt)
	signal.Stop(c)
	known := goleak.IgnoreTopFunction("os/signal.signal_recv")
	goleak.VerifyTestMain(stacktest.Settled(m, func(...goleak.Option) error { return goleak.Find(known) }), known)
}

const plantedSecret = "hunter2hunter2"

func runCommand(t *testing.T, env []string, args ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e bytes.Buffer
	code = runCommandLine(t.Context(), args, env, strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "outrelay.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var minimalEnv = []string{"OUTRELAY_MONGODB_URI=mongodb://user:" + plantedSecret + "@m1/shop", "OUTRELAY_KAFKA_BROKERS=k1:9092"}

func TestValidate(t *testing.T) {
	t.Parallel()
	code, out, errOut := runCommand(t, minimalEnv, "validate")
	if code != 0 || out != "ok\n" || errOut != "" {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
	}

	good := writeConfig(t, "mongodb: {uri: 'mongodb://m1/'}\nkafka: {brokers: ['k:1']}\nwatch: [a.outbox]\n")
	for _, args := range [][]string{{"validate", "--config", good}, {"validate", "-c", good}, {"--config", good, "validate"}} {
		if code, out, _ := runCommand(t, nil, args...); code != 0 || out != "ok\n" {
			t.Errorf("%v: exit code %d, output %q", args, code, out)
		}
	}

	if code, _, errOut := runCommand(t, []string{"OUTRELAY_CONFIG=" + good}, "validate"); code != 0 {
		t.Errorf("exit code %d, stderr %q", code, errOut)
	}

	bad := writeConfig(t, "mongodb: {url: x}\nkafka: {compression: zip}\n")
	code, out, errOut = runCommand(t, nil, "validate", "--config", bad, "--set", "lease.ttl=1ms")
	if code != 1 || errOut != "" {
		t.Errorf("exit code %d, stderr %q", code, errOut)
	}

	for _, want := range []string{"mongodb.url (line 1): unknown key; did you mean mongodb.uri?", `kafka.compression (line 2): found "zip"; expected one of none, gzip`, "kafka.brokers (line 2): required and not set", "--set lease.ttl: found 1ms; expected between 1s and 5m0s", "5 problems\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
}

func TestValidateJSON(t *testing.T) {
	t.Parallel()
	code, out, errOut := runCommand(t, append(minimalEnv, "OUTRELAY_UNHEARD_OF_NAME=1"), "validate", "--json")
	var v validation
	if err := json.Unmarshal([]byte(out), &v); err != nil || code != 0 || errOut != "" || !v.OK || len(v.Problems) != 0 || len(v.Warnings) != 1 {
		t.Errorf("%v: exit code %d, stdout %q, stderr %q", err, code, out, errOut)
	}
	code, out, errOut = runCommand(t, nil, "validate", "--json")
	if err := json.Unmarshal([]byte(out), &v); err != nil || code != 1 || errOut != "" || v.OK || len(v.Problems) != 2 || v.Problems[0].Path != "kafka.brokers" || !slices.Equal(v.Warnings, []string{noFile}) {
		t.Errorf("%v: exit code %d, stdout %q, stderr %q", err, code, out, errOut)
	}
}

// A pipeline checks the configuration of a pod without its secrets.
func TestValidateWithoutSecrets(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, "mongodb: {uri: '${file:/no/such/uri}'}\nkafka: {brokers: ['k:1'], tls: {ca: /no/such/ca.crt}}\nwatch: [a.outbox]\n")
	if code, out, _ := runCommand(t, nil, "validate", "--config", file); code != exitConfig || !strings.Contains(out, "2 problems") {
		t.Errorf("with secrets: exit code %d, stdout %q", code, out)
	}

	want := "warning: kafka.tls.ca is not checked: the file /no/such/ca.crt cannot be read: no such file or directory\n" +
		"warning: mongodb.uri is not checked: the file /no/such/uri cannot be read: no such file or directory\nok\n"
	if code, out, errOut := runCommand(t, nil, "validate", "--without-secrets", "--config", file); code != exitOK || out != want || errOut != "" {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
	}
	if code, out, _ := runCommand(t, nil, "validate", "--without-secrets", "--config", file, "--set", "lease.ttl=1ms"); code != exitConfig ||
		!strings.Contains(out, "--set lease.ttl: found 1ms; expected between 1s and 5m0s\n1 problem\n") {
		t.Errorf("exit code %d, stdout %q", code, out)
	}
}

func TestConfigPrint(t *testing.T) {
	t.Parallel()
	code, out, errOut := runCommand(t, minimalEnv, "config", "print", "--redacted", "--log-level", "debug", "--watch", "a.x,b.x", "--set", "watcher=w")
	var doc config.Config
	if err := yaml.Unmarshal([]byte(out), &map[string]any{}); err != nil || code != 0 || errOut != "" {
		t.Fatalf("%v: exit code %d, stdout %q, stderr %q", err, code, out, errOut)
	}

	for _, want := range []string{"uri: mongodb://***@m1/shop\n", "level: debug\n", "watcher: w\n", "- b.x\n", "memory: 32MiB\n", "ttl: 5s\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s%v", want, out, doc)
		}
	}

	if code, out, _ := runCommand(t, minimalEnv, "config", "print", "--redacted=false"); code != 1 || out != "" {
		t.Errorf("exit code %d, stdout %q", code, out)
	}
	if code, out, _ := runCommand(t, nil, "config", "print"); code != 1 || out != "" {
		t.Errorf("exit code %d, stdout %q", code, out)
	}
	if code, out, _ := runCommand(t, nil, "config", "keys"); code != 0 || !strings.Contains(out, "OUTRELAY_KAFKA_READ_BACK_BYTES") {
		t.Errorf("exit code %d, stdout %q", code, out)
	}
}

func TestSchemaAndVersion(t *testing.T) {
	t.Parallel()
	if code, out, errOut := runCommand(t, nil, "schema", "config"); code != 0 || out != string(config.Schema()) || errOut != "" {
		t.Errorf("exit code %d, stderr %q", code, errOut)
	}
	code, out, errOut := runCommand(t, nil, "version", "--json")
	var b build
	if err := json.Unmarshal([]byte(out), &b); err != nil || code != 0 || errOut != "" || b.Version == "" || b.Go != runtime.Version() {
		t.Errorf("%v: exit code %d, stdout %q, stderr %q", err, code, out, errOut)
	}
	if code, out, errOut := runCommand(t, nil, "version"); code != 0 || errOut != "" || !strings.HasPrefix(out, "outrelay ") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
	}
}

func TestCommandLineErrors(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"nonsense"}, {"validate", "x"}, {"validate", "--nonsense"}, {"config", "print", "--set", "nonsense"}} {
		code, out, errOut := runCommand(t, minimalEnv, args...)
		if code != 1 || out != "" || errOut == "" {
			t.Errorf("%v: exit code %d, stdout %q, stderr %q", args, code, out, errOut)
		}
	}

	if code, out, _ := runCommand(t, nil, "completion", "bash"); code != 0 || !strings.Contains(out, "outrelay") {
		t.Errorf("completion: %d", code)
	}
	if code, out, _ := runCommand(t, nil, "__complete", "validate", "--log-level", ""); code != 0 || !strings.Contains(out, "debug\n") {
		t.Errorf("completion of a flag: %d %q", code, out)
	}
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]int{nil: 0, errors.New("x"): 1, markTemporary(errors.New("x")): 75, fmt.Errorf("run: %w", markTemporary(errors.New("x"))): 75, reportedError(1): 1, &config.Problems{}: 1} {
		if got := exitCode(err); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
	if markTemporary(nil) != nil {
		t.Error("markTemporary(nil) is not nil")
	}
}

// TestNoOutputShowsASecret checks that no command and no log line prints a planted secret.
func TestNoOutputShowsASecret(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(plantedSecret), 0o600); err != nil {
		t.Fatal(err)
	}
	env := append([]string{"PLANTED=" + plantedSecret}, minimalEnv...)
	good := writeConfig(t, "kafka: {sasl: {mechanism: plain, username: u, password: '${file:"+secret+"}'}}\nhttp: {admin: {listen: ':1', token: '${env:PLANTED}'}}\notel: {endpoint: 'http://u:"+plantedSecret+"@o'}\n")
	bad := writeConfig(t, "mongodb: {uri: 'mongodb:/user:"+plantedSecret+"@m'}\nretention: '${env:PLANTED}'\nkafka: {sasl: {pasword: "+plantedSecret+"}}\n")
	var all strings.Builder
	for _, f := range []string{good, bad} {
		for _, args := range [][]string{{"validate"}, {"validate", "--json"}, {"config", "print"}, {"config", "print", "--redacted=false"}} {
			_, out, errOut := runCommand(t, env, append(args, "--config", f)...)
			all.WriteString(out + errOut)
		}
	}
	for _, args := range [][]string{{"validate", "--set", "mongodb.uri=" + plantedSecret}, {"config", "print", "--config", "mongodb://u:" + plantedSecret + "@h"}, {"mongodb://u:" + plantedSecret + "@h"}} {
		_, out, errOut := runCommand(t, env, args...)
		all.WriteString(out + errOut)
	}

	var logged bytes.Buffer
	p := &program{out: &logged, errOut: &logged, env: env, configFile: good}
	p.executeCommand(t.Context(), []string{"validate", "--config", good})
	for _, format := range []string{"text", "json"} {
		cfg, _, err := p.loadWithLogger()
		if err != nil {
			t.Fatal(err)
		}
		cfg.Log.Format = format
		p.newLogger(cfg.Log).Error("connecting", "config", cfg, "uri", cfg.MongoDB.URI, "sasl", cfg.Kafka.SASL, "err", fmt.Errorf("dialing %s: %v", cfg.MongoDB.URI.Reveal(), cfg.Kafka.SASL.Password))
	}
	all.WriteString(logged.String())
	if i := strings.Index(all.String(), plantedSecret); i >= 0 {
		t.Errorf("printed: …%s", all.String()[max(0, i-300):i+30])
	}
	if !strings.Contains(all.String(), "mongodb://***@m1/shop") {
		t.Error("the redacted address was not printed")
	}
}

func TestFirstSignalStopsSecondEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testSignals)
}

func testSignals(t *testing.T) {
	// The program's channel has room, too.
	received, done := make(chan os.Signal, 2), make(chan struct{})
	exited := make(chan int, 1)
	var order []string
	p := &program{errOut: &bytes.Buffer{}, exit: func(code int) { exited <- code }}
	p.onHardStop(func() { order = append(order, "first in") })
	p.onHardStop(func() { order = append(order, "last in") })
	ctx, cancel := context.WithCancelCause(t.Context())
	go p.awaitSignals(received, done, cancel)
	received <- os.Interrupt
	<-ctx.Done()
	if cause := context.Cause(ctx); cause == nil || cause.Error() != "stopped by interrupt" {
		t.Errorf("cause = %v", cause)
	}

	// A command such as timeout signals the process and then its group, which is one request to stop.
	for range 2 {
		received <- syscall.SIGTERM
		<-time.After(signalRepeat / 3)
	}
	select {
	case code := <-exited:
		t.Fatalf("exited with %d at a repeat of the first signal", code)
	default:
	}

	<-time.After(signalRepeat)
	received <- syscall.SIGTERM
	select {
	case code := <-exited:
		if code != 75 || len(order) != 2 || order[0] != "last in" {
			t.Errorf("code %d, clean-up %v", code, order)
		}
	case <-time.After(time.Minute):
		t.Fatal("the second signal did not end the process")
	}
}

func TestSignalsAreUndone(t *testing.T) {
	t.Parallel()
	p := &program{errOut: &bytes.Buffer{}, exit: func(int) { t.Error("exited") }}
	ctx, stop := p.handleSignals(t.Context())
	if ctx.Err() != nil {
		t.Error("ended before a signal")
	}
	stop()
	<-ctx.Done()
}
