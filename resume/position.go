package resume

import (
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Position is a place in the stream: everything up to and with it is behind. ClusterTime is the time that the server
// gave with the token; it is what a stream is reopened by when the token itself is refused. A position without a token
// stands before every event of its cluster time.
type Position struct {
	Token       Token          `bson:"token"`
	ClusterTime bson.Timestamp `bson:"clusterTime"`
}

// IsZero reports whether the position says nothing at all.
func (p Position) IsZero() bool { return p.Token.IsZero() && p.ClusterTime.IsZero() }

// Sound reports whether the token, if there is one, can be the one that the server gave with ClusterTime. A token that is
// not sound was damaged, or comes from elsewhere; the time is then all that is known.
func (p Position) Sound() bool {
	if p.Token.IsZero() || p.ClusterTime.IsZero() {
		return true
	}
	own, ok := p.Token.ClusterTime()
	return ok && own == p.ClusterTime
}

// Compare orders two positions of one deployment: −1 if p is before q, 0 if they are the same place, 1 if p is after q.
// The order is that of the tokens' bytes, or of the time where the token is not sound; the zero position is before all
// others.
func (p Position) Compare(q Position) int { return strings.Compare(p.order(), q.order()) }

// Time is ClusterTime, or the token's own time where none was kept.
func (p Position) Time() (bson.Timestamp, bool) {
	if !p.ClusterTime.IsZero() {
		return p.ClusterTime, true
	}
	return p.Token.ClusterTime()
}

// Clone copies the token too.
func (p Position) Clone() Position {
	return Position{Token: p.Token.Clone(), ClusterTime: p.ClusterTime}
}

// order is the string by which positions compare: a token's data, or for a bare time the prefix that every token of that
// time begins with, so that it sorts before all of them.
func (p Position) order() string {
	if d := p.Token.Data(); d != "" && p.Sound() {
		return d
	}
	if p.ClusterTime.IsZero() {
		return ""
	}
	return fmt.Sprintf("%02X%08X%08X", timestampType, p.ClusterTime.T, p.ClusterTime.I)
}
