package operate_test

import (
	"context"
	"errors"
	"log"
	"net/http"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/operate"
	"github.com/outrelay/outrelay/pkg/relay"
)

// A tool requeues the dead letters of a topic that was not allowed, in the name of the person who runs it.
func Example() {
	var client *mongo.Client
	ctx := context.Background()
	op, err := operate.New(client, operate.WithState(relay.State{Database: "outrelay"}), operate.WithWatcher("shop"))
	if err != nil {
		log.Print(err)
		return
	}
	defer op.Close()

	filter := operate.LetterFilter{By: operate.Relay, Class: "not_allowed", Topic: "invoices"}
	for letter, err := range op.Letters(ctx, filter) {
		if err != nil {
			log.Print(err)
			return
		}
		log.Println(letter.DiedAt, letter.Type, letter.ID, letter.Reason)
	}
	done, err := op.As("ann").RequeueLetters(ctx, filter, operate.RequeueOptions{})
	log.Println(done.Requeued, "are sent again,", done.Rejected, "cannot be sent:", err)
}

// A service that embeds a relay serves the operators' page to the people who have logged in to the service.
func ExampleOperator_Handler() {
	var r *relay.Relay
	op, err := operate.Of(r)
	if err != nil {
		log.Print(err)
		return
	}
	defer op.Close()

	page, err := op.Handler("/outrelay", func(request *http.Request) (operate.Caller, error) {
		name, _, ok := request.BasicAuth()
		if !ok {
			return operate.Caller{}, errors.New("log in to the shop first")
		}
		return operate.Caller{Name: name, Role: operate.Viewer}, nil
	})
	if err != nil {
		log.Print(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("/outrelay/", page)
}
