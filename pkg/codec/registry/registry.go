// Package registry contains codecs for schema registries with the API of Confluent's. They write the wire format of its
// serializers: a zero byte, the id of the schema in four bytes, for Protobuf the place of the message in its file, and the
// payload. So Confluent's deserializers can read the records, and the codecs can read records of its serializers: the test flag
// -registry.confluent compares both directions with Confluent's client for Python.
//
//	schemas, err := registry.New("https://registry:8081", registry.WithRegister())
//	…
//	orders, err := schemas.Avro(ctx, registry.Schema{Subject: "outbox.event.order-value", Definition: orderSchema})
//	…
//	var OrderPlaced = event.Type[Order]{Aggregate: "order", Name: "OrderPlaced", Codec: orders}
//
// Encoding does no I/O, because it runs in a transaction: the id is looked up once, when the codec is made. Decoding looks up
// ids that it has not seen before and remembers them. While the registry cannot be reached, the error of Decode wraps
// codec.ErrUnavailable, so a consumer retries the message instead of rejecting it.
//
// The services that use this package link franz-go's registry client and libraries for Avro and JSON Schema. No other package
// of the module imports them.
package registry

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outrelay/outrelay/internal/base/webclient"
	"github.com/outrelay/outrelay/pkg/codec"
)

// ErrSchema reports that a value or a payload does not match its schema, that the registry does not have the schema, or that
// it rejects the schema as incompatible. Another attempt has the same result.
var ErrSchema = errors.New("registry: schema")

const defaultTimeout = 5 * time.Second

// Client reads schemas of one registry, and registers them. It is safe for concurrent use and has no background work.
type Client struct {
	api      *sr.Client
	timeout  time.Duration
	register bool
	schemas  cache[sr.Schema]
}

// Schema identifies a schema of the registry.
type Schema struct {
	// Subject is the name in the registry, for example "outbox.event.order-value". It is required.
	Subject string
	// Definition is the text of the schema. If it is empty, the codec uses the latest version in the registry. It must not
	// refer to other schemas of the registry, but the latest version may.
	Definition string
}

// Option configures a Client.
type Option interface{ apply(s *settings) }

type settings struct {
	login    Credentials
	tls      *tls.Config
	timeout  time.Duration
	register bool
}

type optionFunc func(s *settings)

func (f optionFunc) apply(settings *settings) { f(settings) }

// Credentials are the login of a registry.
type Credentials struct{ Username, Password string }

// WithBasicAuth logs in to the registry. Defaults to no login.
func WithBasicAuth(credentials Credentials) Option {
	return optionFunc(func(settings *settings) { settings.login = credentials })
}

// WithTLS sets the TLS configuration. Defaults to the certificate authorities of the system.
func WithTLS(tlsConfig *tls.Config) Option {
	return optionFunc(func(settings *settings) { settings.tls = tlsConfig })
}

// WithTimeout bounds one request to the registry. Defaults to 5 s, which is long enough for a slow registry and short enough for
// the messages that wait for it. Negative means no bound except the context.
func WithTimeout(timeout time.Duration) Option {
	return optionFunc(func(settings *settings) { settings.timeout = timeout })
}

// WithRegister registers a Definition that the registry does not have. Without it, the registry must have the schema already:
// usually a build registers schemas, and services only read them.
func WithRegister() Option { return optionFunc(func(settings *settings) { settings.register = true }) }

// New returns a client of the registry at an http or https address. It does no I/O. The error lists every problem of the
// arguments.
func New(address string, opts ...Option) (*Client, error) {
	var settings settings
	for _, o := range opts {
		o.apply(&settings)
	}

	var bad []error
	parsed, err := url.Parse(address)
	if err != nil || parsed.Host == "" || parsed.Scheme != "http" && parsed.Scheme != "https" {
		bad = append(bad, fmt.Errorf("registry: address %q: it must be an http or https URL", address))
	}
	// A login in the address would appear in logs and errors.
	if err == nil && parsed.User != nil {
		bad = append(bad, errors.New("registry: the address contains a login: use WithBasicAuth"))
	}
	if settings.login.Password != "" && settings.login.Username == "" {
		bad = append(bad, errors.New("registry: WithBasicAuth: the user name is empty"))
	}
	if err := errors.Join(bad...); err != nil {
		return nil, err
	}

	transport := webclient.NewTransport(settings.tls)
	apiOptions := []sr.ClientOpt{sr.URLs(address), sr.UserAgent("outrelay"), sr.HTTPClient(&http.Client{Transport: transport})}
	if settings.login != (Credentials{}) {
		apiOptions = append(apiOptions, sr.BasicAuth(settings.login.Username, settings.login.Password))
	}
	api, err := sr.NewClient(apiOptions...)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	return &Client{api: api, timeout: cmp.Or(settings.timeout, defaultTimeout), register: settings.register}, nil
}

// Avro returns a codec for an Avro schema. Values are structs with the tags of github.com/twmb/avro (`avro:"name"`), or maps.
// Decode reads records of other versions of the schema by Avro's rules of resolution. Avro blocks until the registry has
// responded or ctx ends.
func (c *Client) Avro(ctx context.Context, schema Schema) (codec.Codec, error) {
	return newSchemaCodec(ctx, c, avroFormat, schema)
}

// Protobuf returns a codec for a Protobuf schema, whose Definition is the text of the .proto file. Values are pointers to
// generated messages. A message must stay at its place among the messages of its file in all versions. Protobuf blocks until
// the registry has responded or ctx ends.
func (c *Client) Protobuf(ctx context.Context, schema Schema) (codec.Codec, error) {
	found, err := c.findSchema(ctx, schema, sr.TypeProtobuf)
	if err != nil {
		return nil, err
	}
	return &protobufCodec{id: found.ID}, nil
}

// JSONSchema returns a codec that encodes values with encoding/json and validates them against a JSON Schema. Decode validates
// against the schema of the payload. JSONSchema blocks until the registry has responded or ctx ends.
func (c *Client) JSONSchema(ctx context.Context, schema Schema) (codec.Codec, error) {
	return newSchemaCodec(ctx, c, jsonFormat, schema)
}
