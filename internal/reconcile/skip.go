package reconcile

import (
	"crypto/sha256"
	"encoding/binary"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// skipEntry is what an id takes in memory, with the room that a map keeps free.
const skipEntry = 48

// Skip remembers which envelopes a sweep has handed on that the stream behind it may bring once more: a transaction that was
// open at the end of the stretch stamps its envelopes inside of it, and commits behind it. It is for one goroutine at a
// time; the sweep fills it and then whoever reads the stream asks it.
type Skip struct {
	max     int
	ids     map[[16]byte]struct{}
	to      bson.Timestamp // end of the stretch: what has a later stamp was not swept
	until   bson.Timestamp // what is committed later cannot have been seen by the sweep
	partial bool           // it does not know all that was swept
	buf     []byte
}

// NewSkip makes a set that takes at most that many bytes. When it is full it forgets nothing and takes no more.
func NewSkip(bytes int64) *Skip {
	return &Skip{max: int(max(bytes/skipEntry, 1)), ids: map[[16]byte]struct{}{}}
}

// hashID is a hash of 128 bits of an id and its namespace: a set of hashes that could collide would lose envelopes.
func (s *Skip) hashID(db, coll []byte, idType byte, id []byte) [16]byte {
	b := binary.LittleEndian.AppendUint32(s.buf[:0], uint32(len(db)))
	b = append(b, db...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(coll)))
	b = append(b, coll...)
	s.buf = append(append(b, idType), id...)
	sum := sha256.Sum256(s.buf)
	return [16]byte(sum[:])
}

func (s *Skip) contains(db, coll []byte, idType byte, id []byte) bool {
	if len(s.ids) == 0 {
		return false
	}
	_, ok := s.ids[s.hashID(db, coll, idType, id)]
	return ok
}

// addID remembers an id as long as there is room.
func (s *Skip) addID(db, coll []byte, idType byte, id []byte) {
	if len(s.ids) >= s.max {
		s.partial = true
		return
	}
	s.ids[s.hashID(db, coll, idType, id)] = struct{}{}
}

// Len is the number of ids.
func (s *Skip) Len() int { return len(s.ids) }

// Over reports whether the stream has passed what the sweep can have seen, so that nobody needs the set any more.
func (s *Skip) Over(commit bson.Timestamp) bool { return commit.After(s.until) }

// Swept judges an insert of the stream. known: the sweep has handed this very envelope on. doubtful: it may have, because
// the set was full or a sweep before a restart is not remembered; such an envelope is to be sent, and flagged.
func (s *Skip) Swept(db, coll []byte, idType byte, id, doc []byte) (known, doubtful bool) {
	if ts := Stamp(doc); !ts.IsZero() && ts.After(s.to) {
		return false, false
	}
	if s.contains(db, coll, idType, id) {
		return true, false
	}
	return false, s.partial
}

// Stamp is the time that the server wrote into the envelope when it was inserted; zero if there is none.
func Stamp(doc []byte) bson.Timestamp {
	t, i, ok := bson.Raw(doc).Lookup("ts").TimestampOK()
	if !ok {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: t, I: i}
}

// subtractDuration is t minus d, never below zero.
func subtractDuration(t bson.Timestamp, d time.Duration) bson.Timestamp {
	s := uint32(d / time.Second)
	if t.T <= s {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: t.T - s, I: t.I}
}
