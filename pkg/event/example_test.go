package event_test

import (
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

func ExampleNew() {
	e := event.New("order", "o-1", "OrderPlaced", []byte(`{"total":42}`),
		event.WithID("place-o-1"), // a service's own id makes a repeated append fail
		event.WithContentType("application/json"),
		event.WithHeader("tenant", []byte("acme")))
	fmt.Println(e.ID(), e.Key(), e.Validate())
	// Output: place-o-1 o-1 <nil>
}

func ExampleEvent_Validate() {
	e := event.New("order", "", "OrderPlaced", 42, event.WithID("x"), event.WithHeader("id", nil))
	fmt.Println(e.Validate())
	// Output: invalid event x: payload of type int is 32-bit integer in BSON; bytes, a string, nil, a document or an array is wanted; aggregate id is empty; header id is the event's own
}

func ExampleParse() {
	raw, err := event.New("order", "o-1", "OrderPlaced", bson.D{{Key: "total", Value: 42}}, event.WithID("x"), event.WithHeader("a", []byte("1"))).MarshalBSON()
	if err != nil {
		fmt.Println(err)
		return
	}

	var v event.View
	if err := event.Parse(raw, &v); err != nil {
		fmt.Println(err)
		return
	}

	value, err := event.AppendPayload(nil, &v)
	fmt.Printf("%s %s %s %v\n", v.AppendID(nil), v.OrderingKey(), value, err)
	for it := v.Headers.Iter(); it.Next(); {
		fmt.Printf("%s=%s\n", it.Key, it.Value)
	}
	// Output:
	// x o-1 {"total":42} <nil>
	// a=1
}

func ExampleSlot() {
	fmt.Println(event.Slot([]byte("o-1")), event.Murmur2([]byte("o-1"))&0x7fffffff%6)
	// Output: 154 0
}
