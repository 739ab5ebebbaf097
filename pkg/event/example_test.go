package event_test

import (
	"fmt"

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
