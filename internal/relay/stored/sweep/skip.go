package sweep

import (
	"crypto/sha256"
	"encoding/binary"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// skipEntry is the memory of one id in bytes, including the room that a map keeps free.
const skipEntry = 48

// Skip is the set of envelopes that a sweep has delivered and that the following stream may repeat. A
// transaction that was open at the end of the stretch stamps its envelopes within the stretch, and
// commits after it. Only one goroutine may use a Skip at a time: first the sweep, which fills it, and
// then the reader of the stream.
type Skip struct {
	max     int
	ids     map[[16]byte]struct{}
	to      bson.Timestamp // end of the stretch: an envelope with a later stamp was not swept
	until   bson.Timestamp // the sweep cannot have seen a later commit
	partial bool           // some swept envelopes are not in the set
	buf     []byte
}

// NewSkip returns a set that uses at most the given bytes. When it is full, it keeps its ids and takes
// no more.
func NewSkip(bytes int64) *Skip {
	return &Skip{max: int(max(bytes/skipEntry, 1)), ids: map[[16]byte]struct{}{}}
}

// Bounds returns the end of the stretch that was swept, and the time after which no commit can have been swept.
func (s *Skip) Bounds() (end, until bson.Timestamp) { return s.to, s.until }

// Doubt makes the set cover the sweep of an earlier process, whose ids are unknown: each envelope within its bounds is doubtful.
func (s *Skip) Doubt(end, until bson.Timestamp) { s.to, s.until, s.partial = end, until, true }

// hashID returns 128 bits of a cryptographic hash of an id and its namespace. Hashes that could collide
// would lose envelopes.
func (s *Skip) hashID(db, coll []byte, idType byte, id []byte) [16]byte {
	data := binary.LittleEndian.AppendUint32(s.buf[:0], uint32(len(db)))
	data = append(data, db...)
	data = binary.LittleEndian.AppendUint32(data, uint32(len(coll)))
	data = append(data, coll...)
	s.buf = append(append(data, idType), id...)
	sum := sha256.Sum256(s.buf)
	return [16]byte(sum[:])
}

// contains reports whether the set has the id.
func (s *Skip) contains(db, coll []byte, idType byte, id []byte) bool {
	if len(s.ids) == 0 {
		return false
	}
	_, ok := s.ids[s.hashID(db, coll, idType, id)]
	return ok
}

// addID adds an id if there is room.
func (s *Skip) addID(db, coll []byte, idType byte, id []byte) {
	if len(s.ids) >= s.max {
		s.partial = true
		return
	}
	s.ids[s.hashID(db, coll, idType, id)] = struct{}{}
}

// IsEmpty reports whether the set covers no part of the stream: no sweep has filled it since it was cleared.
func (s *Skip) IsEmpty() bool { return s.to.IsZero() }

// Clear empties the set and frees its memory.
func (s *Skip) Clear() { *s = *NewSkip(int64(s.max) * skipEntry) }

// IsPast reports whether commit is later than everything that the sweep can have seen, so that the set is
// no longer needed.
func (s *Skip) IsPast(commit bson.Timestamp) bool { return commit.After(s.until) }

// WasSwept reports whether the sweep has delivered an insert of the stream. known means that it has.
// doubtful means that it may have, because the set was full or an earlier process made a part of the
// sweep. Send a doubtful envelope, marked as redelivered.
func (s *Skip) WasSwept(db, coll []byte, idType byte, id, doc []byte) (known, doubtful bool) {
	ts := outboxes.Stamp(doc)
	if !ts.IsZero() && ts.After(s.to) {
		return false, false
	}
	if s.contains(db, coll, idType, id) {
		return true, false
	}
	return false, s.partial
}
