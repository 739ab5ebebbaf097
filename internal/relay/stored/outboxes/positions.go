package outboxes

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/resume"
)

// PosAt returns the position of an envelope that did not come from an event of the stream. It consists of a
// cluster time. It can be compared with positions of events, because their bytes begin with their time.
func PosAt(ts bson.Timestamp) string {
	var pos [18]byte
	return string(AppendPosAt(pos[:0], ts))
}

// AppendPosAt appends PosAt.
func AppendPosAt(dst []byte, ts bson.Timestamp) []byte {
	// A claim of scheduled envelopes makes thousands, so fmt is too slow.
	const digits = "0123456789ABCDEF"
	value := uint64(ts.T)<<32 | uint64(ts.I)
	dst = append(dst, '8', '2')
	for i := range 16 {
		dst = append(dst, digits[value>>(60-4*i)&15])
	}
	return dst
}

// PosOf returns the hexadecimal form in which waiting envelopes store positions. If position has only a time, the
// result sorts before every event of that time.
func PosOf(position resume.Position) string {
	if data := position.Token.Data(); data != "" {
		return string(resume.AppendOperation(nil, data))
	}
	return PosAt(position.ClusterTime)
}

// PosWithin returns the position of an envelope that came with others from one event of the stream, such as
// the rename of a collection. The position is after this event and before the next, in the order of the
// stamps. A hyphen sorts before every digit, and no token contains a hyphen.
func PosWithin(pos string, ts bson.Timestamp) string {
	return fmt.Sprintf("%s-%08X%08X", pos, ts.T, ts.I)
}

// IsSwept reports whether a sweep gave the position to an envelope, as [PosAt] or [PosWithin] of its stamp.
func IsSwept(pos string) bool { return len(pos) == len(PosAt(bson.Timestamp{})) || posIsWithin(pos) }

// PosUnstamped reports whether the position was made of a zero stamp. All envelopes without a stamp of the
// server share the zero stamp.
func PosUnstamped(pos string) bool {
	const zero = "0000000000000000"
	return strings.HasSuffix(pos, zero) && (len(pos) == len("82"+zero) || posIsWithin(pos))
}

// PosNumber returns the end of a position that distinguishes envelopes with a zero stamp, in the order of clusterTime
// and n. clusterTime is a cluster time at which the envelope existed.
func PosNumber(clusterTime bson.Timestamp, n uint32) string {
	return fmt.Sprintf("-%08X%08X%08X", clusterTime.T, clusterTime.I, n)
}

// PosWithoutNumber removes the PosNumber at the end of a position.
func PosWithoutNumber(pos string) string {
	if before, number, found := strings.Cut(pos, "-"); found && len(number) == 3*8 {
		return before
	}
	return pos
}

// PosSweptAfter returns a function that reports whether a sweep gave a position to an envelope that may have been committed
// after clusterTime, so that a stream from there contains it. This is an envelope without a stamp that
// was not numbered before clusterTime. It is also an envelope with a stamp that is at most margin older, because its
// transaction may have been open at clusterTime.
func PosSweptAfter(clusterTime bson.Timestamp, margin time.Duration) func(pos string) bool {
	least := PosAt(clusterTime)
	// The subtraction must not wrap around at a time near zero.
	leastStamp := PosAt(bson.Timestamp{T: clusterTime.T - min(clusterTime.T, uint32(margin/time.Second)), I: clusterTime.I})

	return func(pos string) bool {
		if len(pos) == len(least) {
			return pos > leastStamp
		}
		cut := strings.LastIndexByte(pos, '-')
		return cut >= 0 && PosUnstamped(pos[:cut]) && pos[cut+1:] > least[len("82"):]
	}
}

// SweptPattern is a regular expression for the positions that a sweep gave to envelopes that the stream may
// contain as well. [SweptStamp] accepts the same positions.
const SweptPattern = "^82([0-9A-F]{16}$|0{16}-|[0-9A-F]+-0{16}(-|$))"

// SweptStamp returns the stamp of the envelope to which a sweep gave the position, in the form of [PosAt].
// swept is false for the position of an event, and for one that PosWithin made of a stamp: the stream does not
// contain such an envelope.
func SweptStamp(pos string) (stamp string, swept bool) {
	zero := PosAt(bson.Timestamp{})
	if len(pos) == len(zero) {
		return pos, true
	}

	cut := strings.LastIndexByte(pos, '-')
	return zero, PosUnstamped(pos) || cut >= 0 && PosUnstamped(pos[:cut])
}

// posIsWithin reports whether PosWithin made the position.
func posIsWithin(pos string) bool { return strings.Contains(pos, "-") }

// Stamp returns the timestamp that the server wrote into the envelope at its insert, or zero if there
// is none.
func Stamp(doc []byte) bson.Timestamp {
	seconds, i, ok := bson.Raw(doc).Lookup("ts").TimestampOK()
	if !ok {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: seconds, I: i}
}

// WithoutField returns a copy of the document without a field.
func WithoutField(doc bson.Raw, name string) (bson.Raw, error) {
	elements, err := doc.Elements()
	if err != nil {
		return nil, err
	}

	out := make(bson.Raw, 4, len(doc))
	for _, e := range elements {
		if e.Key() != name {
			out = append(out, e...)
		}
	}
	out = append(out, 0)
	binary.LittleEndian.PutUint32(out, uint32(len(out)))
	return out, nil
}

// FirstStampAt returns the first timestamp of the second of moment, or zero for the zero time.
func FirstStampAt(moment time.Time) bson.Timestamp {
	if moment.IsZero() {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: clampSeconds(moment)}
}

// LastStampBefore returns the last timestamp of the second before moment.
func LastStampBefore(moment time.Time) bson.Timestamp {
	if moment.Nanosecond() > 0 {
		moment = moment.Add(time.Second)
	}

	seconds := clampSeconds(moment)
	if seconds == 0 {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: seconds - 1, I: math.MaxUint32}
}

// clampSeconds returns the Unix seconds of moment, within the range of a timestamp.
func clampSeconds(moment time.Time) uint32 { return uint32(min(max(moment.Unix(), 0), math.MaxUint32)) }
