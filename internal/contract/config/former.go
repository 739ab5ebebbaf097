package config

// movedKeys are former keys with their successors.
var movedKeys = map[string]string{"mongodb.state": "state.database", "roles": "tasks", "kafka.lanes": "kafka.requests_per_broker"}

// removedKeys are former keys without a successor, with what takes their place.
var removedKeys = map[string]string{"kafka.delivery": "delete it: every record is sent by an idempotent, fenced producer"}

// movedWords are former values of a key, as key=value, with their successors.
var movedWords = map[string]string{"recording=watermark": "position"}
