package relay

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// Values in Go have the meaning of the file, and a text is used as it is.
func TestValuesReachTheRelay(t *testing.T) {
	t.Parallel()
	c := Default()
	c.MongoDB.URI, c.MongoDB.Indexes, c.MongoDB.TLS = NewURI("mongodb://u:${p}@localhost/shop"), false, &TLS{Insecure: true}
	c.Kafka.Brokers, c.Kafka.SASL = []string{"a:1", "b:2"}, &SASL{Mechanism: "plain", Username: "u", Password: NewSecret("s3,cret")}
	c.Topics.Rules = []Rule{{Match: Match{AggregateType: "a*"}, To: []string{"x", "y"}}}
	c.Topics.Create = &Create{Partitions: 3, Configs: map[string]string{"retention.ms": "1000"}}
	c.Record.Preset, c.Record.Structured = "cloudevents", true
	c.Retention, c.Purge.Rate, c.OTel.SamplePercent, c.OTel.MetricsInterval = 0, 0, 0, 0
	c.Lease.TTL, c.Limits.Memory = 20*time.Second, 5<<20

	got, _, err := c.resolve()
	if err != nil {
		t.Fatal(err)
	}
	want := config.Config(c)
	want.Node, want.Address, want.Watch = got.Node, got.Address, []string{"shop.outbox"}
	want.Topics.Template, want.Topics.Max = got.Topics.Template, got.Topics.Max
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v, want\n%+v", got, want)
	}
	if got.Node == "" || got.HTTP.Listen != "off" || got.MongoDB.URI.Reveal() != "mongodb://u:${p}@localhost/shop" {
		t.Errorf("got %+v", got)
	}
	if text := c.String(); strings.Contains(text, "s3,cret") || strings.Contains(text, "${p}") || !strings.Contains(text, "cloudevents") {
		t.Errorf("printed as %s", text)
	}
}

// A literal has no defaults, so it is rejected with the fix, and so is each value that a file could not have.
func TestInvalidValuesAreReported(t *testing.T) {
	t.Parallel()
	literal := Config{Watch: []string{"shop.outbox"}}
	if err := literal.Validate(); err == nil || !strings.Contains(err.Error(), "start from the defaults") {
		t.Errorf("a literal: %v", err)
	}

	c := Default()
	c.MongoDB.URI, c.Kafka.Brokers = NewURI("mongodb://localhost/shop"), []string{"a:1"}
	if err := c.Validate(); err != nil {
		t.Errorf("the required keys: %v", err)
	}
	c.Kafka.Compression, c.OnDrop, c.Retention, c.Log.Level = "lzma", "", -1, "loud"
	c.Kafka.SASL = &SASL{Mechanism: "kerberos"}
	err := c.Validate()
	for _, want := range []string{"kafka.compression", "on_drop", "retention", "log.level", "kafka.sasl.mechanism"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is missing in: %v", want, err)
		}
	}
}
