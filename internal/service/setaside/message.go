package setaside

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"time"
)

// ErrTooLarge reports that a record does not fit in a document.
var ErrTooLarge = errors.New("the record is too large to be set aside")

// maxRecordBytes leaves room for the rest of the document, which has at most 16 MiB.
const maxRecordBytes = 12 << 20

// Digest identifies a message or a queue.
type Digest [16]byte

// Place is a partition for a handler.
type Place struct {
	Handler   string `bson:"h"` // "<group>/<name>"
	Topic     string `bson:"t"`
	Partition int32  `bson:"p"`
}

// Message is a message that is set aside: its record and its failed attempts.
type Message struct {
	ID         Digest `bson:"_id"`
	Place      `bson:",inline"`
	Queue      Digest `bson:"q"`
	Generation int64  `bson:"g"`
	Offset     int64  `bson:"o"`

	LeaderEpoch int32     `bson:"e"`
	Time        time.Time `bson:"ts"`
	Key         []byte    `bson:"k"` // nil: null
	Value       []byte    `bson:"v"` // nil: null
	Headers     []Header  `bson:"hd"`
	Requested   bool      `bson:"-"`            // an operator has requested an attempt, which was not made yet
	Discarded   *Discard  `bson:"dc,omitempty"` // nil: not discarded

	Attempts `bson:",inline"`

	// ReadAt is when First has read the message, by the server's clock. Postpone ends only the requests from before.
	ReadAt time.Time `bson:"-"`
}

// Discard is the order of an operator to give the message up without another attempt.
type Discard struct {
	By string    `bson:"by"`
	At time.Time `bson:"at"` // by the server's clock
}

// Header is a header of the record.
type Header struct {
	Key   string `bson:"k"`
	Value []byte `bson:"v"` // nil: null
}

// Attempts describes the failed attempts of a message.
type Attempts struct {
	Failed  int       `bson:"n"` // 0: untried
	Spared  int       `bson:"s"` // failures in Failed that do not count
	History []Failure `bson:"hist,omitempty"`

	// Elapsed is the time since the first failure.
	Elapsed time.Duration `bson:"-"`
}

// Failure is a failed attempt.
type Failure struct {
	At      time.Time `bson:"at"`
	Attempt int       `bson:"attempt"`
	Class   string    `bson:"class"`
	Reason  string    `bson:"reason"`
}

// CheckSize returns ErrTooLarge if the record of m does not fit in a document.
func (m *Message) CheckSize() error {
	if m.Size() > maxRecordBytes {
		return ErrTooLarge
	}
	return nil
}

// Size returns the bytes of the key, the value and the headers of the record.
func (m *Message) Size() int {
	n := len(m.Key) + len(m.Value)
	for _, h := range m.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// MessageID returns the id of the message at an offset. identity distinguishes a record from another one that took its
// offset after the log was truncated.
func MessageID(place Place, generation, offset int64, identity string) Digest {
	id := make([]byte, 0, 64+len(place.Handler)+len(place.Topic)+len(identity))
	id = appendText(id, place.Handler)
	id = appendText(id, place.Topic)
	id = binary.BigEndian.AppendUint32(id, uint32(place.Partition))
	id = binary.BigEndian.AppendUint64(id, uint64(generation))
	id = binary.BigEndian.AppendUint64(id, uint64(offset))
	id = append(id, identity...)
	return newDigest(id)
}

// KeyQueue returns the queue of a key. Queues of different partitions and handlers are different, although their digests
// are equal.
func KeyQueue(key []byte) Digest { return newDigest(key) }

// appendText appends text and its length, so that two lists of texts never have the same bytes.
func appendText(dst []byte, text string) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(text)))
	return append(dst, text...)
}

func newDigest(data []byte) Digest {
	sum := sha256.Sum256(data)
	return Digest(sum[:len(Digest{})])
}
