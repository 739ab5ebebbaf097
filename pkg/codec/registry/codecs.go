package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"reflect"
	"slices"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/twmb/avro"
	"github.com/twmb/franz-go/pkg/sr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/outrelay/outrelay/pkg/codec"
)

// header writes and reads the bytes before a payload.
var header sr.ConfluentHeader

// appendHeader begins a payload of the schema id. index is the place of a Protobuf message, otherwise nil.
func appendHeader(id int, index []int) ([]byte, error) { return header.AppendEncode(nil, id, index) }

// cutHeader returns the id of the schema of a payload, and the rest.
func cutHeader(data []byte) (id int, rest []byte, err error) {
	id, rest, err = header.DecodeID(data)
	if err != nil {
		return 0, nil, fmt.Errorf("%w: the payload does not begin with the id of a schema: was it written by a serializer of "+
			"a schema registry? %w", ErrSchema, err)
	}
	return id, rest, nil
}

// format is a format of payloads whose schema has the type S.
type format[S any] struct {
	kind        sr.SchemaType
	contentType string

	parse func(ctx context.Context, c *Client, s sr.Schema) (S, error)

	// adapt returns the schema that reads payloads of the schema writer into values of the schema own.
	adapt func(writer, own S) (S, error)

	// encode appends the payload of v to out.
	encode func(own S, out []byte, v any) ([]byte, error)
	decode func(s S, data []byte, into any) error
}

// schemaCodec encodes with one schema, and decodes payloads of all versions that its format can read with it.
type schemaCodec[S any] struct {
	format[S]
	client  *Client
	id      int
	own     S
	adapted cache[S] // by the id of the writer's schema
}

// newSchemaCodec returns a codec for a schema that the registry has.
func newSchemaCodec[S any](ctx context.Context, client *Client, format format[S], schema Schema) (codec.Codec, error) {
	found, err := client.findSchema(ctx, schema, format.kind)
	if err != nil {
		return nil, err
	}
	own, err := format.parse(ctx, client, found.Schema)
	if err != nil {
		return nil, fmt.Errorf("registry: subject %q: %w", found.Subject, err)
	}
	return &schemaCodec[S]{format: format, client: client, id: found.ID, own: own}, nil
}

// ContentType implements codec.Codec.
func (c *schemaCodec[S]) ContentType() string { return c.contentType }

// Encode implements codec.Codec.
func (c *schemaCodec[S]) Encode(value any) ([]byte, error) {
	out, err := appendHeader(c.id, nil)
	if err != nil {
		return nil, err
	}
	out, err = c.encode(c.own, out, value)
	if err != nil {
		return nil, fmt.Errorf("%w %d: encoding %T: %w", ErrSchema, c.id, value, err)
	}
	return out, nil
}

// Decode implements codec.Codec.
func (c *schemaCodec[S]) Decode(ctx context.Context, data []byte, into any) error {
	id, rest, err := cutHeader(data)
	if err != nil {
		return err
	}
	schema := c.own
	// The schema of the writer decides how a payload is read, and whether it is valid.
	if id != c.id {
		if schema, err = c.adapted.get(id, func() (S, error) { return c.readWriter(ctx, id) }); err != nil {
			return err
		}
	}

	if err := c.decode(schema, rest, into); err != nil {
		return fmt.Errorf("%w %d: decoding into %T: %w", ErrSchema, id, into, err)
	}
	return nil
}

// readWriter returns the schema for payloads of the schema id.
func (c *schemaCodec[S]) readWriter(ctx context.Context, id int) (none S, err error) {
	found, err := c.client.schemaByID(ctx, id)
	if err != nil {
		return none, err
	}
	// An id is unique in the registry over all types of schemas.
	if found.Type != c.kind {
		return none, fmt.Errorf("%w %d is of type %v, not %v", ErrSchema, id, found.Type, c.kind)
	}

	writer, err := c.parse(ctx, c.client, found)
	if err != nil {
		return none, err
	}
	schema, err := c.adapt(writer, c.own)
	if err != nil {
		return none, fmt.Errorf("%w %d cannot be read as schema %d: %w", ErrSchema, id, c.id, err)
	}
	return schema, nil
}

