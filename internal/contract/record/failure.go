package record

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
)

// Failure is what dead letters with one cause have in common.
type Failure struct {
	// Fingerprint is a digest of the place of the failure and of the message: 16 hexadecimal digits.
	Fingerprint string
	// Message is the reason without its variable parts, at most 200 bytes.
	Message string
}

// maxFailure bounds the message of a failure, in bytes.
const maxFailure = 200

// variable are the parts of a reason that differ between events: quoted texts, UUIDs, other hexadecimal ids, and numbers.
var variable = regexp.MustCompile(`"[^"]*"|'[^']*'|` + "`[^`]*`" +
	`|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b|\b[0-9a-fA-F]{12,}\b|\d+(?:[.,:]\d+)*`)

// FailureOf returns the failure of a reason at a place, whose parts have a fixed order: who gave up, the class, the topic, the type.
func FailureOf(reason string, place ...string) Failure {
	message := Clip(variable.ReplaceAllStringFunc(reason, func(part string) string {
		switch part[0] {
		case '"', '\'', '`':
			return string(part[0]) + "…" + string(part[0])
		}
		if len(part) >= 12 && strings.ContainsAny(part, "abcdefABCDEF-") {
			return "ID"
		}
		return "N"
	}), maxFailure)
	digest := sha256.Sum256([]byte(strings.Join(append(place, message), "\x00")))
	return Failure{Fingerprint: hex.EncodeToString(digest[:8]), Message: message}
}
