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
	return Client(tb, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if !slices.Contains([]string{"find", "aggregate", "delete"}, e.CommandName) {
			return
		}

		statement := bson.D{{Key: "explain", Value: withoutSession(e.Command)}, {Key: "verbosity", Value: "executionStats"}}
		raw, err := asking.Database(e.DatabaseName).RunCommand(tb.Context(), statement).Raw()
		if err != nil {
			tb.Errorf("explaining %s: %v", e.Command, err)
			return
		}

		p := Plan{Command: slices.Clone(e.Command)}
		p.addStages(raw)
		judge(p)
	}}))
}

// withoutSession is a command without what belongs to its session.
func withoutSession(command bson.Raw) bson.D {
	elems, _ := command.Elements()
	var d bson.D
	for _, e := range elems {
		if name := e.Key(); name[0] != '$' && name != "lsid" && name != "readConcern" && name != "writeConcern" && name != "txnNumber" {
			d = append(d, bson.E{Key: name, Value: e.Value()})
		}
	}
	return d
}

func (p *Plan) addStages(part bson.Raw) {
	elems, err := part.Elements()
	if err != nil {
		return
	}

	for _, e := range elems {
		v := e.Value()
		n, _ := v.AsInt64OK()
		switch e.Key() {
		// These plans did not run, or only as trials.
		case "rejectedPlans", "command", "allPlansExecution":
			continue
		case "stage":
			p.Stages = append(p.Stages, v.StringValue())
		case "totalKeysExamined":
			p.Keys += n
		case "totalDocsExamined":
			p.Docs += n
		}

		if v.Type == bson.TypeEmbeddedDocument || v.Type == bson.TypeArray {
			p.addStages(v.Value)
		}
	}
}