var avroFormat = format[*avro.Schema]{
	kind:        sr.TypeAvro,
	contentType: "application/vnd.confluent.avro",
	parse:       parseAvro,
	adapt:       func(writer, own *avro.Schema) (*avro.Schema, error) { return avro.Resolve(writer, own) },
	encode:      func(own *avro.Schema, out []byte, v any) ([]byte, error) { return own.AppendEncode(out, v) },
	decode: func(s *avro.Schema, data []byte, into any) error {
		rest, err := s.Decode(data, into)
		// Bytes that are left mean that the payload was written with another schema than its header names.
		if err == nil && len(rest) > 0 {
			err = fmt.Errorf("%d bytes are left", len(rest))
		}
		return err
	},
}

// parseAvro parses a schema, after those to which it refers.
func parseAvro(ctx context.Context, client *Client, schema sr.Schema) (*avro.Schema, error) {
	var known avro.SchemaCache
	// A schema can name only types that the parser has seen before.
	err := client.eachReference(ctx, schema, func(_, definition string) error {
		if _, err := known.Parse(definition); err != nil {
			return fmt.Errorf("%w: %w", ErrSchema, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}

	parsed, err := known.Parse(schema.Schema)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSchema, err)
	}
	return parsed, nil
}

// protobufCodec encodes generated messages. Their own descriptor decodes them, so it needs no schema after the first look-up.
type protobufCodec struct{ id int }

// ContentType implements codec.Codec.
func (*protobufCodec) ContentType() string { return "application/vnd.confluent.protobuf" }

// Encode implements codec.Codec.
func (c *protobufCodec) Encode(value any) ([]byte, error) {
	message, ok := value.(proto.Message)
	if !ok || !message.ProtoReflect().IsValid() {
		return nil, fmt.Errorf("%w %d: %T is not a Protobuf message: pass a pointer to a generated type", ErrSchema, c.id, value)
	}

	out, err := appendHeader(c.id, placeInFile(message))
	if err != nil {
		return nil, err
	}
	// The same message always has the same bytes, so that a repeated event equals the first one.
	out, err = proto.MarshalOptions{Deterministic: true}.MarshalAppend(out, message)
	if err != nil {
		return nil, fmt.Errorf("%w %d: encoding %T: %w", ErrSchema, c.id, value, err)
	}
	return out, nil
}

// Decode accepts a message, or a pointer to a variable for a message, which gets a new one.
func (c *protobufCodec) Decode(_ context.Context, data []byte, into any) error {
	id, rest, err := cutHeader(data)
	if err != nil {
		return err
	}
	message, set := messageFor(into)
	if message == nil {
		return fmt.Errorf("registry: %T is neither a message nor a pointer to one", into)
	}

	// Messages of one file share a schema, so the payload states which of them it is.
	want := placeInFile(message)
	place, rest, err := header.DecodeIndex(rest, maxNesting)
	if err != nil {
		return fmt.Errorf("%w %d: the place of the message in its file: %w", ErrSchema, id, err)
	}
	if !slices.Equal(place, want) {
		return fmt.Errorf("%w %d: the payload is message %v of its file, and %s is message %v",
			ErrSchema, id, place, message.ProtoReflect().Descriptor().FullName(), want)
	}
	if err := proto.Unmarshal(rest, message); err != nil {
		return fmt.Errorf("%w %d: decoding into %T: %w", ErrSchema, id, message, err)
	}
	set()
	return nil
}

// maxNesting bounds the nesting of messages in a file.
const maxNesting = 32

// placeInFile returns the indexes of a message and of those around it, outermost first.
func placeInFile(message proto.Message) (place []int) {
	var descriptor protoreflect.Descriptor = message.ProtoReflect().Descriptor()
	for ; descriptor != nil; descriptor = descriptor.Parent() {
		if _, ok := descriptor.(protoreflect.MessageDescriptor); !ok {
			break
		}
		place = append(place, descriptor.Index())
	}
	slices.Reverse(place)
	return place
}

// messageFor returns the message to decode into, and a function that stores it in the variable of into.
func messageFor(into any) (message proto.Message, set func()) {
	if message, ok := into.(proto.Message); ok && message.ProtoReflect().IsValid() {
		return message, func() {}
	}

	// The variable for a message may be nil, so it gets a new message once that is decoded.
	ptr := reflect.ValueOf(into)
	if ptr.Kind() != reflect.Pointer || ptr.IsNil() || ptr.Elem().Kind() != reflect.Pointer {
		return nil, nil
	}
	fresh := reflect.New(ptr.Type().Elem().Elem())
	message, ok := fresh.Interface().(proto.Message)
	if !ok {
		return nil, nil
	}
	return message, func() { ptr.Elem().Set(fresh) }
}

// jsonFormat validates JSON in both directions.
var jsonFormat = format[*jsonschema.Schema]{
	kind:        sr.TypeJSON,
	contentType: "application/vnd.confluent.json",
	parse:       compileJSON,
	// The writer's schema decides whether the payload is valid: the reader's may be stricter.
	adapt: func(writer, _ *jsonschema.Schema) (*jsonschema.Schema, error) { return writer, nil },
	encode: func(own *jsonschema.Schema, out []byte, v any) ([]byte, error) {
		body, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		return append(out, body...), validateJSON(own, body)
	},
	decode: func(s *jsonschema.Schema, data []byte, into any) error {
		if err := validateJSON(s, data); err != nil {
			return err
		}
		return json.Unmarshal(data, into)
	},
}

// rootAddress is the address of a schema without an $id. It has no path, so no name of a reference leads to it.
var rootAddress = &url.URL{Scheme: "registry", Host: "schema"}

// compileJSON compiles a schema with those to which it refers. It loads nothing from elsewhere.
func compileJSON(ctx context.Context, client *Client, schema sr.Schema) (*jsonschema.Schema, error) {
	compiler := jsonschema.NewCompiler()
	// A schema from the network could make the service load files and addresses of its choice.
	compiler.UseLoader(noLoader{})

	// The names of references are relative to the $id of the schema, as the references in it are.
	var root struct {
		ID string `json:"$id"`
	}
	_ = json.Unmarshal([]byte(schema.Schema), &root) // true is a schema too
	base, err := rootAddress.Parse(root.ID)
	if err != nil {
		return nil, fmt.Errorf("%w: its $id: %w", ErrSchema, err)
	}

	add := func(address *url.URL, definition string) error {
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader([]byte(definition)))
		if err == nil {
			err = compiler.AddResource(address.String(), doc)
		}
		// The compiler has the schemas of schemas already.
		if err != nil && !errors.As(err, new(*jsonschema.ResourceExistsError)) {
			return fmt.Errorf("%w: %w", ErrSchema, err)
		}
		return nil
	}

	err = client.eachReference(ctx, schema, func(name, definition string) error {
		address, err := base.Parse(name)
		if err != nil {
			return fmt.Errorf("%w: the name of a reference: %w", ErrSchema, err)
		}
		return add(address, definition)
	})
	if err != nil {
		return nil, err
	}
	if err := add(rootAddress, schema.Schema); err != nil {
		return nil, err
	}

	compiled, err := compiler.Compile(rootAddress.String())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSchema, err)
	}
	return compiled, nil
}

// noLoader rejects references to other addresses: a schema must not make a service read files or web pages.
type noLoader struct{}

// Load implements jsonschema.URLLoader.
func (noLoader) Load(string) (any, error) {
	return nil, errors.New("the schema refers to an address that is not among its references in the registry")
}

// validateJSON returns an error if body is no JSON or does not match the schema.
func validateJSON(schema *jsonschema.Schema, body []byte) error {
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return err
	}
	return schema.Validate(value)
}
