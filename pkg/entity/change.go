package entity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// Headers of the event of a change. They contain everything that a Projector needs in addition to the
// entity, with every header preset of the relay, and also for a tombstone.
const (
	headerName    = "entity-name"    // the name that was passed to NewRecorded
	headerChange  = "entity-change"  // upserted or deleted
	headerID      = "entity-id"      // "<kind>:<text>", such as int64:5; kinds are uuid, objectid, string, int32, int64
	headerVersion = "entity-version" // decimal
)

// Kinds of changes. The type of the event is "<name>.<change>".
const (
	changeUpserted = "upserted"
	changeDeleted  = "deleted"
)

// changeEvent returns the event for one change. Its key is the id, so the changes of an entity stay
// in order.
func changeEvent[I ID](name, change string, id I, version int64, payload event.Payload) event.Event {
	return event.New(event.Aggregate{Type: name, ID: formatID(id)}, name+"."+change, payload,
		event.WithHeader(headerName, []byte(name)),
		event.WithHeader(headerChange, []byte(change)),
		event.WithHeader(headerID, []byte(kindOf[I]()+":"+formatID(id))),
		event.WithHeader(headerVersion, strconv.AppendInt(nil, version, 10)))
}

// change is the content of the headers of a change.
type change[I ID] struct {
	id      I
	version int64
	deleted bool
}

// readChange reads the headers of a message. reason is "" if they are valid.
func readChange[I ID](message *consumer.Message, name string) (change change[I], reason string) {
	var headers [4]string
	for i, key := range [...]string{headerName, headerChange, headerID, headerVersion} {
		value, ok := message.Header(key)
		if !ok {
			return change, "it has no header " + key
		}

		headers[i] = string(value)
	}

	if headers[0] != name {
		return change, fmt.Sprintf("its name is %.64q, want %q", headers[0], name)
	}

	switch headers[1] {
	case changeUpserted:
	case changeDeleted:
		change.deleted = true
	default:
		return change, fmt.Sprintf("header %s is %.64q", headerChange, headers[1])
	}

	kind, id, ok := strings.Cut(headers[2], ":")
	if !ok || kind != kindOf[I]() {
		return change, fmt.Sprintf("its id is of kind %.64q, want %s", kind, kindOf[I]())
	}

	var err error
	if change.id, err = parseID[I](id); err != nil {
		return change, fmt.Sprintf("its id is not a valid %s", kind)
	}
	if change.version, err = strconv.ParseInt(headers[3], 10, 64); err != nil || change.version < 1 {
		return change, fmt.Sprintf("header %s is not a valid version", headerVersion)
	}
	// Without a value, an upsert would look like a tombstone of the topic's compaction.
	if !change.deleted && message.Value == nil {
		return change, "it has no value"
	}

	return change, ""
}

// errNotJSON does not contain details, because the errors of the parser quote the payload.
var errNotJSON = errors.New("not one JSON document")

// decodeJSON decodes relaxed Extended JSON, which is the value of a record for an entity.
func decodeJSON(registry *bson.Registry, value []byte, into any) error {
	if !json.Valid(value) {
		return errNotJSON
	}

	vr, err := bson.NewExtJSONValueReader(bytes.NewReader(value), false)
	if err != nil {
		return err
	}

	decoder := bson.NewDecoder(vr)
	decoder.SetRegistry(registry)
	return decoder.Decode(into)
}
