package stacktest

import (
	"context"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Plan is how the server carries out a statement: the stages of its plan, and the keys and documents that it
// examines.
type Plan struct {
	Command    bson.Raw
	Stages     []string
	Keys, Docs int64
}

// Explained connects a client whose finds, aggregations and deletions are explained just before they run.
// judge gets each plan.
func Explained(tb testing.TB, judge func(Plan)) *mongo.Client {
	tb.Helper()
	asking := Client(tb)
	return Client(tb, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, started *event.CommandStartedEvent) {
		if !slices.Contains([]string{"find", "aggregate", "delete"}, started.CommandName) {
			return
		}

		statement := bson.D{{Key: "explain", Value: withoutSession(started.Command)}, {Key: "verbosity", Value: "executionStats"}}
		raw, err := asking.Database(started.DatabaseName).RunCommand(tb.Context(), statement).Raw()
		if err != nil {
			tb.Errorf("explaining %s: %v", started.Command, err)
			return
		}

		plan := Plan{Command: slices.Clone(started.Command)}
		plan.addStages(raw)
		judge(plan)
	}}))
}

// withoutSession is a command without what belongs to its session.
func withoutSession(command bson.Raw) bson.D {
	elems, _ := command.Elements()
	var document bson.D
	for _, e := range elems {
		if name := e.Key(); name[0] != '$' && name != "lsid" && name != "readConcern" && name != "writeConcern" && name != "txnNumber" {
			document = append(document, bson.E{Key: name, Value: e.Value()})
		}
	}
	return document
}

func (p *Plan) addStages(part bson.Raw) {
	elems, err := part.Elements()
	if err != nil {
		return
	}

	for _, e := range elems {
		value := e.Value()
		n, _ := value.AsInt64OK()
		switch e.Key() {
		// These plans did not run, or only as trials.
		case "rejectedPlans", "command", "allPlansExecution":
			continue
		case "stage":
			p.Stages = append(p.Stages, value.StringValue())
		case "totalKeysExamined":
			p.Keys += n
		case "totalDocsExamined":
			p.Docs += n
		}

		if value.Type == bson.TypeEmbeddedDocument || value.Type == bson.TypeArray {
			p.addStages(value.Value)
		}
	}
}
