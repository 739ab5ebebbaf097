package codec_test

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/event"
)

// Without a codec, the payloads of a type are JSON. Raw passes the bytes of a format that the service encodes itself.
func ExampleRaw() {
	reportMade := event.Type[[]byte]{Aggregate: "report", Name: "ReportMade", Codec: codec.Raw("text/csv")}
	body, err := reportMade.New("r-1", []byte("day,cents\nMonday,4200\n")).Payload()
	fmt.Printf("%s%v %s\n", body, err, reportMade.Codec.ContentType())
	// Output:
	// day,cents
	// Monday,4200
	// <nil> text/csv
}

// JSON and ExtJSON differ in the tags that they use, and in the types of BSON, which only ExtJSON keeps.
func ExampleExtJSON() {
	type order struct {
		Total bson.Decimal128 `json:"total" bson:"sum"`
	}
	total, err := bson.ParseDecimal128("42.10")
	if err != nil {
		fmt.Println(err)
	}

	for _, c := range []codec.Codec{codec.JSON(), codec.ExtJSON()} {
		body, err := c.Encode(order{Total: total})
		fmt.Println(string(body), err)
	}

	var read order
	err = codec.ExtJSON().Decode(context.Background(), []byte(`{"sum":{"$numberDecimal":"42.10"}}`), &read)
	fmt.Println(read.Total, err)
	// Output:
	// {"total":"42.10"} <nil>
	// {"sum":{"$numberDecimal":"42.10"}} <nil>
	// 42.10 <nil>
}
