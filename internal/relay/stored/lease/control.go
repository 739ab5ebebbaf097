package lease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Control holds the requests of operators for a watcher. Each acquisition obeys them, and the owner
// reads them at each renewal, see [Held.Yield].
type Control struct {
	PauseOrder    `bson:",inline"`
	Pin           string    `bson:"pin,omitempty"`           // only this node runs it, while the node is alive
	StepDownUntil time.Time `bson:"stepDownUntil,omitempty"` // until then StepDownNode does not run it
	StepDownNode  string    `bson:"stepDownNode,omitempty"`  // "" means every node
	Skips         []Skip    `bson:"skips,omitempty"`         // events that the stream passes over
}

// PauseOrder is an order that no node runs the watcher.
type PauseOrder struct {
	Paused   bool      `bson:"paused,omitempty"`
	PausedAt time.Time `bson:"pausedAt,omitempty"`
	PausedBy string    `bson:"pausedBy,omitempty"` // a person, or the command that pauses
}

// Skip is an event that the stream passes over because an operator has ordered it.
type Skip struct {
	NS string         `bson:"ns"`
	ID bson.RawValue  `bson:"id,omitempty"` // missing if it is large
	At bson.Timestamp `bson:"at"`           // time of the order; a later event with this id is not passed over

	// An event with a large id is known by its own time and the bytes of its id.
	EventAt bson.Timestamp `bson:"eventAt,omitempty"`
	Size    int            `bson:"size,omitempty"`
}

// IsSame reports whether both orders are for the same event.
func (s Skip) IsSame(skip Skip) bool {
	return s.NS == skip.NS && s.At == skip.At && s.ID.Equal(skip.ID) && s.EventAt == skip.EventAt && s.Size == skip.Size
}

// stepsDown reports whether node must not run the watcher at the server time now.
func (c Control) stepsDown(node string, now time.Time) bool {
	return c.StepDownUntil.After(now) && (c.StepDownNode == "" || c.StepDownNode == node)
}

// ResliceActor is the actor of the pause of a reslice.
const ResliceActor = "outrelay reslice"

// IsByOperator reports whether an operator has paused the watcher. The pause of a reslice ends with it.
func (p PauseOrder) IsByOperator() bool { return p.Paused && p.PausedBy != ResliceActor }

// Pause stops the watcher on all nodes until Resume. The owner drains and releases at its next renewal. The pause of an operator keeps
// its actor and its time, and replaces that of a reslice.
func Pause(ctx context.Context, coll *mongo.Collection, id, actor string) error {
	pause := bson.D{{Key: "paused", Value: true}, {Key: "pausedAt", Value: "$$NOW"}, {Key: "pausedBy", Value: mongodb.Literal(actor)}}
	byOperator := op("$and", op("$eq", "$control.paused", true), op("$ne", "$control.pausedBy", ResliceActor))
	set := bson.D{{Key: "control", Value: op("$cond", byOperator, "$control", op("$mergeObjects", "$control", pause))}}
	return updateControl(ctx, coll, id, mongo.Pipeline{{{Key: "$set", Value: set}}})
}

var endOfPause = bson.D{{Key: "$unset", Value: bson.D{
	{Key: "control.paused", Value: ""}, {Key: "control.pausedAt", Value: ""}, {Key: "control.pausedBy", Value: ""},
}}}

// Resume ends a pause.
func Resume(ctx context.Context, coll *mongo.Collection, id string) error {
	return updateControl(ctx, coll, id, endOfPause)
}

// ResumeAfterReslice ends the pauses of a reslice in the documents of a watcher.
func ResumeAfterReslice(ctx context.Context, coll *mongo.Collection, ids []string) error {
	filter := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}, {Key: "control.pausedBy", Value: ResliceActor}}
	if _, err := mongodb.Majority(coll).UpdateMany(ctx, filter, endOfPause); err != nil {
		return fmt.Errorf("ending the pause of the reslice: %w", err)
	}
	return nil
}

