package registry_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os/exec"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/codec/registry"
)

// The flag enables the test with Confluent's client for Python, which pip fetches (about 30 MB).
var _ = flag.Bool("registry.confluent", false, "read and write payloads with Confluent's client for Python; needs python3 with pip")

// confluentScript reads one payload of each format with Confluent's deserializers, and writes one with its Avro serializer.
const confluentScript = `
import base64, json, sys
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import wrappers_pb2

given = json.load(sys.stdin)
payload = lambda name: base64.b64decode(given[name])
registry = SchemaRegistryClient({"url": given["url"]})
place = lambda topic: SerializationContext(topic, MessageField.VALUE)
protobuf = ProtobufDeserializer(wrappers_pb2.StringValue, {"use.deprecated.format": False})
order = {"id": "o-2", "cents": 7, "currency": "CHF"}
written = AvroSerializer(registry, given["schema"])(order, place("orders"))
json.dump({
    "avro": AvroDeserializer(registry)(payload("avro"), place("orders")),
    "json": JSONDeserializer(None, schema_registry_client=registry)(payload("json"), place("notes")),
    "protobuf": protobuf(payload("protobuf"), place("texts")).value,
    "written": base64.b64encode(written).decode(),
}, sys.stdout)
`

// TestConfluentReadsAndWritesTheSamePayloads compares the formats with an independent implementation, the deserializers
// for Python. Those for Java (io.confluent:kafka-avro-serializer) are not in Maven Central, only at
// packages.confluent.io, which builds behind a mirror of Maven Central cannot reach. So Java is not tested.
func TestConfluentReadsAndWritesTheSamePayloads(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches a library with pip", "registry.confluent")
	ctx, must := t.Context(), mustCodec(t)
	f := newFake(t)
	schemas := f.client(t, registry.WithRegister())
	avro := must(schemas.Avro(ctx, registry.Schema{Subject: "orders-value", Definition: orderV2}))
	jsonSchema := must(schemas.JSONSchema(ctx, registry.Schema{Subject: "notes-value", Definition: `{"type":"object","title":"Order"}`}))
	protobuf := must(schemas.Protobuf(ctx, registry.Schema{Subject: "texts-value", Definition: `syntax = "proto3"; package google.protobuf; message StringValue { string value = 1; }`}))

	want := order{ID: "o-1", Cents: 4200, Currency: "EUR"}
	given := map[string]any{"url": f.URL(), "schema": orderV2}
	for name, c := range map[string]func() ([]byte, error){
		"avro":     func() ([]byte, error) { return avro.Encode(want) },
		"json":     func() ([]byte, error) { return jsonSchema.Encode(want) },
		"protobuf": func() ([]byte, error) { return protobuf.Encode(wrapperspb.String("grüezi")) },
	} {
		payload, err := c()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		given[name] = payload
	}

	var got struct {
		Avro, JSON order
		Protobuf   string
		Written    []byte
	}
	runPython(t, given, &got)
	if got.Avro != want || got.JSON != want || got.Protobuf != "grüezi" {
		t.Errorf("read by Confluent's client: got %+v, want %+v in each format", got, want)
	}
	var back order
	if err := avro.Decode(ctx, got.Written, &back); err != nil || back != (order{ID: "o-2", Cents: 7, Currency: "CHF"}) {
		t.Errorf("written by Confluent's client: got %+v, %v", back, err)
	}
}

// runPython runs the script in a new environment that has Confluent's client. in and out are JSON.
func runPython(t *testing.T, in, out any) {
	t.Helper()
	dir := t.TempDir()
	python := filepath.Join(dir, "bin", "python")
	for _, args := range [][]string{
		{"python3", "-m", "venv", dir},
		{python, "-m", "pip", "install", "--quiet", "confluent-kafka[avro,json,protobuf]==2.16.0"},
	} {
		if text, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, text)
		}
	}

	given, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), python, "-c", confluentScript)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(given), &stderr
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.Bytes())
	}
	if err := json.Unmarshal(text, out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}
