package envelope_test

import (
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/pkg/event"
)

func ExampleParse() {
	raw, err := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Document(bson.D{{Key: "total", Value: 42}}), event.WithID("x"), event.WithHeader("a", []byte("1"))).MarshalBSON()
	if err != nil {
		fmt.Println(err)
		return
	}

	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		fmt.Println(err)
		return
	}

	value, err := envelope.AppendPayload(nil, &v)
	fmt.Printf("%s %s %s %v\n", v.AppendID(nil), v.OrderingKey(), value, err)
	for it := v.Headers.Iter(); it.Next(); {
		fmt.Printf("%s=%s\n", it.Key, it.Value)
	}
	// Output:
	// x o-1 {"total":42} <nil>
	// a=1
}
