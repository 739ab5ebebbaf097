package reconcile

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
)

// Loaded counts what Load found.
type Loaded struct {
	Exceptions int64 // in all dirty collections
	Gates      int64 // one for each topic that an exception of the stream waits for
	Known      int64 // exceptions of the stream behind the position
}

// Load tells, before the stream of a new term is opened, which keys wait (N15): gate is called once for each topic that an
// exception of the stream waits for, with "" for one that does not list them; known, for each of them whose position behind holds for
// so that it may come in the stream once more and is sent by it to its other topics only. Call it behind Recover, with both functions
// ready to be called a million times: nothing is collected here. idType and id are the type and the value of `_id`; id is
// valid during the call only.
func (x *Exceptions) Load(ctx context.Context, behind func(pos string) bool, gate func(ns, topic, key string), known func(ns string, idType byte, id []byte, topics []string)) (Loaded, error) {
	x.ensureInit()
	var n Loaded
	for _, c := range x.Collections() {
		ns := c.NS()
		err := store.EachException(ctx, x.Client.Database(c.DB).Collection(c.Coll), c.Part, func(raw bson.Raw) error {
			n.Exceptions++
			switch origin, _ := raw.Lookup("origin").StringValueOK(); origin {
			case store.OriginScheduled, store.OriginRequeue, store.OriginReplay:
				return nil // they are in nobody's way
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
			if pos, _ := raw.Lookup("pos").StringValueOK(); behind(pos) {
				n.Known++
				id := raw.Lookup("_id")
				known(ns, byte(id.Type), id.Value, topics)
			}
			return nil
		})
		if err != nil {
			return n, fmt.Errorf("loading what waits: %w", err)
		}
	}
	return n, nil
}

// Counts tells how much waits in the dirty collections, by state and topic.
func (x *Exceptions) Counts(ctx context.Context) ([]store.ExceptionCount, error) {
	x.ensureInit()
	var all []store.ExceptionCount
	for _, c := range x.Collections() {
		list, err := store.CountExceptions(ctx, x.Client.Database(c.DB).Collection(c.Coll), c.Part)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	return all, nil
}

// stringArray are the strings of an array; nil if it is none.
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
