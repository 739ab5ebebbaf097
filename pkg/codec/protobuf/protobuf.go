// Package protobuf contains the codecs of Protobuf messages. Services that do not import it do not
// link google.golang.org/protobuf. Package codec/registry has a codec for schema registries.
package protobuf

import (
	"context"
	"fmt"
	"reflect"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/outrelay/outrelay/pkg/codec"
)

// Codec returns the codec of the binary format. It encodes pointers to generated messages, so a
// type of events is declared as event.Type[*pb.OrderPlaced]. The same message always gives the same
// bytes within one version of the library. The content type is application/protobuf.
func Codec() codec.Codec {
	return messageCodec{
		contentType: "application/protobuf",
		marshal:     proto.MarshalOptions{Deterministic: true}.Marshal,
		unmarshal:   proto.Unmarshal,
	}
}

// JSON returns the codec of the JSON format of Protobuf. It encodes the same values as Codec, and
// ignores unknown fields when it decodes. The bytes of a message may change with the version of the
// library. The content type is application/json.
func JSON() codec.Codec {
	return messageCodec{
		contentType: "application/json",
		marshal:     protojson.Marshal,
		unmarshal:   protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal,
	}
}

type messageCodec struct {
	contentType string
	marshal     func(proto.Message) ([]byte, error)
	unmarshal   func([]byte, proto.Message) error
}

func (c messageCodec) ContentType() string { return c.contentType }

func (c messageCodec) Encode(value any) ([]byte, error) {
	message, ok := value.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("protobuf: %T is not a message: pass a pointer to a generated type", value)
	}
	if !message.ProtoReflect().IsValid() {
		return nil, fmt.Errorf("protobuf: nil %T", value)
	}
	return c.marshal(message)
}

// Decode accepts a message, or a pointer to a variable for a message, which gets a new one.
func (c messageCodec) Decode(_ context.Context, data []byte, into any) error {
	if message, ok := into.(proto.Message); ok {
		return c.unmarshal(data, message)
	}

	ptr := reflect.ValueOf(into)
	if ptr.Kind() != reflect.Pointer || ptr.IsNil() || ptr.Elem().Kind() != reflect.Pointer {
		return fmt.Errorf("protobuf: %T is neither a message nor a pointer to one", into)
	}
	fresh := reflect.New(ptr.Type().Elem().Elem())
	message, ok := fresh.Interface().(proto.Message)
	if !ok {
		return fmt.Errorf("protobuf: %T is neither a message nor a pointer to one", into)
	}
	if err := c.unmarshal(data, message); err != nil {
		return err
	}

	// Only a complete message reaches the caller's variable.
	ptr.Elem().Set(fresh)
	return nil
}
