package waiting

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// Loaded counts the results of Load.
type Loaded struct {
	Exceptions int64 // in all dirty collections
	Gates      int64 // one for each topic that an exception of the stream waits for
	Known      int64 // exceptions of the stream that it may repeat
}

// Load reads, before the stream of a new term is opened, which keys wait (N15). It calls gate once for
// each topic that an exception of the stream waits for, with "" for an exception that does not list
// its topics. It calls known for each of these exceptions whose position satisfies behind: the stream
// may repeat it, and must then send it to its other topics only.
//
// Call Load after FinishSent. gate and known may be called a million times, because Load collects
// nothing itself. idType and id are the type and the value of `_id`, and id is valid only during the
// call.
func (x *Exceptions) Load(
	ctx context.Context,
	behind func(pos string) bool,
	gate func(ns, topic, key string),
	known func(ns string, idType byte, id []byte, topics []string),
) (Loaded, error) {
	var n Loaded
	for _, c := range x.config.Collections() {
		ns := c.NS()
		coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
		err := EachException(ctx, coll, c.Part, func(raw bson.Raw) error {
			n.Exceptions++

			// These do not block events of the stream.
			origin, _ := raw.Lookup("origin").StringValueOK()
			switch origin {
			case outboxes.OriginScheduled, outboxes.OriginRequeue, outboxes.OriginReplay:
				return nil
			}

			key := keyText(raw.Lookup("key"), raw.Lookup("aggregateid"))
			topics := stringArray(raw.Lookup("pending"))
			if len(topics) == 0 {
				topics = []string{allTopics}
			}
			for _, t := range topics {
				n.Gates++
				gate(ns, t, key)
			}

			pos, _ := raw.Lookup("pos").StringValueOK()
			if behind(pos) {
				n.Known++
				id := raw.Lookup("_id")
				known(ns, byte(id.Type), id.Value, topics)
			}
			return nil
		})
		if err != nil {
			return n, fmt.Errorf("loading waiting envelopes: %w", err)
		}
	}
	return n, nil
}

// Counts returns the number of waiting envelopes in the dirty collections, by state and topic.
func (x *Exceptions) Counts(ctx context.Context) ([]ExceptionCount, error) {
	var all []ExceptionCount
	for _, c := range x.config.Collections() {
		list, err := CountExceptions(ctx, mongodb.Database(x.config.Client, c.DB).Collection(c.Coll), c.Part)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	return all, nil
}

// stringArray returns the strings of an array, or nil if v is not an array.
func stringArray(v bson.RawValue) []string {
	arr, ok := v.ArrayOK()
	if !ok {
		return nil
	}
	vals, err := arr.Values()
	if err != nil {
		return nil
	}

	list := make([]string, 0, len(vals))
	for _, e := range vals {
		if s, ok := e.StringValueOK(); ok {
			list = append(list, s)
		}
	}
	return list
}
