package inbox

import (
	"context"
	"errors"
)

type partition struct {
	consumer, topic string
	partition       int32
}

// Generation is one life of a partition as a consumer knows it.
type Generation struct {
	Number    int64
	Recreated bool  // this call has begun it
	Watermark int64 // one past the highest offset that was dealt with in it; 0 if none
}

// Attach tells the inbox that this process begins to handle a partition, with the partition's end offset and leader epoch
// as read from its leader just now (-1 where unknown). An end below the watermark or a lower epoch means that the topic is
// another one: then, by the policy, a new generation begins, in which the old watermarks do not count, or it is a
// *RecreatedError.
//
// It is needed once for each assignment. Without it Admit works in whatever generation there is.
func (x *Inbox) Attach(ctx context.Context, consumer, topic string, part int32, end int64, epoch int32) (Generation, error) {
	return Generation{}, errors.ErrUnsupported
}

// Renew begins a new generation whatever the policy: an operator's answer to a *RecreatedError. Attach has to follow.
func (x *Inbox) Renew(ctx context.Context, consumer, topic string, part int32) (Generation, error) {
	return Generation{}, errors.ErrUnsupported
}
