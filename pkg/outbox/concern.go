package outbox

import (
	"reflect"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// commitConcern returns the `w` that the running transaction of s will commit with. ok is false if
// none was set, so that the server's default (majority) applies, and if the value cannot be read
// from the driver.
//
// Neither the client nor the session of the driver has a method for it, so the value is read (never
// written) by reflection. Only a warning depends on it. A test detects a driver that names the
// fields differently.
func commitConcern(s *mongo.Session) (w any, ok bool) {
	// The interface{} in s.clientSession.CurrentWc.W.
	v := reflect.ValueOf(s)
	for _, field := range []string{"clientSession", "CurrentWc", "W"} {
		if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
			return nil, false
		}
		if v = v.Elem().FieldByName(field); !v.IsValid() {
			return nil, false
		}
	}

	if v.Kind() != reflect.Interface || v.IsNil() {
		return nil, false
	}

	switch v = v.Elem(); v.Kind() {
	case reflect.String:
		return v.String(), true
	case reflect.Int:
		return int(v.Int()), true
	default:
		return nil, false
	}
}
