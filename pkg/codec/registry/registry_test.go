package registry_test

import (
	"bytes"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/sr"
	"github.com/twmb/franz-go/pkg/sr/srfake"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/codec/registry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	orderV1 = `{"type":"record","name":"Order","fields":[{"name":"id","type":"string"},{"name":"cents","type":"long"}]}`
	orderV2 = `{"type":"record","name":"Order","fields":[{"name":"id","type":"string"},{"name":"cents","type":"long"},` +
		`{"name":"currency","type":"string","default":"EUR"}]}`
)

type order struct {
	ID       string `avro:"id" json:"id"`
	Cents    int64  `avro:"cents" json:"cents"`
	Currency string `avro:"currency" json:"currency,omitempty"`
}

// fake is a registry in this process that counts the requests.
type fake struct {
	*srfake.Registry
	requests atomic.Int32
	status   atomic.Int32 // the response to every request, if it is not 0
}

func newFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{Registry: srfake.New()}
	t.Cleanup(f.Close)
	f.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		f.requests.Add(1)
		if status := f.status.Load(); status != 0 {
			w.WriteHeader(int(status))
			return true
		}
		return false
	})
	return f
}

func (f *fake) client(t *testing.T, opts ...registry.Option) *registry.Client {
	t.Helper()
	c, err := registry.New(f.URL(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustCodec(t *testing.T) func(c codec.Codec, err error) codec.Codec {
	t.Helper()
	return func(c codec.Codec, err error) codec.Codec {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
}

func mustEncode(t *testing.T, c codec.Codec, v any) []byte {
	t.Helper()
	data, err := c.Encode(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestAvroIsWrittenInTheWireFormatAndReadBack(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.SeedSchema("orders-value", 1, 258, sr.Schema{Schema: orderV2})
	orders := mustCodec(t)(f.client(t).Avro(t.Context(), registry.Schema{Subject: "orders-value"}))

	before := f.requests.Load()
	data := mustEncode(t, orders, order{ID: "o-1", Cents: 5, Currency: "CHF"})
	// Zero, the id 258 in four bytes, and the fields: lengths and numbers are zigzag.
	if want := []byte("\x00\x00\x00\x01\x02\x06o-1\x0a\x06CHF"); !bytes.Equal(data, want) {
		t.Errorf("encoded: got %x, want %x", data, want)
	}
	var got order
	if err := orders.Decode(t.Context(), data, &got); err != nil || got != (order{ID: "o-1", Cents: 5, Currency: "CHF"}) {
		t.Errorf("decoded: got %+v, %v", got, err)
	}
	if n := f.requests.Load() - before; n != 0 {
		t.Errorf("requests to the registry for a known schema: got %d, want none", n)
	}
}

func TestAvroReadsOtherVersionsOfItsSchema(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := f.client(t, registry.WithRegister())
	old := mustCodec(t)(c.Avro(t.Context(), registry.Schema{Subject: "orders-value", Definition: orderV1}))
	current := mustCodec(t)(c.Avro(t.Context(), registry.Schema{Subject: "orders-value", Definition: orderV2}))

	// A consumer in another process has not seen the ids.
	reader := mustCodec(t)(f.client(t).Avro(t.Context(), registry.Schema{Subject: "orders-value", Definition: orderV2}))
	oldReader := mustCodec(t)(f.client(t).Avro(t.Context(), registry.Schema{Subject: "orders-value", Definition: orderV1}))
	var got, gotOld order
	if err := reader.Decode(t.Context(), mustEncode(t, old, order{ID: "o-1", Cents: 5}), &got); err != nil || got.Currency != "EUR" {
		t.Errorf("an old payload: got %+v, %v; want the default of the new field", got, err)
	}
	data := mustEncode(t, current, order{ID: "o-2", Cents: 7, Currency: "CHF"})
	if err := oldReader.Decode(t.Context(), data, &gotOld); err != nil || gotOld.Cents != 7 || gotOld.Currency != "" {
		t.Errorf("a new payload read by an old service: got %+v, %v", gotOld, err)
	}

	// Each id is looked up once.
	before := f.requests.Load()
	for range 3 {
		if err := oldReader.Decode(t.Context(), data, &gotOld); err != nil {
			t.Fatal(err)
		}
	}
	if n := f.requests.Load() - before; n != 0 {
		t.Errorf("requests for an id that was seen: got %d, want none", n)
	}
}

func TestAvroResolvesReferences(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.SeedSchema("money", 1, 1, sr.Schema{Schema: `{"type":"record","name":"Money","fields":[{"name":"cents","type":"long"}]}`})
	f.SeedSchema("orders-value", 1, 2, sr.Schema{
		Schema:     `{"type":"record","name":"Order","fields":[{"name":"total","type":"Money"}]}`,
		References: []sr.SchemaReference{{Name: "Money", Subject: "money", Version: 1}},
	})

	orders := mustCodec(t)(f.client(t).Avro(t.Context(), registry.Schema{Subject: "orders-value"}))
	data := mustEncode(t, orders, map[string]any{"total": map[string]any{"cents": int64(3)}})
	var got map[string]any
	if err := orders.Decode(t.Context(), data, &got); err != nil || got["total"].(map[string]any)["cents"] != int64(3) {
		t.Errorf("decoded: got %v, %v", got, err)
	}
}

func TestSchemasAreRegisteredOnlyOnRequest(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	wanted := registry.Schema{Subject: "orders-value", Definition: orderV1}
	_, err := f.client(t).Avro(t.Context(), wanted)
	if !errors.Is(err, registry.ErrSchema) || !strings.Contains(err.Error(), "WithRegister") || f.SubjectExists("orders-value") {
		t.Errorf("without WithRegister: got error %v, want ErrSchema with a hint and no schema", err)
	}
	mustCodec(t)(f.client(t, registry.WithRegister()).Avro(t.Context(), wanted))
	mustCodec(t)(f.client(t).Avro(t.Context(), wanted))

	// The registry's rules of compatibility apply: a field without a default cannot be added.
	wanted.Definition = strings.Replace(orderV2, `,"default":"EUR"`, "", 1)
	if _, err := f.client(t, registry.WithRegister()).Avro(t.Context(), wanted); err != nil && !errors.Is(err, registry.ErrSchema) {
		t.Errorf("an incompatible schema: got %v, want ErrSchema", err)
	}
	if _, err := f.client(t).Protobuf(t.Context(), registry.Schema{Subject: "orders-value"}); !errors.Is(err, registry.ErrSchema) {
		t.Errorf("a schema of another type: got %v, want ErrSchema", err)
	}
}

func TestARegistryThatIsAwayIsNoBrokenPayload(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := f.client(t, registry.WithRegister())
	old := mustCodec(t)(c.Avro(t.Context(), registry.Schema{Subject: "orders-value", Definition: orderV1}))
	data := mustEncode(t, old, order{ID: "o-1"})
	reader := mustCodec(t)(f.client(t, registry.WithRegister()).Avro(t.Context(), registry.Schema{Subject: "orders-value", Definition: orderV2}))

	var got order
	for _, status := range []int32{500, 503, 429, 401} {
		f.status.Store(status)
		if err := reader.Decode(t.Context(), data, &got); !errors.Is(err, codec.ErrUnavailable) || errors.Is(err, registry.ErrSchema) {
			t.Errorf("response %d: got %v, want ErrUnavailable", status, err)
		}
	}
	if _, err := c.Avro(t.Context(), registry.Schema{Subject: "orders-value"}); !errors.Is(err, codec.ErrUnavailable) {
		t.Errorf("a codec while the registry is away: got %v, want ErrUnavailable", err)
	}
	f.status.Store(0)
	if err := reader.Decode(t.Context(), data, &got); err != nil {
		t.Errorf("after the registry is back: %v", err)
	}
	f.Close()
	data[4] = 99 // another id
	if err := reader.Decode(t.Context(), data, &got); !errors.Is(err, codec.ErrUnavailable) {
		t.Errorf("no registry: got %v, want ErrUnavailable", err)
	}
}

func TestBrokenPayloadsAreErrSchemaAndCauseOneRequest(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := f.client(t, registry.WithRegister())
	orders := mustCodec(t)(c.Avro(t.Context(), registry.Schema{Subject: "orders-value", Definition: orderV1}))
	whole := mustEncode(t, orders, order{ID: "o-1", Cents: 5})

	before := f.requests.Load()
	for name, data := range map[string][]byte{
		"empty": {}, "short": whole[:3], "no magic byte": append([]byte{1}, whole[1:]...), "truncated": whole[:len(whole)-1],
		"more": append(bytes.Clone(whole), 0), "huge length": append(bytes.Clone(whole[:5]), 0xfe, 0xff, 0xff, 0xff, 0x0f),
		"unknown id": append([]byte{0, 0, 0, 9, 9}, whole[5:]...),
	} {
		var got order
		for range 3 {
			if err := orders.Decode(t.Context(), data, &got); !errors.Is(err, registry.ErrSchema) || errors.Is(err, codec.ErrUnavailable) {
				t.Errorf("%s: got %v, want ErrSchema", name, err)
			}
		}
	}
	if n := f.requests.Load() - before; n != 1 {
		t.Errorf("requests for broken payloads: got %d, want 1 for the unknown id", n)
	}
}

const jsonOrder = `{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","required":["id"],
	"properties":{"id":{"type":"string"},"cents":{"type":"integer","minimum":0}}}`

func TestJSONIsValidatedInBothDirections(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := f.client(t, registry.WithRegister())
	orders := mustCodec(t)(c.JSONSchema(t.Context(), registry.Schema{Subject: "orders-value", Definition: jsonOrder}))
	data := mustEncode(t, orders, order{ID: "o-1", Cents: 5})
	if !bytes.HasSuffix(data, []byte(`{"id":"o-1","cents":5}`)) || len(data) != 5+22 {
		t.Errorf("encoded: %q", data)
	}
	var got order
	if err := orders.Decode(t.Context(), data, &got); err != nil || got.Cents != 5 {
		t.Errorf("decoded: got %+v, %v", got, err)
	}

	if _, err := orders.Encode(order{ID: "o-1", Cents: -5}); !errors.Is(err, registry.ErrSchema) {
		t.Errorf("an invalid value: got %v, want ErrSchema", err)
	}
	for _, body := range []string{`{"cents":5}`, `{"id":"o-1","cents":-1}`, `{`, ``} {
		if err := orders.Decode(t.Context(), append(bytes.Clone(data[:5]), body...), &got); !errors.Is(err, registry.ErrSchema) {
			t.Errorf("payload %s: got %v, want ErrSchema", body, err)
		}
	}

	// A schema must not make the service read files or other servers.
	evil := `{"$ref":"file:///etc/passwd"}`
	if _, err := c.JSONSchema(t.Context(), registry.Schema{Subject: "evil", Definition: evil}); !errors.Is(err, registry.ErrSchema) {
		t.Errorf("a reference to a file: got %v, want ErrSchema", err)
	}
}

// Each of these schemas refers to a schema of money in its own way.
func TestJSONSchemaResolvesReferences(t *testing.T) {
	t.Parallel()
	const money = `{"$schema":"http://json-schema.org/draft-07/schema#","type":"integer","minimum":0}`
	refer := func(to string) string { return `{"properties":{"cents":{"$ref":"` + to + `"}}}` }
	moneyAs := func(name string) []sr.SchemaReference {
		return []sr.SchemaReference{{Name: name, Subject: "money", Version: 1}}
	}

	for name, schema := range map[string]sr.Schema{
		"by name":     {Schema: refer("money.json"), References: moneyAs("money.json")},
		"by address":  {Schema: refer("https://example.com/money.json"), References: moneyAs("https://example.com/money.json")},
		"like a root": {Schema: refer("schema.json"), References: moneyAs("schema.json")},
		"relative to the $id": {
			Schema:     strings.Replace(refer("money.json"), "{", `{"$id":"https://example.com/schemas/order.json",`, 1),
			References: moneyAs("money.json"),
		},
		"twice": {Schema: refer("net"), References: []sr.SchemaReference{
			{Name: "net", Subject: "net", Version: 1}, {Name: "gross", Subject: "gross", Version: 1},
		}},
		"with the schema of schemas": {Schema: refer("money.json"), References: append(
			moneyAs("money.json"), sr.SchemaReference{Name: "http://json-schema.org/draft-07/schema", Subject: "money", Version: 1},
		)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.SeedSchema("money", 1, 1, sr.Schema{Schema: money, Type: sr.TypeJSON})
			f.SeedSchema("net", 1, 2, sr.Schema{Schema: `{"$ref":"money"}`, Type: sr.TypeJSON, References: moneyAs("money")})
			f.SeedSchema("gross", 1, 3, sr.Schema{Schema: `{"$ref":"money"}`, Type: sr.TypeJSON, References: moneyAs("money")})
			schema.Type = sr.TypeJSON
			f.SeedSchema("orders-value", 1, 4, schema)

			orders, err := f.client(t).JSONSchema(t.Context(), registry.Schema{Subject: "orders-value"})
			if err != nil {
				t.Fatal(err)
			}
			var got order
			if err := orders.Decode(t.Context(), mustEncode(t, orders, order{Cents: 5}), &got); err != nil || got.Cents != 5 {
				t.Errorf("decoded: got %+v, %v", got, err)
			}
			if _, err := orders.Encode(order{Cents: -5}); !errors.Is(err, registry.ErrSchema) {
				t.Errorf("an invalid value: got %v, want ErrSchema", err)
			}
		})
	}
}

// The registry was not asked, or a person has deleted a version that payloads still have.
func TestNoFaultOfThePayloadIsErrSchema(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	orders := sr.Schema{
		Schema:     `{"type":"record","name":"Order","fields":[{"name":"total","type":"Money"}]}`,
		References: []sr.SchemaReference{{Name: "Money", Subject: "money", Version: 1}},
	}
	f.SeedSchema("money", 1, 1, sr.Schema{Schema: `{"type":"record","name":"Money","fields":[{"name":"cents","type":"long"}]}`})
	f.SeedSchema("orders-value", 1, 2, orders)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, f.URL()+"/subjects/money/versions/1", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	_ = response.Body.Close()

	c := f.client(t)
	if _, err := c.Avro(t.Context(), registry.Schema{Subject: "orders-value"}); err != nil {
		t.Errorf("a deleted reference (%s): %v", response.Status, err)
	}
	f.status.Store(http.StatusNotFound)
	if _, err := c.Avro(t.Context(), registry.Schema{Subject: "orders-value"}); !errors.Is(err, codec.ErrUnavailable) {
		t.Errorf("a proxy without a registry: got %v, want ErrUnavailable", err)
	}
}

func TestProtobufHasThePlaceOfItsMessage(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := f.client(t, registry.WithRegister())
	pb := mustCodec(t)(c.Protobuf(t.Context(), registry.Schema{Subject: "pb-value", Definition: `syntax = "proto3"; message Value {}`}))

	// google.protobuf.Int64Value is message 2 of its file, and ReservedRange is nested in message 2 of another.
	nested := &descriptorpb.DescriptorProto_ReservedRange{Start: proto.Int32(1), End: proto.Int32(2)}
	for _, v := range []proto.Message{wrapperspb.Int64(7), nested} {
		data := mustEncode(t, pb, v)
		if data[0] != 0 {
			t.Errorf("%T: first byte %x", v, data[0])
		}
		into := v.ProtoReflect().New().Interface()
		if err := pb.Decode(t.Context(), data, into); err != nil || !proto.Equal(into, v) {
			t.Errorf("%T: decoded %v, %v", v, into, err)
		}
	}

	var got *wrapperspb.Int64Value
	data := mustEncode(t, pb, wrapperspb.Int64(7))
	if err := pb.Decode(t.Context(), data, &got); err != nil || got.GetValue() != 7 {
		t.Errorf("into a variable: got %v, %v", got, err)
	}
	if err := pb.Decode(t.Context(), data, wrapperspb.String("")); !errors.Is(err, registry.ErrSchema) {
		t.Errorf("another message of the file: got %v, want ErrSchema", err)
	}
	if _, err := pb.Encode(5); !errors.Is(err, registry.ErrSchema) {
		t.Errorf("no message: got %v, want ErrSchema", err)
	}
	for _, broken := range [][]byte{data[:5], {0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0x0f}, append(bytes.Clone(data), 0xff)} {
		if err := pb.Decode(t.Context(), broken, &got); !errors.Is(err, registry.ErrSchema) {
			t.Errorf("%x: got %v, want ErrSchema", broken, err)
		}
	}
}

// roundTripper is a transport of another type than that of the library.
type roundTripper struct{ http.RoundTripper }

func TestNewIgnoresTheTransportOfTheProcess(t *testing.T) { //nolint:paralleltest // it replaces a variable of the process
	before := http.DefaultTransport
	http.DefaultTransport = roundTripper{}
	defer func() { http.DefaultTransport = before }()
	if _, err := registry.New("http://localhost:8081"); err != nil {
		t.Error(err)
	}
}

func TestNewListsEveryProblem(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"registry:8081": "http or https", "": "http or https", "http://user:secret@registry": "WithBasicAuth",
	} {
		_, err := registry.New(address)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret@") && want == "WithBasicAuth" {
			t.Errorf("address %q: got %v, want an error about %s", address, err, want)
		}
	}

	_, err := registry.New("registry", registry.WithBasicAuth(registry.Credentials{Password: "p"}))
	if err == nil || !strings.Contains(err.Error(), "user name") || !strings.Contains(err.Error(), "http or https") {
		t.Errorf("two problems: got %v", err)
	}
}

func TestCredentialsAreSent(t *testing.T) {
	t.Parallel()
	f := srfake.New(srfake.WithAuth("Basic dXNlcjpwYXNz")) // user:pass
	t.Cleanup(f.Close)
	f.SeedSchema("orders-value", 1, 1, sr.Schema{Schema: orderV1})

	for password, ok := range map[string]bool{"pass": true, "wrong": false} {
		c, err := registry.New(f.URL(), registry.WithBasicAuth(registry.Credentials{Username: "user", Password: password}))
		if err != nil {
			t.Fatal(err)
		}

		if _, err := c.Avro(t.Context(), registry.Schema{Subject: "orders-value"}); (err == nil) != ok {
			t.Errorf("password %s: got error %v", password, err)
		}
	}
}

// FuzzDecode decodes payloads of strangers: no panic, and only errors that are known.
func FuzzDecode(f *testing.F) {
	fakeRegistry := srfake.New()
	f.Cleanup(fakeRegistry.Close)
	c, err := registry.New(fakeRegistry.URL(), registry.WithRegister())
	if err != nil {
		f.Fatal(err)
	}

	const nested = `{"type":"record","name":"N","fields":[{"name":"next","type":["null","N"]},{"name":"tags","type":{"type":"array","items":"string"}},` +
		`{"name":"attributes","type":{"type":"map","values":"bytes"}}]}`
	tree, err := c.Avro(f.Context(), registry.Schema{Subject: "n", Definition: nested})
	if err != nil {
		f.Fatal(err)
	}

	seed, err := tree.Encode(map[string]any{"next": nil, "tags": []any{"a"}, "attributes": map[string]any{"k": []byte("v")}})
	if err != nil {
		f.Fatal(err)
	}

	f.Add(seed)
	f.Add(append(bytes.Clone(seed[:5]), 2, 2, 2, 2))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) >= 5 {
			copy(data, seed[:5]) // the known schema
		}
		var into any
		if err := tree.Decode(t.Context(), data, &into); err != nil && !errors.Is(err, registry.ErrSchema) {
			t.Errorf("got %v, want ErrSchema", err)
		}
	})
}
