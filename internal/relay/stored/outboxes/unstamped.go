package outboxes

import (
	"encoding/binary"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// An envelope without a stamp has no ts, or one that is (0,0) or no timestamp: only a service that inserts
// Timestamp(0,0) gets a stamp from the server. Nothing is written to such an envelope when it is delivered. If its
// id contains a time, a sweep and the purge use this time, although the clock of the writer may be wrong. It
// limits only how much a sweep repeats, and when an envelope is purged. It never decides that an envelope was
// delivered (N25).

// ClockMargin is how far the time in an id may be from the commit of its envelope. If the relay reads an envelope
// outside of the margin, it no longer uses the times in the ids of that collection ([Registry.MarkIrregularIDs]).
// A day covers a clock that is wrong by hours or in a wrong time zone. A longer margin repeats more after lost
// history.
const ClockMargin = 24 * time.Hour

// Unstamped returns the condition for an envelope without a stamp. In the order of BSON, all stamps are in one
// range, so the index on ts finds the values on both sides of it. ($not and $type would read the whole index.)
func Unstamped() bson.E {
	side := func(op string, timestamp bson.Timestamp) bson.D {
		return bson.D{{Key: "$expr", Value: bson.D{{Key: op, Value: bson.A{"$ts", timestamp}}}}}
	}
	return bson.E{Key: "$or", Value: bson.A{side("$lte", bson.Timestamp{}), side("$gt", lastStamp)}}
}

// IDTime returns the time in an _id of the given BSON type, and false if the id contains none. ObjectIds and
// UUIDs of version 7 contain one.
func IDTime(typ byte, id []byte) (time.Time, bool) {
	switch bson.Type(typ) {
	case bson.TypeObjectID:
		if len(id) != 12 {
			return time.Time{}, false
		}
		return time.Unix(int64(binary.BigEndian.Uint32(id)), 0), true

	case bson.TypeBinary:
		// Four bytes for the length, one for the subtype, and the UUID.
		if len(id) != 4+1+16 || id[4] != bson.TypeBinaryUUID || id[5+6]>>4 != 7 || id[5+8]>>6 != 0b10 {
			return time.Time{}, false
		}
		var ms [8]byte
		copy(ms[2:], id[5:5+6])
		return time.UnixMilli(int64(binary.BigEndian.Uint64(ms[:]))), true
	}
	return time.Time{}, false
}

// IDsBetween returns the conditions for ids with a time from start to end, one for each kind of id. By each, the server
// reads one range of the index on _id. If end is zero, the range has no end. Some UUIDs without a time match as well.
func IDsBetween(start, end time.Time) []bson.E {
	between := func(first func(time.Time) any) bson.E {
		ids := bson.D{{Key: "$gte", Value: first(start)}}
		if !end.IsZero() {
			ids = append(ids, bson.E{Key: "$lt", Value: first(end)})
		}
		return bson.E{Key: "_id", Value: ids}
	}
	return []bson.E{
		between(func(moment time.Time) any { return FirstObjectID(moment) }),
		between(func(moment time.Time) any { return FirstUUID(moment) }),
	}
}

// FirstObjectID returns the lowest ObjectId with the time moment, in whole seconds.
func FirstObjectID(moment time.Time) (id bson.ObjectID) {
	binary.BigEndian.PutUint32(id[:], uint32(max(moment.Unix(), 0)))
	return id
}

// FirstUUID returns the lowest UUID that begins with the time moment, in whole milliseconds, as version 7 does. UUIDs
// of other versions may follow it: use [IDTime] to recognize them.
func FirstUUID(moment time.Time) bson.Binary {
	var millis [8]byte
	binary.BigEndian.PutUint64(millis[:], uint64(max(moment.UnixMilli(), 0)))
	first := make([]byte, 16)
	copy(first, millis[2:])
	return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: first}
}
