package saga

import (
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// held is a message that came before its turn.
type held struct {
	Number  int64   `bson:"number"`
	Message message `bson:"message"`
}

// stuck is the held message whose step failed when its turn came.
type stuck struct {
	Number  int64  `bson:"number" json:"number"`
	Message string `bson:"message" json:"message"` // its id
	Reason  string `bson:"reason" json:"reason"`
}

// message is a consumer.Message as a saga's document keeps it.
type message struct {
	Topic         string    `bson:"topic,omitempty"`
	Partition     int32     `bson:"partition"`
	Offset        int64     `bson:"offset"`
	LeaderEpoch   int32     `bson:"leaderEpoch"`
	Time          time.Time `bson:"time"`
	Key           []byte    `bson:"key"`
	Value         []byte    `bson:"value"`
	Headers       []header  `bson:"headers,omitempty"`
	ID            string    `bson:"id"`
	Namespace     string    `bson:"namespace,omitempty"`
	Type          string    `bson:"type"`
	AggregateType string    `bson:"aggregateType,omitempty"`
	AggregateID   string    `bson:"aggregateId,omitempty"`
	ContentType   string    `bson:"contentType,omitempty"`
	SchemaVersion string    `bson:"schemaVersion,omitempty"`
	Delivery      int       `bson:"delivery,omitempty"`
	Redelivered   bool      `bson:"redelivered,omitempty"`
	Attempt       int       `bson:"attempt,omitempty"`
	Group         string    `bson:"group,omitempty"`
}

type header struct {
	Key   string `bson:"k"`
	Value []byte `bson:"v"`
}

func keep(m *consumer.Message) message {
	hs := make([]header, len(m.Headers))
	for i, h := range m.Headers {
		hs[i] = header(h)
	}
	return message{
		Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, LeaderEpoch: m.LeaderEpoch, Time: m.Time, Key: m.Key, Value: m.Value,
		Headers: hs, ID: m.ID, Namespace: m.Namespace, Type: m.Type, AggregateType: m.AggregateType, AggregateID: m.AggregateID,
		ContentType: m.ContentType, SchemaVersion: m.SchemaVersion, Delivery: m.Delivery, Redelivered: m.Redelivered,
		Attempt: m.Attempt, Group: m.Group,
	}
}

func (m *message) restore() *consumer.Message {
	var hs []consumer.Header
	for _, h := range m.Headers {
		hs = append(hs, consumer.Header(h))
	}
	return &consumer.Message{
		Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, LeaderEpoch: m.LeaderEpoch, Time: m.Time, Key: m.Key, Value: m.Value,
		Headers: hs, ID: m.ID, Namespace: m.Namespace, Type: m.Type, AggregateType: m.AggregateType, AggregateID: m.AggregateID,
		ContentType: m.ContentType, SchemaVersion: m.SchemaVersion, Delivery: m.Delivery, Redelivered: m.Redelivered,
		Attempt: m.Attempt, Group: m.Group,
	}
}

// savepoint is what one step may change of an instance.
type savepoint[S any, I Identifier] struct {
	state     bson.Raw
	doc       document[S]
	out       outgoing
	completed bool
}

func (in *Instance[S, I]) savepoint() (*savepoint[S, I], error) {
	state, err := bson.Marshal(document[S]{State: in.State})
	if err != nil {
		return nil, fmt.Errorf("encoding saga %s %s: %w", in.h.saga.name, in.out.id, err)
	}
	s := &savepoint[S, I]{state: state, doc: in.doc, out: *in.out, completed: in.completed}
	s.doc.Timeouts, s.doc.Compensations = slices.Clone(in.doc.Timeouts), slices.Clone(in.doc.Compensations)
	s.out.timeouts = slices.Clone(in.out.timeouts) // the others only grow
	return s, nil
}

func (s *savepoint[S, I]) restore(in *Instance[S, I]) error {
	var d document[S]
	if err := bson.Unmarshal(s.state, &d); err != nil {
		return fmt.Errorf("decoding saga %s %s: %w", in.h.saga.name, in.out.id, err)
	}
	in.State, in.doc, *in.out, in.completed = d.State, s.doc, s.out, s.completed
	return nil
}

func byNumber(h held, n int64) int { return int(min(max(h.Number-n, -1), 1)) }

// hold keeps a message until its turn; one whose number is held already is ignored.
func (in *Instance[S, I]) hold(n int64, m *consumer.Message) (changed bool, err error) {
	i, found := slices.BinarySearchFunc(in.doc.Held, n, byNumber)
	if found {
		return false, nil
	}
	bytes := sizeOf(m)
	for _, h := range in.doc.Held {
		bytes += sizeOf(h.Message.restore())
	}
	if limit := in.h.saga.heldLimit; len(in.doc.Held) >= limit || bytes > maxHeldBytes {
		e := &GapError{Saga: in.h.saga.name, ID: in.out.id, Next: in.doc.Sequence + 1, Got: n, Held: len(in.doc.Held), Limit: limit}
		if e.Held < limit {
			e.Bytes = bytes
		}
		if s := in.doc.Stuck; s != nil {
			e.Stuck = s.Reason
		}
		return false, e
	}
	in.doc.Held = slices.Insert(in.doc.Held, i, held{Number: n, Message: keep(m)})
	return true, nil
}

// maxHeldBytes bounds the held messages of one saga, whose document has at most 16 MiB.
const maxHeldBytes = 8 << 20

func sizeOf(m *consumer.Message) int {
	n := len(m.Key) + len(m.Value) + 1024
	for _, h := range m.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// next is the held message whose turn it is now. Those whose number was handled by another message are forgotten.
func (in *Instance[S, I]) next() (held, bool) {
	in.doc.Held = slices.DeleteFunc(in.doc.Held, func(h held) bool { return h.Number <= in.doc.Sequence })
	if s := in.doc.Stuck; s != nil && s.Number <= in.doc.Sequence {
		in.doc.Stuck = nil
	}
	if len(in.doc.Held) == 0 || in.doc.Held[0].Number != in.doc.Sequence+1 {
		return held{}, false
	}
	return in.doc.Held[0], true
}
