package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/test/generated"
)

const (
	schemaFile  = "../../../outrelay.schema.json"
	exampleFile = "../../../outrelay.example.yaml"
)

func TestSchemaFileIsCurrent(t *testing.T) {
	t.Parallel()
	generated.Check(t, "outrelay.schema.json", string(Schema()))
}

func TestEveryKeyIsDescribedWithItsDefault(t *testing.T) {
	t.Parallel()
	docs := fieldComments()
	for key, typ := range keyTypes {
		if _, ok := sectionType(typ); ok {
			continue
		}

		var doc string
		for name, text := range docs {
			if i := strings.IndexByte(name, '.'); i > 0 && strings.EqualFold(name[i+1:], strings.ReplaceAll(key[strings.LastIndexByte(key, '.')+1:], "_", "")) {
				doc = text
				if strings.Contains(doc, "Defaults to") || strings.Contains(doc, "Required.") {
					break
				}
			}
		}

		if doc == "" {
			t.Errorf("%s has no description", key)
		}
	}

	for name, text := range docs {
		_, fieldName, isField := strings.Cut(name, ".")
		switch fieldName {
		// The descriptions of these sections state the meaning of an unset section.
		case "TLS", "SASL", "Token", "OIDC", "Create", "Cert", "Key", "Admin", "Proxy":
			continue
		}
		if isField && text != "" && !strings.Contains(text, "Defaults to") && !strings.Contains(text, "Required.") && !strings.Contains(text, "Empty matches all.") {
			t.Errorf("the description of %s does not name its default: %s", name, text)
		}
	}
}

// Users do not know the names of Go.
func TestDescriptionsDoNotBeginWithTheNameOfAField(t *testing.T) {
	t.Parallel()
	var document any
	if err := json.Unmarshal(Schema(), &document); err != nil {
		t.Fatal(err)
	}

	seen := 0
	var visit func(name string, node any)
	visit = func(name string, node any) {
		m, ok := node.(map[string]any)
		if !ok {
			return
		}
		if text, ok := m["description"].(string); ok {
			seen++
			first, _, _ := strings.Cut(text, " ")
			second := strings.TrimPrefix(text, first+" ")
			if strings.EqualFold(first, strings.ReplaceAll(name, "_", "")) && (strings.HasPrefix(second, "is ") || strings.HasPrefix(second, "are ")) {
				t.Errorf("%s: %s", name, text)
			}
		}
		for key, child := range m {
			visit(key, child)
		}
	}
	visit("", document)
	if seen < 100 {
		t.Errorf("%d descriptions", seen)
	}
}

func compileSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}

	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	if err := c.AddResource(schemaID, doc); err != nil {
		t.Fatal(err)
	}

	s, err := c.Compile(schemaID)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func parseYAML(t *testing.T, text string) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// whole is an example configuration with all sections.
const whole = `
watcher: orders
mongodb: { uri: "mongodb://m1,m2/shop?replicaSet=rs0", tls: {}, read_preference: primary }
state: { database: outrelay, prefix: outrelay_ }
watch:   [shop.outbox, "tenant_*.outbox"]
kafka:
  brokers: [kafka-1:9092, kafka-2:9092]
  tls:  {}
  sasl: { mechanism: scram-sha-512, username: u, password: "${env:PLANTED}" }
  compression: none
topics:
  template: "outbox.event.{aggregatetype}"
  rules:
    - { match: { aggregatetype: order, type: "Order*" }, to: [orders, audit] }
    - { match: { type: "Payment*" }, to: payments }
  allow:  ["outbox.*", orders, audit, payments]
  create: { partitions: 6, replication: 3, configs: { retention.ms: 604800000 } }
record:  { preset: debezium, headers: { type: "{type}" } }
recording: position
retention: 24h
lease:   { ttl: 5s, renew: 1s }
retry:   { max_attempts: 10, base: 200ms, cap: 5m }
lost_history: sweep
limits:  { memory: 32MiB, envelope: 900KiB }
http:    { listen: 127.0.0.1:9464, admin: { listen: 127.0.0.1:9465, token: "${env:PLANTED}" } }
otel:    { endpoint: "http://127.0.0.1:4318" }
log:     { level: info, format: auto }
`

const smallest = `
mongodb: { uri: "${env:MONGODB_URI}" }
kafka:   { brokers: [kafka-1:9092, kafka-2:9092] }
watch:   [shop.outbox]
`

