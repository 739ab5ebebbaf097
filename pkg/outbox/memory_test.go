package outbox_test

import (
	"context"
	"log"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// newBox returns an outbox in memory for an example. A service calls outbox.New(db, opts...).
func newBox(opts ...outbox.Option) *outbox.Box {
	box, err := memory.NewOutbox(memory.NewDB(), opts...)
	if err != nil {
		log.Fatal(err)
	}
	return box
}

// listStored returns the envelopes of a box.
func listStored(box *outbox.Box) []bson.Raw {
	list, err := box.Parts(module.Key{}).Store.Stored(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	return list
}
