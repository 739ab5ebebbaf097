package store

import (
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// SameDelivery reports whether a document is still what was published: an exception, or one that bears the claim, in that
// delivery.
func SameDelivery(raw bson.Raw, claim string, delivery int32) bool {
	state, _ := raw.Lookup("state").StringValueOK()
	if claim != "" {
		token, _ := raw.Lookup("claim", "token").StringValueOK()
		if token != claim || state != "" {
			return false
		}
	} else if state != "retry" && state != "blocked" && state != "parked" {
		return false
	}
	n, _ := raw.Lookup("delivery").AsInt64OK()
	return max(n, 0) == int64(delivery)
}

// WithoutException is the envelope without what its time as an exception, or a claim, left in it. A due time that is over
// is kept as `scheduledFor`.
func WithoutException(raw bson.Raw) (bson.Raw, error) {
	elems, err := raw.Elements()
	if err != nil {
		return nil, fmt.Errorf("reading an envelope: %w", err)
	}
	kept := make(bson.D, 0, len(elems))
	for _, e := range elems {
		name := e.Key()
		switch name {
		case "state", "pos", "pending", "attempts", "nextAt", "lastError", "history", "claim", "origin", "redelivered":
			continue
		case "dueAt":
			name = "scheduledFor"
		}
		kept = append(kept, bson.E{Key: name, Value: e.Value()})
	}
	return bson.Marshal(kept)
}