// Pin moves the watcher to node and keeps it there while node is alive. An empty node removes the pin.
func Pin(ctx context.Context, coll *mongo.Collection, id, node string) error {
	if node == "" {
		return updateControl(ctx, coll, id, bson.D{{Key: "$unset", Value: bson.D{{Key: "control.pin", Value: ""}}}})
	}
	return updateControl(ctx, coll, id, bson.D{{Key: "$set", Value: bson.D{{Key: "control.pin", Value: node}}}})
}

// StepDown makes the current owner release. The owner does not acquire again for hold, measured by the
// clock of the server.
func StepDown(ctx context.Context, coll *mongo.Collection, id string, hold time.Duration) error {
	set := bson.D{{Key: "control", Value: stepDownControl(hold)}}
	return updateControl(ctx, coll, id, mongo.Pipeline{{{Key: "$set", Value: set}}})
}

func stepDownControl(hold time.Duration) bson.D {
	return op("$mergeObjects", "$control", bson.D{
		{Key: "stepDownUntil", Value: op("$add", "$$NOW", hold.Milliseconds())},
		{Key: "stepDownNode", Value: "$node"},
	})
}

// RequestSweep makes the next owner sweep from start on, and makes the current owner step down for hold.
// It creates the document if there is none. An unfinished sweep becomes part of the requested one.
func RequestSweep(ctx context.Context, coll *mongo.Collection, id string, start bson.Timestamp, hold time.Duration) error {
	set := bson.D{
		{Key: "gap", Value: requestedGap(start)},
		{Key: "control", Value: stepDownControl(hold)},
		{Key: "owner", Value: mongodb.IfNull("$owner", nil)},
		{Key: "expiresAt", Value: mongodb.IfNull("$expiresAt", time.UnixMilli(0))},
	}
	_, err := mongodb.Majority(coll).UpdateOne(ctx, bson.D{{Key: "_id", Value: id}},
		mongo.Pipeline{{{Key: "$set", Value: set}}}, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("requesting a sweep of watcher %s: %w", id, err)
	}
	return nil
}

// AcknowledgeIncident removes the record of an incident from the documents of a watcher. It returns the record, or [ErrNotFound] if no
// document has it.
func AcknowledgeIncident(ctx context.Context, coll *mongo.Collection, watcher string, id bson.ObjectID) (Incident, error) {
	ids, err := ListIDs(ctx, coll, watcher)
	if err != nil {
		return Incident{}, err
	}

	var before Document
	err = mongodb.Majority(coll).FindOneAndUpdate(ctx,
		bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}, {Key: "incidents.id", Value: id}},
		bson.D{{Key: "$pull", Value: bson.D{{Key: "incidents", Value: bson.D{{Key: "id", Value: id}}}}}},
	).Decode(&before)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Incident{}, ErrNotFound
	}
	if err != nil {
		return Incident{}, fmt.Errorf("acknowledging an incident of watcher %s: %w", watcher, err)
	}
	i := slices.IndexFunc(before.Incidents, func(incident Incident) bool { return incident.ID == id })
	return before.Incidents[i], nil
}

// requestedGap returns the expression for the gap of a requested sweep. An unfinished sweep becomes part of it.
func requestedGap(earliest any) bson.D {
	// MongoDB ignores a missing value in $min.
	begin := bson.D{{Key: "from", Value: op("$min", "$gap.from", earliest)}}
	return op("$mergeObjects", mongodb.Literal(Gap{Reason: GapRequested, Since: time.Now()}), begin)
}

