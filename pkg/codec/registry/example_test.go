package registry_test

import (
	"context"
	"fmt"
	"log"

	"github.com/twmb/franz-go/pkg/sr/srfake"

	"github.com/outrelay/outrelay/pkg/codec/registry"
	"github.com/outrelay/outrelay/pkg/event"
)

// OrderPlaced is encoded with an Avro schema of the registry. The consumers of the type use the same codec.
func Example() {
	// The example uses its own registry.
	fake := srfake.New()
	defer fake.Close()

	schemas, err := registry.New(fake.URL(), registry.WithRegister())
	if err != nil {
		log.Fatal(err)
	}
	avro, err := schemas.Avro(context.Background(), registry.Schema{
		Subject:    "outbox.event.order-value",
		Definition: `{"type":"record","name":"Order","fields":[{"name":"cents","type":"long"}]}`,
	})
	if err != nil {
		log.Fatal(err)
	}

	type order struct {
		Cents int64 `avro:"cents"`
	}
	orderPlaced := event.Type[order]{Aggregate: "order", Name: "OrderPlaced", Codec: avro}
	ev := orderPlaced.New("o-1", order{Cents: 4200})

	payload, err := ev.Payload()
	if err != nil {
		log.Fatal(err)
	}
	got, err := orderPlaced.Decode(context.Background(), payload)
	fmt.Println(ev.ContentType(), got.Cents, err)
	// Output: application/vnd.confluent.avro 4200 <nil>
}
