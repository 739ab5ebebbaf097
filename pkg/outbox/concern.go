package outbox

import (
	"reflect"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// commitConcern returns the `w` that the running transaction of session will commit with. ok is false if
// none was set, so that the server's default (majority) applies, and if the value cannot be read
// from the driver.
//
// Neither the client nor the session of the driver has a method for it, so the value is read (never
// written) by reflection. Only a warning depends on it. A test detects a driver that names the
// fields differently.
func commitConcern(session *mongo.Session) (concern any, ok bool) {
	// The interface{} in session.clientSession.CurrentWc.W.
	value := reflect.ValueOf(session)
	for _, field := range []string{"clientSession", "CurrentWc", "W"} {
		if value.Kind() != reflect.Pointer || value.IsNil() || value.Elem().Kind() != reflect.Struct {
			return nil, false
		}
		if value = value.Elem().FieldByName(field); !value.IsValid() {
			return nil, false
		}
	}

	if value.Kind() != reflect.Interface || value.IsNil() {
		return nil, false
	}

	switch value = value.Elem(); value.Kind() {
	case reflect.String:
		return value.String(), true
	case reflect.Int:
		return int(value.Int()), true
	default:
		return nil, false
	}
}
