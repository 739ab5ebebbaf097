package saga

import (
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// heldMessage is a message that arrived before its turn.
type heldMessage struct {
	Number  int64         `bson:"number"`
	Message storedMessage `bson:"message"`
}

// stuckMessage is the held message whose step failed when its turn came.
type stuckMessage struct {
	Number  int64  `bson:"number" json:"number"`
	Message string `bson:"message" json:"message"` // its id
	Reason  string `bson:"reason" json:"reason"`
}

// storedMessage is a consumer.Message in the document of a saga: the same fields, with their names in it.
type storedMessage struct {
	Topic         string          `bson:"topic,omitempty"`
	Partition     int32           `bson:"partition"`
	Offset        int64           `bson:"offset"`
	LeaderEpoch   int32           `bson:"leaderEpoch"`
	Time          time.Time       `bson:"time"`
	Key           []byte          `bson:"key"`
	Value         []byte          `bson:"value"`
	Headers       []event.Header  `bson:"headers,omitempty"`
	ID            string          `bson:"id"`
	Source        string          `bson:"source,omitempty"`
	Name          string          `bson:"name"`
	Aggregate     event.Aggregate `bson:"aggregate"`
	ContentType   string          `bson:"contentType,omitempty"`
	SchemaVersion string          `bson:"schemaVersion,omitempty"`
	Delivery      int             `bson:"delivery,omitempty"`
	Redelivered   bool            `bson:"redelivered,omitempty"`
	Attempt       int             `bson:"attempt,omitempty"`
	Group         string          `bson:"group,omitempty"`
}

// compareNumber compares the number of message with n.
func compareNumber(message heldMessage, n int64) int { return int(min(max(message.Number-n, -1), 1)) }

// holdMessage stores the message with number n until its turn. If a message with this number is
// held already, message is ignored. If too many messages are held, the error is ErrGap.
func (in *Instance[S]) holdMessage(n int64, message *consumer.Message) (changed bool, err error) {
	i, found := slices.BinarySearchFunc(in.doc.Held, n, compareNumber)
	if found {
		return false, nil
	}

	// The document of the saga contains all held messages, and its size is limited.
	bytes := messageSize(message)
	for _, h := range in.doc.Held {
		bytes += messageSize((*consumer.Message)(&h.Message))
	}

	held, limit := len(in.doc.Held), in.h.saga.settings.held
	if held < limit && bytes <= maxHeldBytes {
		in.doc.Held = slices.Insert(in.doc.Held, i, heldMessage{Number: n, Message: storedMessage(*message)})
		return true, nil
	}

	advice := fmt.Sprintf("with number %d they would have %d bytes, above 8 MiB", n, bytes)
	if stuck := in.doc.Stuck; stuck != nil {
		advice = fmt.Sprintf("the step for that number fails: %s; fix the step, or send another message with this number", stuck.Reason)
	} else if held >= limit {
		advice = fmt.Sprintf("the limit is %d; raise WithHeld, or retry this error later", limit)
	}
	return false, fmt.Errorf("%w: %s %s waits for number %d and holds %d messages: %s",
		ErrGap, in.h.saga.name, in.ID(), in.doc.Sequence+1, held, advice)
}

// maxHeldBytes limits the held messages of one saga. Its document must not exceed 16 MiB.
const maxHeldBytes = 8 << 20

// messageSize estimates the size of a held message in bytes.
func messageSize(message *consumer.Message) int {
	n := len(message.Key) + len(message.Value) + 1024
	for _, h := range message.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// nextHeld returns the held message whose turn has come, and whether there is one. It discards held
// messages whose number was handled by another message.
func (in *Instance[S]) nextHeld() (heldMessage, bool) {
	in.doc.Held = slices.DeleteFunc(in.doc.Held, func(message heldMessage) bool { return message.Number <= in.doc.Sequence })

	if message := in.doc.Stuck; message != nil && message.Number <= in.doc.Sequence {
		in.doc.Stuck = nil
	}

	if len(in.doc.Held) == 0 || in.doc.Held[0].Number != in.doc.Sequence+1 {
		return heldMessage{}, false
	}
	return in.doc.Held[0], true
}
