package event_test

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/codec/protobuf"
	"github.com/outrelay/outrelay/pkg/event"
)

func show(e event.Event) {
	body, err := e.Payload()
	fmt.Printf("%s about %s %s: %s (%s) %v\n", e.Name(), e.Aggregate().Type, e.Aggregate().ID, body, e.ContentType(), err)
}

// A package that producer and consumers share declares its types of events.
func ExampleType() {
	type Placed struct {
		Customer string `json:"customer"`
		Cents    int64  `json:"cents"`
	}
	OrderPlaced := event.Type[Placed]{Aggregate: "order", Name: "OrderPlaced"}

	// The producer:
	e := OrderPlaced.New("o-1", Placed{Customer: "c-7", Cents: 4200})
	show(e)

	// A consumer:
	body, _ := e.Payload()
	order, err := OrderPlaced.Decode(context.Background(), body)
	fmt.Println(order.Customer, order.Cents, err)
	// Output:
	// OrderPlaced about order o-1: {"customer":"c-7","cents":4200} (application/json) <nil>
	// c-7 4200 <nil>
}

func ExampleType_protobuf() {
	OrderDelayed := event.Type[*durationpb.Duration]{Aggregate: "order", Name: "OrderDelayed", Codec: protobuf.Codec()}
	e := OrderDelayed.New("o-1", durationpb.New(90*time.Second))
	body, _ := e.Payload()
	fmt.Printf("%x %s\n", body, e.ContentType())

	delay, err := OrderDelayed.Decode(context.Background(), body)
	fmt.Println(delay.AsDuration(), err)
	// Output:
	// 085a application/protobuf
	// 1m30s <nil>
}

func ExampleType_Tombstone() {
	CustomerChanged := event.Type[struct{}]{Aggregate: "customer", Name: "CustomerChanged"}
	body, err := CustomerChanged.Tombstone("c-7").Payload()
	fmt.Println(body == nil, err)
	// Output: true <nil>
}

func ExampleNew() {
	e := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.JSON(map[string]int{"cents": 4200}),
		// If the service chooses the id, a repeated append fails.
		event.WithID("place-o-1"),
		event.WithHeader("tenant", []byte("acme")))
	fmt.Println(e.ID(), e.Key(), e.Validate())
	// Output: place-o-1 o-1 <nil>
}

func ExampleJSON() {
	show(event.New(event.Aggregate{Type: "page", ID: "p-1"}, "PageChanged", event.JSON(map[string]string{"title": "<b>R&D</b>"})))
	// Output: PageChanged about page p-1: {"title":"<b>R&D</b>"} (application/json) <nil>
}

func ExampleEncode() {
	show(event.New(event.Aggregate{Type: "report", ID: "r-1"}, "ReportMade", event.Encode(codec.Raw("text/csv"), "a,b")))
	// Output: ReportMade about report r-1: a,b (text/csv) <nil>
}

func ExampleBytes() {
	show(event.New(event.Aggregate{Type: "image", ID: "i-1"}, "ImageAdded", event.Bytes("image/x-portable-bitmap", []byte("P1 1 1 1"))))
	// Output: ImageAdded about image i-1: P1 1 1 1 (image/x-portable-bitmap) <nil>
}

// MongoDB can query the payload in the outbox, and the relay publishes it as Extended JSON.
func ExampleDocument() {
	type Shipped struct {
		At time.Time `bson:"at"`
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	e := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderShipped", event.Document(Shipped{At: at}))
	body, _ := e.Payload()
	fmt.Printf("%s\n", body)

	var shipped Shipped
	err := codec.ExtJSON().Decode(context.Background(), body, &shipped)
	fmt.Println(shipped.At.UTC(), err)
	// Output:
	// {"at":{"$date":"2026-01-02T03:04:05Z"}}
	// 2026-01-02 03:04:05 +0000 UTC <nil>
}

func ExampleEvent_Validate() {
	e := event.New(event.Aggregate{Type: "order"}, "OrderPlaced", event.Document(42), event.WithID("x"), event.WithHeader("id", nil))
	fmt.Println(e.Validate())
	// Output: invalid event x: payload of type int is 32-bit integer in BSON, not a document or an array: use JSON, Encode or Bytes; aggregate id is empty; header id is the event's own
}

// An id may have any type that MongoDB stores as an id. ParseID reads it back from a header or a URL.
func ExampleNewID() {
	id := event.NewID("place-o-1")
	fmt.Println(id, event.ParseID(id.String()) == id)
	// Output: place-o-1 true
}

// A service starts a conversation with the id of an HTTP request. An outbox adds the cause of the context to each event.
func ExampleContextWithCause() {
	ctx := event.ContextWithCause(context.Background(), event.Cause{CorrelationID: "request-7"})
	fmt.Println(event.CauseFromContext(ctx).CorrelationID)
	// Output: request-7
}
