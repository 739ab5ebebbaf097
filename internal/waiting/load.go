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
// nothing itself. id is valid only during the call.
func (x *Exceptions) Load(
	ctx context.Context,
	behind func(pos string) bool,
	gate func(ns, topic, key string),
	known func(ns string, id bson.RawValue, topics []string),
) (n Loaded, err error) {
	err = x.eachStored(ctx, EachException, func(c outboxes.Outbox, e *outboxes.Envelope, s stored) error {
		n.Exceptions++
		// The others do not block events of the stream.
		if !s.isOfStream() {
			return nil
		}

		key := keyText(e.Raw.Lookup("key"), e.Raw.Lookup("aggregateid"))
		topics := s.pending
		if topics == nil {
			topics = []string{allTopics}
		}
		for _, t := range topics {
			n.Gates++
			gate(c.NS(), t, key)
		}

		if behind(s.pos) {
			n.Known++
			known(c.NS(), e.Raw.Lookup("_id"), topics)
		}
		return nil
	})
	if err != nil {
		return n, fmt.Errorf("loading waiting envelopes: %w", err)
	}
	return n, nil
}

// Counts returns the number of waiting envelopes in the dirty collections, by state and topic.
func (x *Exceptions) Counts(ctx context.Context) ([]ExceptionCount, error) {
	var all []ExceptionCount
	for _, c := range x.config.Collections() {
		list, err := CountExceptions(ctx, mongodb.Database(x.config.Client, c.DB).Collection(c.Coll), c.Slot)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	return all, nil
}
