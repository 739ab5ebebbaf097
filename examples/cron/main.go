// Cron appends an event every minute, whichever instance of the service runs. Each time has one event, also while several
// instances run, and the relay publishes it when it is due.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… go run ./examples/cron
package main

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/cron"
)

// Due is the payload of ReportDue.
type Due struct {
	At time.Time `json:"at"`
}

// ReportDue asks for the report of a minute.
var ReportDue = event.Type[Due]{Aggregate: "report", Name: "ReportDue"}

func main() { local.Main(run) }

// run keeps the events of the next minutes in the outbox until ctx ends.
func run(ctx context.Context, db *mongo.Database) error {
	box, err := outbox.New(db)
	if err != nil {
		return err
	}
	c, err := cron.New(box, cron.Entry{
		Name:     "minutely-report",
		Schedule: "* * * * *",
		Zone:     time.UTC,
		// After an outage, one report for all missed minutes is enough.
		Missed: cron.Once,
		Event: func(at time.Time) event.Event {
			return ReportDue.New(at.UTC().Format(time.RFC3339), Due{At: at.UTC()})
		},
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}