func TestSchemaAcceptsLoadableConfigurations(t *testing.T) {
	t.Parallel()
	s := compileSchema(t)
	example, err := os.ReadFile(exampleFile)
	if err != nil {
		t.Fatal(err)
	}

	env := []string{"PLANTED=hunter2hunter2", "MONGODB_URI=mongodb://m1/", "KAFKA_PASSWORD=hunter2hunter2"}
	for name, text := range map[string]string{"whole": whole, "smallest": smallest, "example": string(example)} {
		if err := s.Validate(parseYAML(t, text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := Load(writeConfig(t, text), env, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	for _, text := range []string{"watch: 'shop.outbox, tenant_*.outbox'", "kafka: {brokers: 'a:1,b:2'}", "kafka: {brokers: ['[::1]:9092']}", "topics: {allow: 'a, b*'}", "watch: ['${env:SHOP}.outbox']"} {
		if err := s.Validate(parseYAML(t, text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}

	shown, _, err := Print("", base, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Validate(parseYAML(t, shown)); err != nil {
		t.Errorf("the defaults as they are printed: %v", err)
	}
}

func TestSchemaRejectsUnloadableConfigurations(t *testing.T) {
	t.Parallel()
	s := compileSchema(t)
	for i, text := range []string{
		"kafka: {broker: [a:1]}", "lease: {ttl: 5}", "lease: {ttl: soon}", "limits: {memory: much}", "log: {level: loud}",
		"topics: {rules: [{mach: {}}]}", "mongodb: {indexes: perhaps}", "watch: {a: b}", "watch: [outbox]", "watch: outbox", "watch: 'a.b, outbox'",
		"topics: {allow: ['[']}", "start: yesterday", "http: 1", "lease: {drain: ''}", "otel: {endpoint: 'collector:4318'}", "watcher: a b",
		"state: {database: a.b}", "http: {admin: {prefix: ops}}", "consumers: {databases: ['a*']}", "limits: {memory: -1}",
	} {
		if err := s.Validate(parseYAML(t, text)); err == nil {
			t.Errorf("%d: the schema accepts %s", i, text)
		}

		_, _, err := Load(writeConfig(t, text+"\n"), []string{"OUTRELAY_MONGODB_URI=mongodb://m1/", "OUTRELAY_KAFKA_BROKERS=k:1"}, nil)
		if err == nil {
			t.Errorf("%d: Load accepts %s", i, text)
		}
	}
}

// Addresses that no process can use are rejected by the schema, and so by the chart.
func TestSchemaRejectsUnusableAddresses(t *testing.T) {
	t.Parallel()
	compiled := compileSchema(t)

	for _, text := range []string{"kafka: {brokers: [kafka]}", "kafka: {brokers: kafka}", "kafka: {brokers: 'a:1,b'}", "mongodb: {uri: mongodb//h}", "mongodb: {uri: 'http://h'}"} {
		if err := compiled.Validate(parseYAML(t, text)); err == nil {
			t.Errorf("the schema accepts %s", text)
		}
		if _, _, err := Load(writeConfig(t, text+"\n"), nil, nil); err == nil {
			t.Errorf("Load accepts %s", text)
		}
	}
}

// The defaults comply with each form and range, so that the chart accepts them.
func TestFormsAcceptTheDefaults(t *testing.T) {
	t.Parallel()
	found := Forms()
	for path, want := range map[string]Range{
		"lease.ttl": {"duration", 1, 300, false, "expected between 1s and 5m0s"}, "limits.envelope": {"size", 1024, 15 << 20, false, "expected between 1KiB and 15MiB"},
		"retention": {"duration", 60, math.MaxInt64, true, "expected at least 1m0s, or 0 to keep envelopes forever"},
		"slots":     {"number", 1, 64, false, "expected between 1 and 64"}, "http.admin.rate": {"number", 1, 10_000, false, "expected between 1 and 10000"},
	} {
		if got := found[path].Range; got == nil || *got != want {
			t.Errorf("%s: %+v, want %+v", path, got, want)
		}
	}

	var defaults map[string]any
	if err := yaml.Unmarshal([]byte(Default().YAML()), &defaults); err != nil {
		t.Fatal(err)
	}
	for path, form := range found {
		var value any = defaults
		for step := range strings.SplitSeq(path, ".") {
			section, _ := value.(map[string]any)
			value = section[step]
		}
		if text, ok := value.(string); ok && form.Pattern != "" && !regexp.MustCompile(form.Pattern).MatchString(text) {
			t.Errorf("%s: the default %q does not match %s", path, text, form.Pattern)
		}
	}
}

// TestExampleNamesEveryKey checks that the example contains all keys, because users copy from it.
func TestExampleNamesEveryKey(t *testing.T) {
	t.Parallel()
	example, err := os.ReadFile(exampleFile)
	if err != nil {
		t.Fatal(err)
	}

	for _, key := range Keys() {
		name := key[strings.LastIndexByte(key, '.')+1:]
		if !bytes.Contains(example, []byte(name+":")) {
			t.Errorf("the example does not mention %s", key)
		}
	}

	if !bytes.HasPrefix(example, fmt.Appendf(nil, "# yaml-language-server: $schema=")) {
		t.Error("the example does not reference the schema")
	}
}

func TestPresetsAreThoseOfRouting(t *testing.T) {
	t.Parallel()
	f, _ := reflect.TypeFor[Record]().FieldByName("Preset")
	if got, want := f.Tag.Get("enum"), strings.Join(routing.PresetNames(), ","); got != want {
		t.Errorf("presets %q, want %q", got, want)
	}
}
