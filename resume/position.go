package resume

import (
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Position is a place in the stream. Everything up to it, inclusive, is done.
type Position struct {
	// Token is the resume token. A position without a token is before every event of its cluster
	// time.
	Token Token `bson:"token"`

	// ClusterTime is the time that the server sent with the token. A stream is opened at this time
	// if the server rejects the token.
	ClusterTime bson.Timestamp `bson:"clusterTime"`
}

// IsZero reports whether the position has neither a token nor a time.
func (p Position) IsZero() bool { return p.Token.IsZero() && p.ClusterTime.IsZero() }

// Sound reports whether the token can be the one that the server sent with ClusterTime. Without a
// token or a time it returns true. A token that is not sound is damaged or belongs to another
// position, so only the time is usable.
func (p Position) Sound() bool {
	if p.Token.IsZero() || p.ClusterTime.IsZero() {
		return true
	}

	own, ok := p.Token.ClusterTime()
	return ok && own == p.ClusterTime
}

// Compare orders two positions of one deployment. It returns −1 if p is before position, 0 if they are the
// same place, and 1 if p is after position. It compares the bytes of the tokens, or the time of a token
// that is not sound. The zero position is before all others.
func (p Position) Compare(position Position) int {
	return compareData(p.sortKey(), position.sortKey())
}

// Time returns ClusterTime, or else the time in the token. It returns false if there is neither.
func (p Position) Time() (bson.Timestamp, bool) {
	if !p.ClusterTime.IsZero() {
		return p.ClusterTime, true
	}
	return p.Token.ClusterTime()
}

// Clone returns a copy that shares no memory with p.
func (p Position) Clone() Position {
	return Position{Token: p.Token.Clone(), ClusterTime: p.ClusterTime}
}

// sortKey returns the text by which positions are compared: the data of the token, or for a
// position without a token the prefix of all tokens of its time, so that it sorts before them.
func (p Position) sortKey() string {
	if data := p.Token.Data(); data != "" && p.Sound() {
		return data
	}
	if p.ClusterTime.IsZero() {
		return ""
	}
	return fmt.Sprintf("%02X%08X%08X", timestampType, p.ClusterTime.T, p.ClusterTime.I)
}