// Adopt makes this replica set the home of state that was copied from another one (N5). It stores
// replicaSetID and a new instance, because the transactional ids of the old instance may
// be in use on the other replica set. It fails while a node owns the watcher.
//
// A copy of an outbox consists of inserts that are later than the position, so the stream would send all
// of it without a flag. If the watcher has a position, Adopt requests a sweep from it on instead.
func Adopt(ctx context.Context, coll *mongo.Collection, id, replicaSetID string) error {
	expired := op("$lte", mongodb.IfNull("$expiresAt", time.UnixMilli(0)), "$$NOW")
	filter := bson.D{{Key: "_id", Value: id}, {Key: "$expr", Value: expired}}
	begun := op("$gt", mongodb.IfNull("$clusterTime", bson.Timestamp{}), bson.Timestamp{})
	fields := bson.D{
		{Key: "replicaSetId", Value: replicaSetID},
		{Key: "instance", Value: uuid.NewString()},
		{Key: "gap", Value: op("$cond", begun, requestedGap("$clusterTime"), mongodb.IfNull("$gap", "$$REMOVE"))},
	}

	res, err := mongodb.Majority(coll).UpdateOne(ctx, filter, mongo.Pipeline{{{Key: "$set", Value: fields}}})
	if err != nil {
		return fmt.Errorf("adopting watcher %s: %w", id, err)
	}
	if res.MatchedCount == 0 {
		return fmt.Errorf("adopting watcher %s: a running relay owns it (stop the relay first), or %w", id, ErrNotFound)
	}
	return nil
}

// updateControl applies update to the watcher document. The error is [ErrNotFound] if there is none.
func updateControl(ctx context.Context, coll *mongo.Collection, id string, update any) error {
	res, err := mongodb.Majority(coll).UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, update)
	if err != nil {
		return fmt.Errorf("writing control of watcher %s: %w", id, err)
	}
	if res.MatchedCount == 0 {
		return fmt.Errorf("writing control of watcher %s: %w", id, ErrNotFound)
	}
	return nil
}

// Read returns the watcher document and the time of the server. The error is [ErrNotFound] if there is
// no document.
func Read(ctx context.Context, coll *mongo.Collection, id string) (Document, time.Time, error) {
	return readDocument(ctx, mongodb.Majority(coll), id)
}

func readDocument(ctx context.Context, coll *mongo.Collection, id string) (Document, time.Time, error) {
	type response struct {
		Doc Document  `bson:"doc"`
		Now time.Time `bson:"now"`
	}

	found, err := mongodb.AggregateAll[response](ctx, coll, "reading watcher "+id, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: id}}}},
		{{Key: "$project", Value: bson.D{{Key: "doc", Value: "$$ROOT"}, {Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil {
		return Document{}, time.Time{}, err
	}

	if len(found) == 0 {
		return Document{}, time.Time{}, fmt.Errorf("reading watcher %s: %w", id, ErrNotFound)
	}
	return found[0].Doc, found[0].Now, nil
}

// ReplicaSetID reads the id of the replica set from the server. It returns "" without an error if the
// server does not return the id: the user needs the action replSetGetConfig on the cluster, and a
// mongos has no id. The name of the set in `hello` is not enough, because many sets are called rs0.
func ReplicaSetID(ctx context.Context, client *mongo.Client) (string, error) {
	var response struct {
		Config struct {
			Settings struct {
				ReplicaSetID bson.ObjectID `bson:"replicaSetId"`
			} `bson:"settings"`
		} `bson:"config"`
	}

	err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "replSetGetConfig", Value: 1}},
		options.RunCmd().SetReadPreference(readpref.Primary())).Decode(&response)
	switch {
	case mongodb.HasCode(err, mongodb.CodeUnauthorized, codeCommandNotFound):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("reading the id of the replica set: %w", err)
	case response.Config.Settings.ReplicaSetID.IsZero():
		return "", nil
	}
	return response.Config.Settings.ReplicaSetID.Hex(), nil
}

// isNotFound reports whether err means that the document does not exist.
func isNotFound(err error) bool {
	return errors.Is(err, ErrNotFound) || errors.Is(err, mongo.ErrNoDocuments)
}
