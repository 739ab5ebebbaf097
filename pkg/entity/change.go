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

// The headers of a change. They say all that a projector needs besides the entity, whatever preset the relay writes, and
// are there on a tombstone too.
const (
	HeaderName    = "entity-name"    // what the Recorded was called
	HeaderChange  = "entity-change"  // upserted or deleted
	HeaderID      = "entity-id"      // "<kind>:<text>", for example int64:5; kinds are uuid, objectid, string, int32, int64
	HeaderVersion = "entity-version" // decimal
)

// What a change can be. The type of its event is "<name>.<change>".
const (
	Upserted = "upserted"
	Deleted  = "deleted"
)

// TypeOf is the type of the event of a change, for example "order.upserted".
func TypeOf(name, change string) string { return name + "." + change }

// changeEvent is the event of one change; its ordering key is the id, so that the changes of an entity keep their order.
func changeEvent[I ID](name, change string, id I, version int64, payload any) event.Event {
	return event.New(name, text(id), TypeOf(name, change), payload,
		event.WithHeader(HeaderName, []byte(name)),
		event.WithHeader(HeaderChange, []byte(change)),
		event.WithHeader(HeaderID, []byte(kindOf[I]()+":"+text(id))),
		event.WithHeader(HeaderVersion, strconv.AppendInt(nil, version, 10)))
}

// change is what a message says.
type change[I ID] struct {
	id      I
	version int64
	deleted bool
}

// readChange reads the headers of a message, or says what is strange about them.
func readChange[I ID](m *consumer.Message, name string) (c change[I], reason string) {
	var h [4]string
	for i, key := range [...]string{HeaderName, HeaderChange, HeaderID, HeaderVersion} {
		v, ok := m.Header(key)
		if !ok {
			return c, "it has no header " + key
		}
		h[i] = string(v)
	}
	if h[0] != name {
		return c, fmt.Sprintf("it is of %.64q, the projector of %q", h[0], name)
	}
	switch h[1] {
	case Upserted:
	case Deleted:
		c.deleted = true
	default:
		return c, fmt.Sprintf("header %s is %.64q", HeaderChange, h[1])
	}
	kind, id, ok := strings.Cut(h[2], ":")
	if !ok || kind != kindOf[I]() {
		return c, fmt.Sprintf("the id is of kind %.64q, the projector's are %s", kind, kindOf[I]())
	}
	var err error
	if c.id, err = parse[I](id); err != nil {
		return c, fmt.Sprintf("the id is no %s", kind)
	}
	if c.version, err = strconv.ParseInt(h[3], 10, 64); err != nil || c.version < 1 {
		return c, fmt.Sprintf("header %s is no version", HeaderVersion)
	}
	if !c.deleted && m.Value == nil {
		return c, "it has no value"
	}
	return c, ""
}

// errNotJSON says no more, as the parser's own errors quote what they read.
var errNotJSON = errors.New("not one JSON document")

// decodeJSON reads the relaxed Extended JSON that the relay makes of an entity.
func decodeJSON(r *bson.Registry, value []byte, into any) error {
	if !json.Valid(value) {
		return errNotJSON
	}
	vr, err := bson.NewExtJSONValueReader(bytes.NewReader(value), false)
	if err != nil {
		return err
	}
	d := bson.NewDecoder(vr)
	d.SetRegistry(r)
	return d.Decode(into)
}
