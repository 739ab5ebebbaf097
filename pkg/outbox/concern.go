package outbox

import (
	"reflect"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// commitConcern is the `w` that the running transaction of s will commit with. ok is false when none was set, which leaves
// it to the server (whose default is majority), and when the driver does not show it.
//
// The driver has no method for it, neither on the client nor on the session, so the value is read, never written, by
// reflection. It decides over a warning and nothing else; a test notices when a new driver names the fields otherwise.
func commitConcern(s *mongo.Session) (w any, ok bool) {
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
