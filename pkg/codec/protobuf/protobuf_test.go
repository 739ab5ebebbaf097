package protobuf_test

import (
	"strings"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/codec/protobuf"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMessagesComeBack(t *testing.T) {
	t.Parallel()
	in := &durationpb.Duration{Seconds: 90, Nanos: 500_000_000}
	for name, c := range map[string]codec.Codec{"application/protobuf": protobuf.Codec(), "application/json": protobuf.JSON()} {
		if c.ContentType() != name {
			t.Errorf("content type %s, want %s", c.ContentType(), name)
		}
		data, err := c.Encode(in)
		if err != nil {
			t.Fatal(err)
		}
		if name == "application/json" && string(data) != `"90.500s"` {
			t.Errorf("JSON: %s", data)
		}

		// A handler has a variable for a pointer, and other callers have a message.
		var back *durationpb.Duration
		var message durationpb.Duration
		if err := c.Decode(t.Context(), data, &back); err != nil || !proto.Equal(in, back) {
			t.Errorf("%s: decoded %v, %v", name, back, err)
		}
		if err := c.Decode(t.Context(), data, &message); err != nil || !proto.Equal(in, &message) {
			t.Errorf("%s: decoded %v, %v", name, &message, err)
		}
	}
}

func TestTheSameMessageGivesTheSameBytes(t *testing.T) {
	t.Parallel()
	fields := map[string]any{}
	for _, k := range strings.Split("abcdefghijkl", "") {
		fields[k] = k
	}
	m, err := structpb.NewStruct(fields)
	if err != nil {
		t.Fatal(err)
	}

	first, err := protobuf.Codec().Encode(m)
	for range 20 {
		next, nextErr := protobuf.Codec().Encode(m)
		if err != nil || nextErr != nil || string(first) != string(next) {
			t.Fatalf("%x and %x, %v, %v", first, next, err, nextErr)
		}
	}
}

func TestOtherValuesAreErrors(t *testing.T) {
	t.Parallel()
	c := protobuf.Codec()
	for _, v := range []any{nil, 5, durationpb.Duration{}.Seconds, (*durationpb.Duration)(nil)} {
		if data, err := c.Encode(v); err == nil {
			t.Errorf("%T was encoded as %x", v, data)
		}
	}

	var number *int
	for _, into := range []any{nil, 5, new(int), &number, (**durationpb.Duration)(nil)} {
		if err := c.Decode(t.Context(), nil, into); err == nil {
			t.Errorf("%T: no error", into)
		}
	}

	var back *durationpb.Duration
	if err := c.Decode(t.Context(), []byte{0xff}, &back); err == nil || back != nil {
		t.Errorf("broken bytes gave %v, %v", back, err)
	}
}
