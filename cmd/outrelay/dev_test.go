//go:build !release

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// Flags that dev cannot apply are rejected, before any server is started.
func TestDevRejectsFlagsThatItCannotApply(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"--watcher orders":                                  "watcher: dev chooses this key",
		"--watch a.outbox":                                  "watch: dev chooses this key",
		"--brokers x:1":                                     "kafka.brokers: dev chooses this key",
		"--config x.yaml":                                   "--config cannot be used with dev",
		"--set record.preset=plane":                         "plain",
		"--set record.preset=plain --scenario retry":        "--set cannot be used with --scenario",
		"--rate 0 --events 5":                               "--rate 0 cannot be used with --events",
		"--rate 0 --kill-every 2s":                          "--kill-every",
		"--rate 0 --scenario retry":                         "--rate 0 cannot be used with --scenario",
		"--rate -1":                                         "expected between 0",
		"topic outbox.event.order":                          "--brokers is missing",
		"topic outbox.event.order --brokers x:1 --count -1": "--count -1",
	} {
		var out, errOut bytes.Buffer
		p := &program{in: strings.NewReader(""), out: &out, errOut: &errOut}
		if code := p.executeCommand(t.Context(), append([]string{"dev"}, strings.Fields(args)...)); code != exitConfig || !strings.Contains(errOut.String(), want) {
			t.Errorf("dev %s: exit code %d, %q; want %q", args, code, errOut.String(), want)
		}

		if out.Len() > 0 {
			t.Errorf("dev %s: standard output %q", args, out.String())
		}
	}
}

func TestDevTopicPrintsRecords(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	brokers := stacktest.Brokers(t)
	transport := &kafka.Transport{}
	defer transport.CloseIdleConnections()
	w := &kafka.Writer{Addr: kafka.TCP(brokers...), Topic: topic, RequiredAcks: kafka.RequireAll, Transport: transport}
	defer w.Close()
	err := w.WriteMessages(t.Context(),
		kafka.Message{Key: []byte("o-1"), Value: []byte(`{"cents":4200}`), Headers: []kafka.Header{{Key: "type", Value: []byte("OrderPlaced")}}},
		kafka.Message{Value: []byte{0, 1}})
	if err != nil {
		t.Fatal(err)
	}

	var out, errOut bytes.Buffer
	p := &program{in: strings.NewReader(""), out: &out, errOut: &errOut}
	code := p.executeCommand(t.Context(), []string{"dev", "topic", topic, "--brokers", strings.Join(brokers, ","), "--count", "2"})
	want := `0@0  key=o-1  {type=OrderPlaced}  {"cents":4200}` + "\n" + `0@1  key=null  {}  "\x00\x01"` + "\n"
	if code != exitOK || out.String() != want {
		t.Errorf("exit code %d, printed\n%s%s, want\n%s", code, out.String(), errOut.String(), want)
	}
}

func TestRecordsArePrintedOnOneLine(t *testing.T) {
	t.Parallel()
	m := devstack.Message{Partition: 3, Offset: 7, Key: []byte("k"), Value: []byte("a\nb")}
	if got, want := formatMessage(m), `3@7  key=k  {}  "a\nb"`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
