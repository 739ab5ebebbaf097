package protobuf_test

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/outrelay/outrelay/pkg/codec/protobuf"
	"github.com/outrelay/outrelay/pkg/event"
)

// The type of the events has pointers to the generated message. Here, a type of the library stands in for it.
func ExampleCodec() {
	orderDelayed := event.Type[*durationpb.Duration]{Aggregate: "order", Name: "OrderDelayed", Codec: protobuf.Codec()}
	body, err := orderDelayed.New("o-1", durationpb.New(90*time.Second)).Payload()
	fmt.Printf("%x %v\n", body, err)

	delay, err := orderDelayed.Decode(context.Background(), body)
	fmt.Println(delay.AsDuration(), err)
	// Output:
	// 085a <nil>
	// 1m30s <nil>
}

// The JSON format of the same messages, for consumers without the generated code.
func ExampleJSON() {
	orderDelayed := event.Type[*durationpb.Duration]{Aggregate: "order", Name: "OrderDelayed", Codec: protobuf.JSON()}
	body, err := orderDelayed.New("o-1", durationpb.New(90*time.Second)).Payload()
	fmt.Println(string(body), err)
	// Output: "90s" <nil>
}
