package outboxes

import (
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/resume"
)

// PosAt is the position of an envelope that no event of the stream brought, made of a time of the cluster: it compares with
// those of events, whose bytes begin with their time.
func PosAt(ts bson.Timestamp) string { return fmt.Sprintf("82%08X%08X", ts.T, ts.I) }

// PosOf returns the hexadecimal form in which exceptions store positions. If p has only a time, the
// result sorts before every event of that time.
func PosOf(p resume.Position) string {
	if d := p.Token.Data(); d != "" {
		return d
	}
	return PosAt(p.ClusterTime)
}

// PosWithin is the position of an envelope that an event of the stream brought along with others, as the rename of a
// collection does: behind that event and before the next one, in the order of the stamps. A hyphen comes before every
// digit, and no token holds one.
func PosWithin(pos string, ts bson.Timestamp) string {
	return fmt.Sprintf("%s-%08X%08X", pos, ts.T, ts.I)
}

// PosUnstamped reports whether the position was made of a zero stamp, which all envelopes without a stamp of the server share.
func PosUnstamped(pos string) bool {
	const zero = "0000000000000000"
	return strings.HasSuffix(pos, zero) && (len(pos) == len("82"+zero) || PosIsWithin(pos))
}

// PosNumbered tells positions that were made of a zero stamp apart, in the order of at and n. at is a cluster time at which the
// envelope was there.
func PosNumbered(pos string, at bson.Timestamp, n uint32) string {
	return fmt.Sprintf("%s-%08X%08X%08X", pos, at.T, at.I, n)
}

// PosSweptBehind reports whether a sweep gave the position to an envelope that may have been committed behind a cluster time, so that
// a stream from there brings it: one without a stamp that was numbered no earlier, or one whose stamp is at most margin older, of a
// transaction that was open then.
func PosSweptBehind(pos string, after bson.Timestamp, margin time.Duration) bool {
	least := PosAt(after)
	if len(pos) == len(least) {
		return pos > PosAt(bson.Timestamp{T: after.T - min(after.T, uint32(margin/time.Second)), I: after.I})
	}
	cut := strings.LastIndexByte(pos, '-')
	return cut >= 0 && PosUnstamped(pos[:cut]) && pos[cut+1:] > least[len("82"):]
}

// PosIsWithin reports whether PosWithin made the position.
func PosIsWithin(pos string) bool { return strings.Contains(pos, "-") }

// Stamp returns the timestamp that the server wrote into the envelope at its insert, or zero if there
// is none.
func Stamp(doc []byte) bson.Timestamp {
	t, i, ok := bson.Raw(doc).Lookup("ts").TimestampOK()
	if !ok {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: t, I: i}
}
