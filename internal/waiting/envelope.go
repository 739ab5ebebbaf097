package waiting

import (
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// isSameDelivery reports whether an envelope is still the one that was published: it has that delivery, and
// it is an exception or, if claim is not empty, has that claim.
func isSameDelivery(raw bson.Raw, claim string, delivery int32) bool {
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

// removeException returns the envelope without the fields of an exception and of a claim. It renames
// `dueAt` to `scheduledFor`.
func removeException(raw bson.Raw) (bson.Raw, error) {
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
