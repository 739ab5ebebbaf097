package reconciler

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Loaded counts the results of Load.
type Loaded struct {
	Waiting int64 // all waiting envelopes
	Gates   int64 // one for each topic that an envelope of the stream waits for
	Known   int64 // envelopes of the stream that it may repeat
}

// Load reads, before the stream of a new term is opened, which keys wait (N15). It calls gate once for
// each topic that an envelope of the stream waits for, with "" for an envelope that does not list
// its topics. It calls known for each of these envelopes whose position satisfies isAfter: the stream
// may repeat it, and must then send it to its other topics only.
//
// Call Load after FinishSent. gate and known may be called a million times, because Load collects
// nothing itself. id is valid only during the call.
func (x *Sender) Load(
	ctx context.Context,
	isAfter func(pos string) bool,
	gate func(ns, topic, key string),
	known func(ns string, id bson.RawValue, pos string, topics []string),
) (n Loaded, err error) {
	err = x.config.Store.Each(ctx, func(document *waiting.Document) error {
		n.Waiting++
		// The others do not block events of the stream.
		if !document.IsOfStream() {
			return nil
		}

		topics := document.Pending
		if topics == nil {
			topics = []string{allTopics}
		}
		for _, t := range topics {
			n.Gates++
			gate(document.NS, t, document.Key)
		}

		if isAfter(document.Pos) {
			n.Known++
			known(document.NS, document.ID, document.Pos, topics)
		}
		return nil
	})
	if err != nil {
		return n, fmt.Errorf("loading waiting envelopes: %w", err)
	}
	return n, nil
}
