package store

import "github.com/outrelay/outrelay/resume"

// PosOf returns the hexadecimal form in which exceptions store positions. If p has only a time, the
// result sorts before every event of that time.
func PosOf(p resume.Position) string {
	if d := p.Token.Data(); d != "" {
		return d
	}
	return PosAt(p.ClusterTime)
}
